"""The strategy on real ranks against the same training in one process."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.toy_module import fit_alone, fit_on_rank
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks

pytestmark = LIGHTNING_WARNINGS
FULL_RANK: dict[str, Any] = {"matrix_approximation_rank": 99, "min_compression_rate": 0.0}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


def _fit_cases(rank: int, world_size: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [fit_on_rank(rank, world_size, settings, **options) for settings, options in cases]


@pytest.mark.parametrize(("world_size", "shard_size"), [(2, 1), (2, 2), (4, 2)])
def test_full_rank_equals_one_process(world_size: int, shard_size: int) -> None:
    cases = [({**FULL_RANK, "shard_size": shard_size}, options) for options in OPTIONS]
    by_rank = run_ranks(_fit_cases, world_size, world_size, cases, timeout=240)
    for case, options in enumerate(OPTIONS):
        expected = fit_alone(**options)
        for answers in by_rank:
            # Sums of other order in double precision.
            torch.testing.assert_close(answers[case]["state"], expected["state"], rtol=1e-9, atol=1e-10)
        assert (len(by_rank[0][case]["plan"]) > 0) == (world_size > shard_size)
        mean = [
            sum(losses) / world_size for losses in zip(*(answers[case]["losses"] for answers in by_rank), strict=True)
        ]
        assert mean == pytest.approx(expected["losses"], rel=1e-9)


def _flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[name].flatten() for name in sorted(state)])


def test_fifty_updates_in_single_precision_at_full_rank_equal_uncompressed_ones() -> None:
    common: dict[str, Any] = {
        "num_batches": 100,
        "dtype": torch.float32,
        "depth": 1,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.1,
    }
    cases = [({**FULL_RANK, "shard_size": shard_size}, common) for shard_size in (1, 2)]
    by_rank = run_ranks(_fit_cases, 4, 4, cases, timeout=240)
    uncompressed = fit_alone(**common)["state"]
    for replicated, sharded in by_rank:
        assert len(replicated["plan"]) == len(sharded["plan"]) > 0
        for state, other in itertools.combinations((replicated["state"], sharded["state"], uncompressed), 2):
            difference = _flat(state) - _flat(other)
            assert difference.norm() < 1e-6 * _flat(uncompressed).norm()
