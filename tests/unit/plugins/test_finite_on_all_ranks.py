"""The decision whether gradients are finite."""

import math

import pytest
import torch

from lightning_dalle.plugins.gradient_scales import groups_finite_on_all_ranks
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_one_value_of_a_group_decides_for_it(bad: float, dtype: torch.dtype) -> None:
    spoilt = torch.zeros(3, 1000, dtype=dtype)
    spoilt[1, 997] = bad
    groups = [[torch.ones(5)], [torch.ones(2), spoilt], [], [torch.ones(0)]]
    assert groups_finite_on_all_ranks(groups, CPU) == [True, False, True, True]


def test_large_finite_values_are_finite() -> None:
    largest = [torch.full((1000,), torch.finfo(dtype).max, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    assert groups_finite_on_all_ranks([largest], CPU) == [True]


def test_no_group_needs_no_answer() -> None:
    assert groups_finite_on_all_ranks([], CPU) == []


def _decide(rank: int) -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.tensor([1.0, 2.0, 3.0, math.nan])
    sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    own = torch.tensor([math.inf if rank == 0 else 1.0])
    return groups_finite_on_all_ranks([[torch.ones(2)], [own], [sharded]], CPU)


def test_all_ranks_give_the_same_answer() -> None:
    assert run_ranks(_decide, 2, timeout=120) == [[True, False, False]] * 2
