"""A layer's cache against the attention of the whole sequence."""

import pytest
import torch

from lightning_dalle.ops.attention import AttentionPattern, attend
from lightning_dalle.ops.key_value_cache import KeyValueCache

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PATTERN = AttentionPattern("column", 3, 3, 4)


@pytest.fixture
def inputs() -> Triple:
    query, key, value = torch.randn(
        3, 2, 2, PATTERN.length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return query, key, value


@pytest.mark.parametrize("prefix", [3, 7])
def test_prefix_and_steps_equal_the_whole_sequence(inputs: Triple, prefix: int) -> None:
    whole = attend(*inputs, PATTERN)
    cache = KeyValueCache(PATTERN)
    parts = [slice(0, prefix), *(slice(position, position + 1) for position in range(prefix, PATTERN.length))]
    outputs = [cache.attend(*(tensor[:, :, part] for tensor in inputs)) for part in parts]
    assert cache.length == PATTERN.length
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, atol=1e-12, rtol=0)


def test_selected_rows_share_the_prefix_bit_for_bit_and_then_part(inputs: Triple) -> None:
    cache = KeyValueCache(PATTERN)
    cache.attend(*(tensor[:, :, :7] for tensor in inputs))
    selected = cache.select(torch.tensor([1, 0, 1]))
    query, key, value = (tensor[:, :, 7:8] for tensor in inputs)
    single = cache.attend(query, key, value)
    triple = selected.attend(query[[1, 0, 1]], key[[1, 0, 1]], torch.zeros_like(value[[1, 0, 1]]))
    assert torch.equal(triple[0], triple[2])
    assert not torch.equal(triple[0], single[1])
    assert cache.length == selected.length == 8


def test_empty_cache_can_be_selected(inputs: Triple) -> None:
    assert KeyValueCache(PATTERN).select(torch.tensor([0])).length == 0


@pytest.mark.parametrize("length", [2, 5])
def test_prefix_of_incomplete_rows_is_refused(inputs: Triple, length: int) -> None:
    with pytest.raises(ValueError, match=f"a prefix of {length} positions must be the text block"):
        KeyValueCache(PATTERN).attend(*(tensor[:, :, :length] for tensor in inputs))


def test_two_positions_at_once_are_refused_after_the_prefix(inputs: Triple) -> None:
    cache = KeyValueCache(PATTERN)
    cache.attend(*(tensor[:, :, :3] for tensor in inputs))
    with pytest.raises(ValueError, match="query has 2 positions"):
        cache.attend(*(tensor[:, :, 3:5] for tensor in inputs))
