"""A learned autoencoder from its checkpoint under the video module: trained, loaded, trained on, drawn with, loaded."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.lightning_modules.video_autoencoder_module import (
    VideoAutoencoderModule,
    VideoAutoencoderTrainingConfig,
)
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.models.video_autoencoder import CausalVideoAutoencoder, CausalVideoAutoencoderConfig
from lightning_dalle.ops.rope import RotaryGridConfig
from tests.unit.lightning_modules.tiny_video_dit import (
    CAPTIONS,
    NETWORK,
    TEXT,
    TRAINER,
    TRAINING,
    clips,
    tiny_module,
    tokenizer_json,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")

SIZES = CausalVideoAutoencoderConfig(hidden_width=4, latent_channels=6)
# 5 frames of 16 x 16 are 2 x 4 x 4 latents.
PARTS: dict[str, Any] = {
    "network": dataclasses.replace(
        NETWORK, channels=6, patch_size=(1, 2, 2), rotary=RotaryGridConfig(original_max_position_embeddings=(2, 2, 2))
    ),
    "training": dataclasses.replace(TRAINING, clip_size=(5, 16, 16)),
}


def loader() -> torch.utils.data.DataLoader[Any]:
    rows = [{"video": clip, "caption": caption} for clip, caption in zip(clips(3, (5, 16, 16)), CAPTIONS, strict=True)]
    return torch.utils.data.DataLoader(rows, batch_size=3)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an autoencoder after two steps."""
    torch.manual_seed(5)
    training = VideoAutoencoderTrainingConfig(
        optimizer=OptimizerConfig(learning_rate=1e-2, beta2=0.99), schedule=ScheduleConfig()
    )
    module = VideoAutoencoderModule(SIZES, training)
    trainer = Trainer(**TRAINER, max_epochs=2)
    trainer.fit(module, loader(), loader())
    path = tmp_path_factory.mktemp("autoencoder") / "autoencoder.ckpt"
    trainer.save_checkpoint(path)
    return path


def trained_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return VideoAutoencoderModule.load_from_checkpoint(checkpoint, weights_only=True).network.state_dict()


def draw(module: VideoDiTModule) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return module.generate(["a red diamond"], num_steps=2, progress=False, generator=generator)


def test_an_autoencoder_s_checkpoint_serves_from_the_command_line_on(checkpoint: Path, tmp_path: Path) -> None:
    CaptionTokenizer.from_json(tokenizer_json()).save(tmp_path / "tokenizer.json")
    parts = {name: dataclasses.asdict(value) for name, value in {**PARTS, "text_encoder": TEXT}.items()}
    model = {"class_path": "VideoDiTModule", "init_args": {**parts, "autoencoder": str(checkpoint)}}
    # Any data module will do: the clips come from elsewhere.
    data = {"class_path": "CaptionedShapesDataModule"}
    recipe = {"model": model, "data": data, "trainer": {"logger": False, "enable_checkpointing": False}}
    (tmp_path / "recipe.yaml").write_text(yaml.dump(recipe, Dumper=_PlainDumper))
    arguments = ["--config", str(tmp_path / "recipe.yaml"), f"--model.tokenizer={tmp_path / 'tokenizer.json'}"]
    module = SuiteCLI(arguments, run=False).model
    assert isinstance(module, VideoDiTModule)
    assert isinstance(module.autoencoder, CausalVideoAutoencoder)
    trainer = Trainer(**TRAINER, max_epochs=2)
    trainer.fit(module, loader(), loader())
    assert trainer.global_step == 2
    clip = draw(module)
    assert (clip.shape, clip.dtype) == ((1, 1, 3, 5, 16, 16), torch.uint8)

    expected = trained_weights(checkpoint)
    assert all(torch.equal(weight, expected[name]) for name, weight in module.autoencoder.state_dict().items())
    assert all(parameter.grad is None for parameter in module.autoencoder.parameters())
    optimized = {parameter for group in trainer.optimizers[0].param_groups for parameter in group["params"]}
    assert optimized == {*module.network.parameters(), *module.text_encoder.parameters()}  # type: ignore[attr-defined]
    trainer.save_checkpoint(tmp_path / "module.ckpt")
    # The autoencoder's own checkpoint is not asked for again.
    loaded = VideoDiTModule.load_from_checkpoint(tmp_path / "module.ckpt", weights_only=True)
    assert torch.equal(draw(loaded), clip)
    assert isinstance(loaded.autoencoder, CausalVideoAutoencoder)
    assert not any(parameter.requires_grad for parameter in loaded.autoencoder.parameters())


def test_sizes_and_objects_serve_as_well(checkpoint: Path) -> None:
    for source in (SIZES, dataclasses.asdict(SIZES), CausalVideoAutoencoder(SIZES)):
        module = tiny_module(**PARTS, autoencoder=source)
        assert module.hparams["autoencoder"] == dataclasses.asdict(SIZES)
    assert "autoencoder" not in tiny_module().hparams


class Trap:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_what_is_no_checkpoint_of_an_autoencoder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"autoencoder \('.*none.ckpt'\) must be .*, and does not exist"):
        tiny_module(**PARTS, autoencoder=tmp_path / "none.ckpt")
    trainer = Trainer(**TRAINER)
    trainer.strategy.connect(tiny_module())
    trainer.save_checkpoint(tmp_path / "other.ckpt", weights_only=True)
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    torch.save({"state_dict": Trap(tmp_path / "touched")}, tmp_path / "trap.ckpt")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps({"state_dict": Trap(tmp_path / "touched")}, protocol=2))
    for name in ("other", "text", "trap", "pickle"):
        with pytest.raises(ValueError, match=rf"autoencoder \('.*{name}.ckpt'\) must be a checkpoint of a VideoAuto"):
            tiny_module(**PARTS, autoencoder=str(tmp_path / f"{name}.ckpt"))
    assert not (tmp_path / "touched").exists()
    with pytest.raises(ValueError, match=r"autoencoder has unknown fields \['width'\]"):
        tiny_module(**PARTS, autoencoder={"width": 3})


class _PlainDumper(yaml.SafeDumper):
    """Tuples as lists."""


_PlainDumper.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
