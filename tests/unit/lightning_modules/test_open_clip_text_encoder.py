"""An open_clip text tower as the encoder of the video module, frozen and trained."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer

from lightning_dalle.lightning_modules.optimization import ScheduleConfig
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.models.text_encoders import OpenClipTextEncoder, TextEncoder
from tests.unit.lightning_modules.tiny_video_dit import CAPTIONS, NETWORK, TRAINER, TRAINING, loader, tiny_module

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

WORDS = 49408


def write_folder(folder: Path, **text: Any) -> str:
    """A tiny network with random weights in open_clip's own layout."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
    sizes = {"context_length": 12, "width": 16, "heads": 2, "layers": 1, "vocab_size": WORDS, **text}
    config = {"embed_dim": 8, "vision_cfg": vision, "text_cfg": sizes}
    torch.save(open_clip.CLIP(**config).state_dict(), folder / "open_clip_pytorch_model.bin")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("open_clip"))


def fitted(
    name: str, trained: bool, optimizer: Any = "adamw", **changes: Any
) -> tuple[VideoDiTModule, OpenClipTextEncoder, Trainer]:
    """A module and its encoder after two steps."""
    encoder = OpenClipTextEncoder(name, trained=trained)
    optimizer = dataclasses.replace(TRAINING.optimizer, name=optimizer)
    training = dataclasses.replace(TRAINING, optimizer=optimizer, schedule=ScheduleConfig(), **changes)
    module = tiny_module(std=0.3, text_encoder=encoder, tokenizer=None, training=training)
    trainer = Trainer(**{**TRAINER, "enable_checkpointing": False}, max_epochs=1, limit_train_batches=2)
    trainer.fit(module, loader(2), loader(1))
    return module, encoder, trainer


def test_features_are_those_of_open_clip_up_to_the_caption_s_end(name: str) -> None:
    encoder = OpenClipTextEncoder(name)
    assert isinstance(encoder, TextEncoder)
    features = encoder.encode(CAPTIONS)
    assert (features.shape, encoder.text_width) == ((3, 12, 16), 16)
    network, tokens = open_clip.create_model(name), open_clip.get_tokenizer(name)(CAPTIONS)
    for caption, row, end in zip(CAPTIONS, features, tokens.argmax(dim=1).tolist(), strict=True):
        assert end == len(caption.split()) + 1
        assert (row[: end + 1] != 0).any(dim=1).all()
        assert (row[end + 1 :] == 0).all()
    ends = features[torch.arange(3), tokens.argmax(dim=1)]
    torch.testing.assert_close(ends @ network.text_projection, network.encode_text(tokens))


@pytest.mark.parametrize(("pool_type", "valid"), [("eos", 3), ("last", 5)])
def test_other_towers_tell_the_end_otherwise(tmp_path: Path, pool_type: str, valid: int) -> None:
    encoder = OpenClipTextEncoder(write_folder(tmp_path, pool_type=pool_type, pad_id=7, eos_id=5))
    tokens = torch.tensor([[9, 8, 5, 9, 9, 7, 7]])
    assert encoder._valid(tokens).sum() == valid
    assert encoder._valid(tokens)[0, :valid].all()


def test_frozen_tower_stays_as_it_is(name: str, tmp_path: Path) -> None:
    encoder = OpenClipTextEncoder(name)
    modes: list[bool] = []
    encoder.tower.register_forward_hook(lambda tower, *_: modes.append(tower.training))
    encoder.train()
    assert not encoder.encode(CAPTIONS).requires_grad
    assert (modes, encoder.tower.training) == ([False], True)
    before = encoder.state_dict()
    module, encoder, trainer = fitted(name, trained=False)
    assert all(torch.equal(weight, before[key]) for key, weight in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())
    optimized = {parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"]}
    assert optimized == set(module.network.parameters())
    trainer.save_checkpoint(tmp_path / "module.ckpt")
    other = OpenClipTextEncoder(write_folder(tmp_path / "other"))
    torch.nn.init.normal_(other.tower.positional_embedding)
    loaded = VideoDiTModule.load_from_checkpoint(tmp_path / "module.ckpt", weights_only=True, text_encoder=other)
    assert torch.equal(loaded.text_encoder.encode(CAPTIONS), encoder.encode(CAPTIONS))
    assert not any(parameter.requires_grad for parameter in other.parameters())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_trained_tower_learns_in_all_its_parts(name: str, optimizer: str) -> None:
    before = OpenClipTextEncoder(name).state_dict()
    module, encoder, trainer = fitted(name, trained=True, optimizer=optimizer, caption_dropout=0.0)
    weights = encoder.state_dict()
    assert not any(torch.equal(weights[key], before[key]) for key in before if key != "tower.attn_mask")
    optimized = {parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"]}
    assert optimized == set(module.parameters())


def test_the_command_line_builds_it(name: str) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(VideoDiTModule, "model")
    text_encoder = {"class_path": "lightning_dalle.OpenClipTextEncoder", "init_args": {"model_name": name}}
    module = {"network": dataclasses.asdict(NETWORK), "training": dataclasses.asdict(TRAINING)}
    parsed = parser.parse_object({"model": {**module, "text_encoder": text_encoder}})
    encoder = parser.instantiate_classes(parsed).model.text_encoder
    assert isinstance(encoder, OpenClipTextEncoder)
    assert not encoder.trained


def test_names_that_do_not_serve_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"model_name \(ViT-nothing\) is unknown to open_clip"):
        OpenClipTextEncoder("ViT-nothing")
    with pytest.raises(ValueError, match=r"pretrained \(openai\) has no effect with model_name"):
        OpenClipTextEncoder(name, "openai")
