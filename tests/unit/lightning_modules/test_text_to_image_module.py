"""The module around the transformer: loss, caption dropout, its self-contained checkpoint and what it is built from."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn.functional import cross_entropy

from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule, DiscreteVAETrainingConfig
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule
from lightning_dalle.lightning_modules.text_to_image_training import TextToImageTrainingConfig
from tests.rounding import assert_only_rounded
from tests.unit.lightning_modules.tiny_text_to_image import (
    CAPTIONS,
    NETWORK,
    TRAINER,
    TRAINING,
    VAE,
    images,
    loader,
    tiny_module,
    tokenizer_json,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


@pytest.fixture(scope="module")
def module() -> TextToImageModule:
    return tiny_module(std=1.0)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _silent(module: TextToImageModule) -> TextToImageModule:
    """For steps taken without a Trainer, where Lightning warns of each log."""
    module.log_dict = lambda *arguments, **options: None  # type: ignore[method-assign]
    return module


def _batch() -> dict[str, Any]:
    return {"image": images(), "caption": CAPTIONS}


def test_loss_weighs_text_and_image_by_their_own_counts() -> None:
    module = _silent(tiny_module(training=dataclasses.replace(TRAINING, caption_dropout=0.0)))
    text = module.tokenizer.encode(CAPTIONS, 8)
    assert (text == 0).any()
    image = module.discrete_vae.encode(images())
    text_logits, image_logits = module.network(text, image)
    expected = []
    for dtype in (torch.float32, torch.float64):
        text_loss = cross_entropy(text_logits[text != 0].to(dtype), text[text != 0])
        image_loss = cross_entropy(image_logits.flatten(0, 1).to(dtype), image.flatten())
        expected.append(text_loss / 8 + image_loss * 7 / 8)
    assert_only_rounded(module.training_step(_batch(), 0), *expected)


def test_untrained_losses_are_those_of_uniform_guesses() -> None:
    module = _silent(tiny_module())
    for parameter in module.network.parameters():
        torch.nn.init.zeros_(parameter)
    plain, exact = (
        torch.tensor(280, dtype=dtype).log() / 8 + torch.tensor(16, dtype=dtype).log() * 7 / 8
        for dtype in (torch.float32, torch.float64)
    )
    assert_only_rounded(module.training_step(_batch(), 0), plain, exact)


def test_text_tokens_of_the_batch_are_used_and_left_alone() -> None:
    module = _silent(tiny_module(training=dataclasses.replace(TRAINING, caption_dropout=1.0)))
    tokens = torch.full((3, 8), 5)
    batch = {"image": images(), "caption": CAPTIONS, "text_tokens": tokens}
    seen: list[torch.Tensor] = []
    handle = module.network.register_forward_pre_hook(lambda network, arguments: seen.append(arguments[0]))
    module.training_step(batch, 0)
    module.validation_step(batch, 0)
    handle.remove()
    assert seen[0].tolist() == torch.zeros(3, 8).tolist()
    assert seen[1].tolist() == tokens.tolist() == torch.full((3, 8), 5).tolist()


def test_dropped_captions_are_a_function_of_seed_step_and_batch() -> None:
    def dropped(seed: int, batch_idx: int) -> list[bool]:
        module = _silent(tiny_module(training=dataclasses.replace(TRAINING, caption_dropout=0.5, seed=seed)))
        seen: list[torch.Tensor] = []
        module.network.register_forward_pre_hook(lambda network, arguments: seen.append(arguments[0]))
        module.training_step({"image": images(64), "text_tokens": torch.ones(64, 8, dtype=torch.long)}, batch_idx)
        return (seen[0] == 0).all(1).tolist()

    first = dropped(0, 0)
    torch.rand(3)  # The global stream has no part in it.
    assert dropped(0, 0) == first
    assert dropped(0, 1) != first
    assert dropped(1, 0) != first
    # 64 draws at one half: five standard deviations are 20.
    assert 12 < sum(first) < 52


def test_noise_is_shown_but_never_asked_for() -> None:
    noisy = dataclasses.replace(TRAINING, caption_dropout=0.0, image_token_noise=1.0)
    module = _silent(tiny_module(training=noisy))
    batch = {"image": images(64), "text_tokens": torch.ones(64, 8, dtype=torch.long)}
    image_tokens = module.discrete_vae.encode(batch["image"])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    module.network.register_forward_pre_hook(lambda network, arguments: seen.append(arguments))
    loss = module.training_step(batch, 0)
    module.training_step(batch, 0)
    module.training_step(batch, 1)
    module.validation_step(batch, 0)
    shown = [arguments[1] for arguments in seen]
    assert torch.equal(shown[0], shown[1])
    assert not torch.equal(shown[0], shown[2])
    assert torch.equal(shown[3], image_tokens)
    text_logits, image_logits = module.network(*seen[0])
    expected = []
    for dtype in (torch.float32, torch.float64):
        text_loss = cross_entropy(text_logits.flatten(0, 1).to(dtype), batch["text_tokens"].flatten())
        image_loss = cross_entropy(image_logits.flatten(0, 1).to(dtype), image_tokens.flatten())
        expected.append(text_loss / 8 + image_loss * 7 / 8)
    assert_only_rounded(loss, *expected)


def test_training_changes_the_transformer_alone_and_learns() -> None:
    module = tiny_module()
    before = copy.deepcopy(module.discrete_vae.state_dict())
    first = _silent(tiny_module()).training_step(_batch(), 0).item()
    trainer = Trainer(**TRAINER, max_steps=30, gradient_clip_val=4.0)
    trainer.fit(module, loader(4))
    assert all(torch.equal(value, before[name]) for name, value in module.discrete_vae.state_dict().items())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0
    assert trainer.callback_metrics["train/loss"] < first / 2
    assert {"train/loss", "train/text_loss", "train/image_loss"} <= set(trainer.callback_metrics)


def test_validation_test_and_prediction_log_and_draw(module: TextToImageModule) -> None:
    trainer = Trainer(**TRAINER)
    trainer.validate(module, loader(1), verbose=False)
    assert set(trainer.callback_metrics) == {"val/loss", "val/text_loss", "val/image_loss"}
    trainer.test(module, loader(1), verbose=False)
    assert set(trainer.callback_metrics) == {"test/loss", "test/text_loss", "test/image_loss"}
    first, again = (torch.cat(trainer.predict(module, loader(1)) or []) for _ in range(2))  # type: ignore[arg-type]
    assert first.shape == (2, 1, 3, 16, 16)
    assert torch.equal(first, again)


def test_plateau_follows_the_validation_loss_in_a_trainer() -> None:
    training = TextToImageTrainingConfig(
        optimizer=OptimizerConfig(learning_rate=1.0),
        schedule=ScheduleConfig(name="plateau", warmup_steps=1, plateau_interval=2, plateau_patience=0),
    )
    module = tiny_module(training=training)
    for parameter in module.network.parameters():
        parameter.requires_grad_(False)
    module.network.final_norm.bias.requires_grad_(True)
    module.validation_step = lambda batch, batch_idx: module.log("val/loss", 1.0, batch_size=2)  # type: ignore[method-assign]
    trainer = Trainer(**TRAINER, max_steps=8, val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(module, loader(4), loader(1))
    # The first of four looks sees the best loss so far; each later one halves.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1 / 8)


@pytest.fixture(scope="module")
def checkpoint(module: TextToImageModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("module") / "module.ckpt"
    trainer = Trainer(**TRAINER)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    return path


def test_checkpoint_is_complete_and_plain(module: TextToImageModule, checkpoint: Path) -> None:
    loaded = TextToImageModule.load_from_checkpoint(checkpoint, weights_only=True)
    options: dict[str, Any] = {"num_candidates": 2, "progress": False}
    expected = module.generate(CAPTIONS, generator=_generator(), **options)
    assert torch.equal(loaded.generate(CAPTIONS, generator=_generator(), **options), expected)
    assert loaded.training_config == TRAINING
    assert loaded.network.config == NETWORK


def test_discrete_vae_comes_from_its_checkpoint_or_as_a_network(tmp_path: Path) -> None:
    vae_module = DiscreteVAEModule(VAE, DiscreteVAETrainingConfig())
    trainer = Trainer(**TRAINER)
    trainer.strategy.connect(vae_module)
    trainer.save_checkpoint(tmp_path / "vae.ckpt")
    for source in (tmp_path / "vae.ckpt", str(tmp_path / "vae.ckpt"), vae_module.network):
        module = tiny_module(discrete_vae=source)
        assert torch.equal(module.discrete_vae.encode(images()), vae_module.encode(images()))
        assert not any(parameter.requires_grad for parameter in module.discrete_vae.parameters())


def test_tokenizer_comes_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    module = tiny_module(tokenizer=tmp_path / "tokenizer.json")
    assert module.hparams["tokenizer"] == tokenizer_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network": {"depht": 2}}, r"network has unknown fields \['depht'\]"),
        ({"training": {"learning_rat": 2}}, r"training has unknown fields \['learning_rat'\]"),
        ({"discrete_vae": {"image_sise": 2}}, r"discrete_vae has unknown fields \['image_sise'\]"),
        ({"network": dataclasses.replace(NETWORK, grid_height=5)}, r"grid_height \(5\) and grid_width \(4\) must be 4"),
        ({"network": dataclasses.replace(NETWORK, grid_width=8)}, r"grid_height \(4\) and grid_width \(8\) must be 4"),
        (
            {"network": dataclasses.replace(NETWORK, image_vocabulary_size=32)},
            r"image_vocabulary_size \(32\) must equal the discrete VAE's codebook_size \(16\)",
        ),
        (
            {"network": dataclasses.replace(NETWORK, text_vocabulary_size=270)},
            r"text_vocabulary_size \(270\) must be at least the tokenizer's vocabulary_size",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_module(**changes)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"discrete_vae \('.*nowhere.ckpt'\) does not exist"):
        tiny_module(discrete_vae=tmp_path / "nowhere.ckpt")
    with pytest.raises(FileNotFoundError, match=r"tokenizer \('.*nowhere.json'\) does not exist"):
        tiny_module(tokenizer=str(tmp_path / "nowhere.json"))


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a foreign pickle was executed",))


def test_foreign_pickle_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "hyper_parameters": Bomb()}, tmp_path / "bomb.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        tiny_module(discrete_vae=tmp_path / "bomb.ckpt")
