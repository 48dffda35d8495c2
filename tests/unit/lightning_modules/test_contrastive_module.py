import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.contrastive_module import ContrastiveModule, ContrastiveTrainingConfig
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.models.contrastive import ContrastiveConfig, OpenClipConfig, append_end_of_text

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

CAPTIONS = ["red diamond", "blue square", "green diamond", "red square"]
NETWORK = ContrastiveConfig(
    image_size=32, embed_dim=16, vision_width=4, text_tokens=10, text_width=16, text_heads=2, text_layers=1
)
TRAINING = ContrastiveTrainingConfig(
    optimizer=OptimizerConfig(learning_rate=1e-3, beta2=0.98, epsilon=1e-6, weight_decay=0.2, decay_embeddings=True),
    schedule=ScheduleConfig(name="cosine", warmup_steps=1, total_steps=10),
)
VISION_TRANSFORMER: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 32},
    "text_cfg": {"context_length": 12, "width": 16, "heads": 2, "layers": 1},
}


@pytest.fixture(scope="module")
def tokenizer() -> str:
    return CaptionTokenizer.train(CAPTIONS, vocabulary_size=300).to_json()


@pytest.fixture
def module(tokenizer: str) -> ContrastiveModule:
    torch.manual_seed(0)
    return ContrastiveModule(NETWORK, TRAINING, tokenizer)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randint(0, 256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.fixture
def open_clip_folder(tmp_path: Path) -> Path:
    """A network in open_clip's own layout, with its weights and its tokenizer."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    torch.manual_seed(1)
    torch.save(open_clip.CLIP(**VISION_TRANSFORMER).state_dict(), folder / "open_clip_pytorch_model.bin")
    preprocessing = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}
    config = {"model_cfg": VISION_TRANSFORMER, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


def _loader(images: Tensor, captions: list[str]) -> DataLoader[Any]:
    data: Any = [{"image": image, "caption": caption} for image, caption in zip(images, captions, strict=True)]
    return DataLoader(data, batch_size=len(captions))


def _fit(module: ContrastiveModule, images: Tensor, captions: list[str], **options: Any) -> Trainer:
    loader = _loader(images, captions)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **options)
    trainer.fit(module, loader, loader)
    return trainer


def test_features_are_unit_vectors_and_scores_their_cosines(module: ContrastiveModule, images: Tensor) -> None:
    image_features, text_features = module.encode_images(images), module.encode_captions(CAPTIONS[:2])
    for features in (image_features, text_features):
        assert features.dtype == torch.float32
        torch.testing.assert_close(features.norm(dim=1), torch.ones(len(features)))
    torch.testing.assert_close(module.score(images, CAPTIONS[:2]), image_features @ text_features.T)


def test_features_equal_those_of_open_clip(module: ContrastiveModule, images: Tensor) -> None:
    mean, std = (torch.tensor(open_clip.OPENAI_DATASET_MEAN), torch.tensor(open_clip.OPENAI_DATASET_STD))
    pixels = (images / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    module.network.eval()
    expected = module.network.encode_image(pixels, normalize=True)
    torch.testing.assert_close(module.encode_images(images), expected)


def test_chunks_do_not_change_features(module: ContrastiveModule, images: Tensor) -> None:
    torch.testing.assert_close(module.encode_images(images, max_batch=3), module.encode_images(images))
    torch.testing.assert_close(module.encode_captions(CAPTIONS, max_batch=3), module.encode_captions(CAPTIONS))


def test_encoding_leaves_modes_and_batch_statistics_alone(module: ContrastiveModule, images: Tensor) -> None:
    module.train()
    module.network.visual.bn1.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.score(images, CAPTIONS)
    assert module.training
    assert not module.network.visual.bn1.training
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_encoding_is_fp32_under_autocast(module: ContrastiveModule, images: Tensor) -> None:
    expected = module.score(images, CAPTIONS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = module.score(images, CAPTIONS)
    assert torch.equal(scores, expected)


def test_module_in_bfloat16_returns_fp32_unit_features(module: ContrastiveModule, images: Tensor) -> None:
    features = module.to(torch.bfloat16).encode_images(images)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=1), torch.ones(4))


def test_images_of_other_sizes_are_resized_and_cropped_to_the_middle(module: ContrastiveModule) -> None:
    wide = torch.zeros(1, 3, 64, 128, dtype=torch.uint8)
    wide[..., 32:96] = torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(0))
    # Antialiasing reaches two pixels of the resized image over the edge of the crop.
    cosine = (module.encode_images(wide) * module.encode_images(wide[..., 32:96])).sum()
    assert cosine > 0.99


@pytest.mark.parametrize("argument", ["captions", "images"])
def test_wrong_types_are_refused(module: ContrastiveModule, images: Tensor, argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        module.score(images / 255, CAPTIONS) if argument == "images" else module.score(images, "red diamond")


def test_end_of_text_follows_the_caption_and_is_the_highest_id(module: ContrastiveModule) -> None:
    tokens = module._tokenize(["red", "red diamond red diamond red diamond"])
    assert tokens.shape == (2, NETWORK.text_tokens)
    end_of_text = module.tokenizer.vocabulary_size if module.tokenizer else 0
    assert module.network.vocab_size == end_of_text + 1
    for row in tokens.tolist():
        end = row.index(end_of_text)
        assert max(row) == end_of_text
        assert 0 not in row[:end]
        assert set(row[end + 1 :]) <= {0}


def test_end_of_text_of_a_full_row_takes_the_added_position() -> None:
    assert append_end_of_text(torch.tensor([[5, 3], [0, 0]]), 9).tolist() == [[5, 3, 9], [9, 0, 0]]


def test_padding_behind_the_end_does_not_change_a_caption(module: ContrastiveModule) -> None:
    alone = module.encode_captions(["red"])
    torch.testing.assert_close(module.encode_captions(["red", "blue square"])[:1], alone)


def test_training_learns_the_batch_and_keeps_the_logit_scale_in_bounds(
    module: ContrastiveModule, images: Tensor
) -> None:
    with torch.no_grad():
        module.network.logit_scale.fill_(math.log(100) + 1)
    trainer = _fit(module, images, CAPTIONS, max_steps=2, limit_val_batches=0)
    assert module.network.logit_scale.item() <= math.log(100)
    torch.manual_seed(0)
    with torch.no_grad():
        module.network.logit_scale.fill_(math.log(10))
    module.training_config = dataclasses.replace(
        TRAINING,
        optimizer=dataclasses.replace(TRAINING.optimizer, learning_rate=1e-2),
        schedule=dataclasses.replace(TRAINING.schedule, total_steps=30),
    )
    trainer = _fit(module, images, CAPTIONS, max_steps=30, limit_val_batches=0)
    assert trainer.callback_metrics["train/loss"] < 0.3
    assert trainer.callback_metrics["train/accuracy"] == 1.0


def test_validation_and_test_log_loss_and_accuracy(module: ContrastiveModule, images: Tensor) -> None:
    trainer = _fit(module, images, CAPTIONS, max_steps=1)
    assert {"val/loss", "val/accuracy"} <= set(trainer.callback_metrics)
    trainer.test(module, _loader(images, CAPTIONS), verbose=False)
    assert {"test/loss", "test/accuracy"} <= set(trainer.callback_metrics)


def test_weight_decay_spares_gains_biases_and_the_logit_scale(module: ContrastiveModule) -> None:
    (optimizer,), _ = module.configure_optimizers()
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (TRAINING.optimizer.weight_decay, 0.0)
    assert all(parameter.ndim > 1 for parameter in decayed["params"])
    assert any(parameter is module.network.logit_scale for parameter in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(module.parameters()))


def test_checkpoint_is_complete(module: ContrastiveModule, images: Tensor, tmp_path: Path) -> None:
    trainer = _fit(module, images, CAPTIONS, max_steps=2, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "contrastive.ckpt")
    for loaded in (
        ContrastiveModule.load_from_checkpoint(tmp_path / "contrastive.ckpt", weights_only=True),
        ContrastiveModule(tmp_path / "contrastive.ckpt"),
    ):
        assert torch.equal(loaded.score(images, CAPTIONS), module.score(images, CAPTIONS))


def test_folder_of_open_clip_is_needed_only_once(open_clip_folder: Path, images: Tensor, tmp_path: Path) -> None:
    module = ContrastiveModule(OpenClipConfig(model_name=f"local-dir:{open_clip_folder}"), TRAINING)
    expected = open_clip.create_model(f"local-dir:{open_clip_folder}").eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{open_clip_folder}")(CAPTIONS)
    torch.testing.assert_close(module.encode_captions(CAPTIONS), expected.encode_text(tokens, normalize=True))
    pixels = (images / 255 - 0.5) / 0.25
    torch.testing.assert_close(module.encode_images(images), expected.encode_image(pixels, normalize=True))
    trainer = _fit(module, images, CAPTIONS, max_steps=1, limit_val_batches=0)
    trainer.save_checkpoint(tmp_path / "contrastive.ckpt")
    for path in open_clip_folder.iterdir():
        path.unlink()
    open_clip_folder.rmdir()
    loaded = ContrastiveModule.load_from_checkpoint(tmp_path / "contrastive.ckpt", weights_only=True)
    assert torch.equal(loaded.score(images, CAPTIONS), module.score(images, CAPTIONS))


def test_own_tokenizer_goes_with_an_open_clip_network_of_its_size(open_clip_folder: Path, tokenizer: str) -> None:
    config: dict[str, Any] = {**VISION_TRANSFORMER, "text_cfg": {**VISION_TRANSFORMER["text_cfg"], "vocab_size": 12}}
    with pytest.raises(ValueError, match="the network 12; it must have one more, the end of text"):
        ContrastiveModule(OpenClipConfig(model_name="tiny", model_config=config), TRAINING, tokenizer)
    vocabulary_size = CaptionTokenizer.from_json(tokenizer).vocabulary_size
    config["text_cfg"]["vocab_size"] = vocabulary_size + 1
    module = ContrastiveModule({"model_name": "tiny", "model_config": config}, {}, tokenizer)
    assert module.encode_captions(CAPTIONS).shape == (4, 16)


def test_names_of_open_clip_are_known_and_others_refused(images: Tensor) -> None:
    with pytest.raises(ValueError, match=r"model_name \(ViT-nothing\) is unknown to open_clip"):
        ContrastiveModule(OpenClipConfig(model_name="ViT-nothing"), TRAINING)


def test_named_model_is_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = ContrastiveModule(OpenClipConfig(model_name="ViT-L-14"), TRAINING)
    assert sum(parameter.numel() for parameter in module.parameters()) == 427_616_513


def test_own_network_needs_a_tokenizer(tokenizer: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer \(None\) is needed"):
        ContrastiveModule(NETWORK, TRAINING)
    with pytest.raises(ValueError, match=r"tokenizer \(mine.json\) has no effect beside that of the checkpoint"):
        ContrastiveModule(tmp_path / "contrastive.ckpt", TRAINING, "mine.json")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image_size": 48}, r"image_size \(48\) must be a multiple of 32"),
        ({"vision_layers": (1, 1, 0, 1)}, r"vision_layers \(\(1, 1, 0, 1\)\) must be at least 1"),
        ({"text_width": 30, "text_heads": 4}, r"text_width \(30\) must be divisible by text_heads \(4\)"),
        ({"embed_dim": 0}, r"embed_dim \(0\) must be at least 1"),
    ],
)
def test_network_sizes_that_do_not_work_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContrastiveConfig(**sizes)


def test_pretrained_beside_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pretrained \(openai\) has no effect with model_name \(local-dir:tiny\)"):
        OpenClipConfig(model_name="local-dir:tiny", pretrained="openai")


def test_lists_from_yaml_make_the_same_configuration() -> None:
    assert ContrastiveConfig(vision_layers=[1, 1, 1, 1]) == ContrastiveConfig()  # type: ignore[arg-type]
