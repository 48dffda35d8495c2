"""A video training that is killed at any step and resumed ends as if nothing had happened."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from tests.unit.lightning_modules.tiny_video_dit import CAPTIONS, TRAINER, TRAINING, clips, tiny_module

EPOCHS, BATCHES = 2, 5
SAVED_EVERY, KILLED_AT = 3, 8


class ResumableBatches:
    """Batches that are a function of (epoch, position), with the position as their state; every other one is packed."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for position in range(self.position, BATCHES):
            generator = torch.Generator().manual_seed(100 * self.epoch + position)
            video = torch.randint(0, 256, (3, 3, 4, 8, 8), dtype=torch.uint8, generator=generator)
            packed = [video[0], video[1, :, :2], video[2, :, :, :4]]
            # Before the yield: Lightning stops at the known length and never comes back for the end.
            self.epoch += (position + 1) // BATCHES
            self.position = (position + 1) % BATCHES
            yield {"video": packed if position % 2 else video, "caption": CAPTIONS}

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class OneBatch:
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"video": clips(), "caption": CAPTIONS}


class Clips(LightningDataModule):
    def train_dataloader(self) -> ResumableBatches:
        return ResumableBatches()

    def val_dataloader(self) -> OneBatch:
        return OneBatch()


class Curve(Callback):
    """Writes each loss to a file, without rounding, and kills the process if told to."""

    def __init__(self, path: Path, killed_at: int | None = None) -> None:
        self.path, self.killed_at = path, killed_at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item().hex()} {rate.hex()}\n")
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, curve: str, killed_at: int | None = None, resume_from: Path | None = None) -> None:
    """Trains from a seed of its own, so that nothing a resumed run needs can come from the global random state."""
    torch.set_num_threads(1)
    module = tiny_module()
    if resume_from is not None:
        torch.manual_seed(1)
        module.network.reset_parameters()
    trainer = Trainer(
        **{**TRAINER, "enable_checkpointing": True},
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        callbacks=[
            EMAWeightAveraging(decay=0.9),
            ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=SAVED_EVERY),
            Curve(folder / curve, killed_at),
        ],
    )
    trainer.fit(module, Clips(), ckpt_path=resume_from, weights_only=True)
    torch.save(module.state_dict(), folder / f"{curve}.weights")


def test_video_training_killed_in_mid_epoch_resumes_on_the_same_curve(tmp_path: Path) -> None:
    (tmp_path / "uninterrupted").mkdir()
    train(tmp_path / "uninterrupted", "whole")
    process = multiprocessing.get_context("forkserver").Process(target=train, args=(tmp_path, "killed", KILLED_AT))
    process.start()
    process.join(timeout=240)
    assert process.exitcode == -signal.SIGKILL
    saved = SAVED_EVERY * (KILLED_AT // SAVED_EVERY)
    train(tmp_path, "resumed", resume_from=tmp_path / "checkpoints" / f"step={saved}.ckpt")

    whole, killed, resumed = (
        path.read_text().splitlines()
        for path in (tmp_path / "uninterrupted" / "whole", tmp_path / "killed", tmp_path / "resumed")
    )
    assert len({line.split()[1] for line in whole}) == len(whole) == EPOCHS * BATCHES
    assert TRAINING.caption_dropout > 0
    assert TRAINING.first_frame_share > 0
    assert killed == whole[:KILLED_AT]
    assert resumed == whole[saved:]
    expected = torch.load(tmp_path / "uninterrupted" / "whole.weights")
    weights = torch.load(tmp_path / "resumed.weights")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
