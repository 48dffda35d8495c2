"""A folder of clips of several sizes trains in one run, from the command line on, and resumes in mid-epoch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.data.files.videos import CaptionedVideosDataModule
from lightning_dalle.data.tokenizer import CaptionTokenizer
from tests.unit.data.clip_files import animation, frames, write_clip
from tests.unit.lightning_modules.tiny_video_dit import TRAINER, tiny_module, tokenizer_json

SIZES = [(4, 8, 8), (2, 4, 8), (3, 16, 8)]
DATA: dict[str, Any] = {"frames": 4, "height": 8, "width": 8, "max_tokens": 32, "token_size": [1, 4, 4]}
BUCKETS = [[4, 8, 8], [2, 4, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    for number in range(18):
        count, height, width = SIZES[number % 3]
        write_clip(path, f"{number:02}.webp", f"a red {number}", animation(frames(count, (width, height), seed=number)))
    return path


class Losses(Callback):
    """Every loss, without rounding."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append((trainer.current_epoch, float(outputs["loss"]).hex()))


def fit(folder: Path, clips: Path, buckets: Any, resume: str | None = None) -> list[tuple[int, str]]:
    losses = Losses()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(**{**TRAINER, "enable_checkpointing": True}, max_epochs=2, callbacks=[losses, saving])
    data = CaptionedVideosDataModule(path=clips, val_share=0.2, buckets=buckets, **DATA)
    trainer.fit(tiny_module(), data, ckpt_path=None if resume is None else folder / resume, weights_only=True)
    assert trainer.global_step == 2 * len(data.train_dataloader())
    assert torch.isfinite(trainer.callback_metrics["val/loss"])
    return losses.seen


@pytest.mark.parametrize("buckets", [None, BUCKETS], ids=["packed", "padded"])
def test_one_run_trains_on_all_sizes_and_resumes_in_mid_epoch(tmp_path: Path, folder: Path, buckets: Any) -> None:
    whole = fit(tmp_path, folder, buckets)
    per_epoch = len(whole) // 2
    assert [epoch for epoch, _ in whole] == [0] * per_epoch + [1] * per_epoch
    assert len(set(whole)) == len(whole)
    for step in (1, per_epoch + 1):
        assert fit(tmp_path, folder, buckets, f"step={step}.ckpt") == whole[step:], step


def test_the_command_line_trains_validates_and_predicts(tmp_path: Path, folder: Path) -> None:
    CaptionTokenizer.from_json(tokenizer_json()).save(tmp_path / "tokenizer.json")
    parts = {name: value for name, value in tiny_module().hparams.items() if name != "tokenizer"}
    recipe = {
        "model": {"class_path": "VideoDiTModule", "init_args": json.loads(json.dumps(parts))},
        "data": {
            "class_path": "CaptionedVideosDataModule",
            "init_args": {"path": str(folder), "val_share": 0.2, "buckets": BUCKETS, **DATA},
        },
        "trainer": {**TRAINER, "max_epochs": 1, "default_root_dir": str(tmp_path)},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["--config", str(tmp_path / "recipe.yaml"), f"--model.tokenizer={tmp_path / 'tokenizer.json'}"]
    cli = SuiteCLI(["fit", *arguments])
    assert cli.trainer.global_step == len(cli.datamodule.train_dataloader())
    predicted = cli.trainer.predict(cli.model, cli.datamodule)
    assert predicted is not None
    assert sum(map(len, predicted)) == len(cli.datamodule.captions("val"))
