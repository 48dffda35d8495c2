import pytest
import torch

from lightning_dalle.ops.finite import all_finite

LARGE = torch.full((4,), 3e38)


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.ones(2, 3), torch.tensor(1.0)], [LARGE, -LARGE]])
def test_finite_tensors_whose_sums_may_overflow(tensors: list[torch.Tensor]) -> None:
    assert all_finite(tensors)


@pytest.mark.parametrize("spoiled", [[torch.nan], [torch.inf], [-torch.inf, 1.0], [torch.inf, -torch.inf]])
def test_one_entry_is_enough(spoiled: list[float]) -> None:
    assert not all_finite([torch.ones(3), torch.tensor(spoiled), torch.ones(3)])
    assert not all_finite([torch.tensor(spoiled, dtype=torch.bfloat16)])
