from typing import Any

import pytest
import torch
from torch import distributed, nn

from lightning_dalle.callbacks.powersgd_monitor import powersgd_metrics
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from tests.ranks import run_ranks

NAMES = ("blocks.0.weight", "blocks.1.weight", "head.weight")


def _metrics(rank: int) -> dict[str, Any]:
    world, alone = distributed.group.WORLD, None
    for other in range(2):
        group = distributed.new_group([other])
        alone = group if other == rank else alone
    assert world is not None
    assert isinstance(alone, distributed.ProcessGroup)
    parameters = {name: nn.Parameter(torch.zeros(12, 10)) for name in NAMES}
    config = PowerSGDConfig(matrix_approximation_rank=1)
    gradients = PowerSGDGradients(parameters, world, alone, config)
    gradients.measure = True
    generator = torch.Generator().manual_seed(rank)
    for parameter in parameters.values():
        parameter.grad = torch.randn(12, 10, generator=generator)
    gradients.synchronize(parameters)
    norm = torch.stack([part.grad.norm() for part in parameters.values() if part.grad is not None]).norm()
    errors = dict(gradients.reconstruction_errors)
    gradients.release()
    parameters["head.weight"].grad = torch.full((12, 10), torch.nan)
    gradients.begin_backward()
    metrics = powersgd_metrics(gradients)
    gradients.synchronize(parameters)
    return {"metrics": metrics, "norm": float(norm), "errors": errors, "after": powersgd_metrics(gradients)}


def test_metrics_are_those_of_the_synchronized_gradient() -> None:
    for answer in run_ranks(_metrics, 2):
        metrics, errors = answer["metrics"], answer["errors"]
        # Between two ranks each number is sent once: P and Q of three matrices and four flags, instead of all.
        assert metrics["powersgd/bytes_sent"] == 4 * (3 * (12 + 10) + 4)
        assert metrics["powersgd/bytes_saved"] == 4 * 3 * 120 - metrics["powersgd/bytes_sent"]
        assert metrics["powersgd/compression_rate"] == pytest.approx(1 - 70 / 360)
        assert metrics["powersgd/gradient_norm"] == pytest.approx(answer["norm"], rel=1e-5)
        assert metrics["powersgd/skipped_steps"] == 0
        in_blocks = (errors["blocks.0.weight"] + errors["blocks.1.weight"]) / 2
        assert metrics["powersgd/reconstruction_error/blocks.*.weight"] == pytest.approx(in_blocks)
        assert metrics["powersgd/reconstruction_error/head.weight"] == pytest.approx(errors["head.weight"])
        assert 0 < errors["head.weight"] < 1
        assert answer["after"]["powersgd/skipped_steps"] == 1
        # What is not finite was dropped, what is stays.
        assert 0 < answer["after"]["powersgd/error_feedback_norm"] < float("inf")


def _nothing_compressed(rank: int) -> dict[str, float]:
    world = distributed.group.WORLD
    assert world is not None
    return powersgd_metrics(PowerSGDGradients({"bias": nn.Parameter(torch.zeros(5))}, world, world, PowerSGDConfig()))


def test_nothing_is_logged_where_nothing_is_compressed() -> None:
    assert run_ranks(_nothing_compressed, 1) == [{}]
