"""A training that is killed at any step and resumed from its last checkpoint ends as if nothing had happened."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor

from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

EPOCHS, BATCHES, BATCH_SIZE = 3, 5, 4
SAVED_EVERY, KILLED_AT = 3, 8
NETWORK = {"image_size": 8, "codebook_size": 16, "hidden_width": 8, "num_groups": 2, "patch_codebook": True}
TRAINING = {
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"total_steps": 12, "final_learning_rate": 1e-5},
    "kl_weight": {"start": 0.0, "end": 1.0, "steps": 7},
    "temperature": {"start": 1.0, "end": 0.5, "steps": 10},
    "dequantise": True,
}


def random_batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"image": torch.randint(0, 256, (BATCH_SIZE, 3, 8, 8), generator=generator, dtype=torch.uint8)}


class ResumableBatches:
    """Batches that are a function of (epoch, position), with the position as their state."""

    def __init__(self) -> None:
        self.epoch, self.position = 0, 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for position in range(self.position, BATCHES):
            batch = random_batch(1000 * self.epoch + position)
            # Before the yield: Lightning stops at the known length and never comes back for the end.
            self.epoch += (position + 1) // BATCHES
            self.position = (position + 1) % BATCHES
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class OneBatch:
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield random_batch(-1)


class SyntheticImages(LightningDataModule):
    def train_dataloader(self) -> ResumableBatches:
        return ResumableBatches()

    def val_dataloader(self) -> OneBatch:
        return OneBatch()


class Curve(Callback):
    """Writes each loss and each validation's metrics to a file, without rounding, and kills the process if told to."""

    def __init__(self, path: Path, killed_at: int | None = None) -> None:
        self.path, self.killed_at = path, killed_at

    def _write(self, name: str, metrics: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(f"{name} {[(key, float(value).hex()) for key, value in sorted(metrics.items())]}\n")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._write(f"step {trainer.global_step}", outputs)
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self._write(
                f"validation {trainer.global_step}",
                {name: value for name, value in metrics.items() if name.startswith("val/")},
            )


def train(folder: Path, curve: str, killed_at: int | None = None, resume_from: Path | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0 if resume_from is None else 1)
    module = DiscreteVAEModule(NETWORK, TRAINING)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            EMAWeightAveraging(decay=0.9),
            ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=SAVED_EVERY),
            Curve(folder / curve, killed_at),
        ],
    )
    trainer.fit(module, datamodule=SyntheticImages(), ckpt_path=resume_from, weights_only=True)
    torch.save(module.state_dict(), folder / f"{curve}.weights")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder, "curve")
    return folder


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_discrete_vae_killed_in_mid_epoch_resumes_on_the_same_curve(uninterrupted: Path, tmp_path: Path) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=train, args=(tmp_path, "killed", KILLED_AT))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    last_saved = SAVED_EVERY * (KILLED_AT // SAVED_EVERY)
    train(tmp_path, "resumed", resume_from=tmp_path / "checkpoints" / f"step={last_saved}.ckpt")

    whole, killed, resumed = (
        path.read_text().splitlines() for path in (uninterrupted / "curve", tmp_path / "killed", tmp_path / "resumed")
    )
    assert killed == whole[: len(killed)]
    # The steps after the checkpoint are taken a second time.
    assert resumed == whole[len(whole) - len(resumed) :]
    assert resumed[0].startswith(f"step {last_saved + 1} ")
    assert sum(line.startswith("validation") for line in whole) == EPOCHS
    expected, weights = torch.load(uninterrupted / "curve.weights"), torch.load(tmp_path / "resumed.weights")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_discrete_vae_noise_differs_from_step_to_step(uninterrupted: Path) -> None:
    losses = [line.split(" ", 2)[2] for line in (uninterrupted / "curve").read_text().splitlines()]
    assert len(set(losses)) == len(losses)
