"""Two ranks take the same decision whatever each has seen, and their gradients are those of one process."""

import math
import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_dalle.plugins import PerBlockGradientScaling
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks
from tests.unit.plugins.residual_network import TRAINER, batches, module

pytestmark = LIGHTNING_WARNINGS


class _SpoilOneRank(Callback):
    """After the all-reduce, so that the other rank has no way to see it in its own gradients."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.weights: list[Tensor] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.step:
            pl_module.network.bodies[2].fc2.weight.grad[0, 0] = math.nan

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.weights.append(torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()]))


def _fit_rank(rank: int) -> dict[str, Any]:
    # Tells Lightning that the ranks are there already.
    os.environ["LOCAL_RANK"] = str(rank)
    plugin, spoil = PerBlockGradientScaling(), _SpoilOneRank(1)
    strategy = DDPStrategy(process_group_backend="gloo")
    settings = {**TRAINER, "devices": 2, "strategy": strategy, "plugins": plugin, "callbacks": [spoil]}
    Trainer(**{**settings, "max_steps": 3}).fit(module(learning_rate=0.1), batches(6))
    return {"state": plugin.state_dict(), "weights": spoil.weights}


def test_a_nan_on_one_of_two_ranks_skips_the_update_on_both() -> None:
    first, second = run_ranks(_fit_rank, 2, timeout=120)
    assert first["state"] == second["state"]
    assert first["state"]["num_skipped_updates"] == 1
    assert first["state"]["num_divisions"] == {"body_0": 0, "body_1": 0, "body_2": 1}
    for weights in (first["weights"], second["weights"]):
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[1], weights[2])
    assert all(torch.equal(*pair) for pair in zip(first["weights"], second["weights"], strict=True))


def test_scales_begin_in_proportion_to_the_replicas() -> None:
    (state, _) = (answer["state"] for answer in run_ranks(_fit_rank, 2, timeout=120))
    growths = state["num_growths"]["body_0"]
    assert growths == 3
    assert state["scales"]["body_0"] == 2 * 2**13 * (2 ** (1 / 1000)) ** growths


def _mean_of_large_gradients(rank: int) -> list[float]:
    large = torch.finfo(torch.float32).max * 0.9
    layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    (layer(torch.ones(1, 1)) * large).sum().backward()
    (gradient,) = (parameter.grad for parameter in layer.parameters())
    assert gradient is not None
    return [gradient.item() / large]


def test_gradients_are_divided_by_the_replicas_before_they_are_summed() -> None:
    """In 32 bits; the sum of both would not be finite."""
    assert run_ranks(_mean_of_large_gradients, 2, timeout=120) == [[pytest.approx(1.0)]] * 2
