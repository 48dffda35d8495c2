"""The bars of rounding let rounding through, and nothing else."""

import pytest
import torch
from torch import Tensor

from tests.rounding import assert_only_rounded, rounding_bar


def _attention(query: Tensor, key: Tensor, value: Tensor, *, blocks: int = 1, drop: int | None = None) -> Tensor:
    """Attention that takes the keys block by block, without one of them."""
    parts = [
        (query @ keys.mT, values)
        for place, (keys, values) in enumerate(zip(key.chunk(blocks, -2), value.chunk(blocks, -2), strict=True))
        if place != drop
    ]
    largest = torch.cat([scores for scores, _ in parts], dim=-1).amax(-1, keepdim=True)
    weights = [((scores - largest).exp(), values) for scores, values in parts]
    total = sum((part.sum(-1, keepdim=True) for part, _ in weights), torch.zeros_like(largest))
    return sum((part @ values for part, values in weights), torch.zeros_like(query)) / total


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 256, 8, generator=generator) for _ in range(3)]


def test_sums_in_another_order_are_rounding() -> None:
    inputs = _inputs()
    exact = _attention(*(tensor.double() for tensor in inputs))
    for blocks in (2, 16, 256):
        assert_only_rounded(_attention(*inputs, blocks=blocks), _attention(*inputs), exact)


def test_a_dropped_tile_is_no_rounding() -> None:
    inputs = _inputs()
    exact = _attention(*(tensor.double() for tensor in inputs))
    with pytest.raises(AssertionError, match="the result is off by"):
        assert_only_rounded(_attention(*inputs, blocks=64, drop=3), _attention(*inputs), exact)


def test_sums_in_half_precision_are_no_rounding_of_single() -> None:
    inputs = _inputs()
    exact = _attention(*(tensor.double() for tensor in inputs))
    query, key, value = (tensor.bfloat16() for tensor in inputs)
    with pytest.raises(AssertionError, match="the result is off by"):
        assert_only_rounded(_attention(query, key, value).float(), _attention(*inputs), exact)


def test_plain_code_that_is_wrong_is_no_measure() -> None:
    with pytest.raises(AssertionError, match="that is no rounding"):
        rounding_bar(torch.tensor([1.01]), torch.tensor([1.0], dtype=torch.float64))


def test_what_is_not_a_number_or_has_another_shape_is_refused() -> None:
    plain, exact = torch.ones(3), torch.ones(3, dtype=torch.float64)
    assert_only_rounded({"a": [plain, 1.0]}, {"a": [plain, 1.0]}, {"a": [exact, 1.0]})
    with pytest.raises(AssertionError, match=r"a\[0\] is off by inf"):
        assert_only_rounded({"a": [plain * torch.nan, 1.0]}, {"a": [plain, 1.0]}, {"a": [exact, 1.0]})
    with pytest.raises(AssertionError, match="has shape"):
        assert_only_rounded(torch.ones(2), plain, exact)


def test_losses_of_a_training_are_one_tensor() -> None:
    exact = [3.0, 2.0, 1.0]
    assert_only_rounded([3.0, 2.0, 1.0 + 1e-6], [3.0, 2.0 + 1e-6, 1.0], exact)
    with pytest.raises(AssertionError, match="is off by"):
        assert_only_rounded([3.0, 2.0, 1.0 + 1e-5], [3.0, 2.0 + 1e-6, 1.0], exact)
