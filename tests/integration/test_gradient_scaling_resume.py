"""A run under gradient scales that is killed and resumed ends with the same scales, weights and moments."""

import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dalle.callbacks import LossScaleMonitor
from lightning_dalle.optim import AdamW16
from lightning_dalle.plugins import PerBlockGradientScaling
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.unit.plugins.residual_network import TRAINER, ResidualModule

pytestmark = [*LIGHTNING_WARNINGS, pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")]
UPDATES, SAVED_AT, KILLED_AT = 8, 4, 6
# By update, the block that overflows.
EVENTS = {1: 0, 3: 2, 5: 0, 6: 1}


class Adaptive(ResidualModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW16(self.parameters(), min_16bit_size=0)


class Batches:
    """Batches that are a function of their number, with that as state."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return UPDATES

    def __iter__(self) -> Iterator[list[Tensor]]:
        for position in range(self.position, UPDATES):
            generator = torch.Generator().manual_seed(position)
            self.position = position + 1
            yield [torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SpoilAndKill(Callback):
    def __init__(self, killed_at: int | None) -> None:
        self.killed_at = killed_at

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step in EVENTS:
            pl_module.network.bodies[EVENTS[trainer.global_step]].fc1.weight.grad[0, 0] = math.nan

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, killed_at: int | None = None, resume_from: Path | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0 if resume_from is None else 1)
    module, plugin, monitor = Adaptive(), PerBlockGradientScaling(), LossScaleMonitor()
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=SAVED_AT)
    callbacks = [saving, SpoilAndKill(killed_at), monitor]
    settings = {**TRAINER, "max_epochs": 1, "plugins": plugin, "callbacks": callbacks, "enable_checkpointing": True}
    trainer = Trainer(**settings)
    trainer.fit(module, Batches(), ckpt_path=resume_from, weights_only=True)
    return {
        "plugin": plugin.state_dict(),
        "monitor": monitor.state_dict(),
        "weights": module.state_dict(),
        "moments": trainer.optimizers[0].state_dict()["state"],
    }


def test_killed_and_resumed_it_has_the_same_scales(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    process = multiprocessing.get_context("forkserver").Process(target=train, args=(tmp_path / "killed", KILLED_AT))
    process.start()
    process.join(timeout=240)
    assert process.exitcode == -signal.SIGKILL
    resumed = train(tmp_path / "resumed", resume_from=tmp_path / "killed" / f"step={SAVED_AT}.ckpt")
    assert whole["plugin"]["num_skipped_updates"] == len(EVENTS)
    assert resumed["plugin"] == whole["plugin"]
    assert resumed["monitor"] == whole["monitor"]
    assert all(torch.equal(value, resumed["weights"][name]) for name, value in whole["weights"].items())
    for number, moments in whole["moments"].items():
        assert all(torch.equal(value, resumed["moments"][number][name]) for name, value in moments.items())
