"""A layer's cache against the attention of the whole sequence."""

import pytest
import torch

from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.kv_cache import KeyValueCache
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from tests.unit.ops.attention.oracle import DECODABLE_KINDS, Triple, random_inputs

PATTERN = AttentionPattern("column", 3, 3, 4)


def _inputs(pattern: AttentionPattern = PATTERN) -> Triple:
    query, key, value = (tensor.detach() for tensor in random_inputs(pattern))
    return query, key, value


def _append(cache: KeyValueCache, inputs: Triple, start: int, end: int) -> torch.Tensor:
    query, key, value = (tensor[:, :, start:end] for tensor in inputs)
    return cache.attend(query, key, value)


@pytest.mark.parametrize("rows", [0, 1, 3])
@pytest.mark.parametrize("size", [(1, 4, 5), (3, 4, 5), (3, 5, 4), (3, 4, 1)])
@pytest.mark.parametrize("kind", DECODABLE_KINDS)
def test_each_step_equals_its_row_of_the_whole(kind: PatternKind, size: tuple[int, int, int], rows: int) -> None:
    pattern = AttentionPattern(kind, *size, 3)
    inputs = _inputs(pattern)
    whole = attend(*inputs, pattern)
    cache = KeyValueCache(pattern)
    prefix = pattern.with_height(rows).length
    outputs = [_append(cache, inputs, 0, prefix)]
    outputs += [_append(cache, inputs, position, position + 1) for position in range(prefix, pattern.length)]
    assert cache.length == pattern.length
    torch.testing.assert_close(torch.cat(outputs, dim=2), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", DECODABLE_KINDS)
def test_uneven_numbers_of_candidates_equal_sequences_of_their_own(kind: PatternKind) -> None:
    pattern = AttentionPattern(kind, 3, 3, 4, 3)
    rows = torch.tensor([1, 0, 1, 1])
    inputs = _inputs(pattern)
    single = KeyValueCache(pattern)
    _append(single, inputs, 0, 7)
    candidates = single.select(rows)
    # What follows the prefix is different for each candidate.
    torch.manual_seed(1)
    rest = torch.randn(3, 4, 3, pattern.length, 4, dtype=torch.float64)
    parts = (torch.cat([part[rows][:, :, :7], more[:, :, 7:]], 2) for part, more in zip(inputs, rest, strict=True))
    query, key, value = parts
    whole = query, key, value
    steps = [_append(candidates, whole, position, position + 1) for position in range(7, pattern.length)]
    torch.testing.assert_close(torch.cat(steps, dim=2), attend(*whole, pattern)[:, :, 7:], atol=1e-12, rtol=0)


def test_selected_rows_share_the_prefix_bit_for_bit_and_then_part() -> None:
    inputs = _inputs()
    cache = KeyValueCache(PATTERN)
    _append(cache, inputs, 0, 7)
    selected = cache.select(torch.tensor([1, 0, 1]))
    query, key, value = (tensor[:, :, 7:8] for tensor in inputs)
    single = cache.attend(query, key, value)
    triple = selected.attend(query[[1, 0, 1]], key[[1, 0, 1]], torch.zeros_like(value[[1, 0, 1]]))
    assert torch.equal(triple[0], triple[2])
    assert not torch.equal(triple[0], single[1])
    assert cache.length == selected.length == 8


def test_candidates_add_no_copy_of_the_text() -> None:
    pattern = AttentionPattern("row", 100, 3, 4)
    cache = KeyValueCache(pattern)
    _append(cache, _inputs(pattern), 0, 100)
    # Keys and values of 3 heads of 4 in float64.
    token = 2 * 3 * 4 * 8
    assert cache.num_bytes == token * 2 * (100 + 5)
    assert cache.select(torch.tensor([0] * 9 + [1] * 9)).num_bytes == token * (2 * 100 + 18 * 5)
    assert cache.select(torch.tensor([1] * 9)).num_bytes == token * (100 + 9 * 5)


def test_empty_cache_can_be_selected() -> None:
    selected = KeyValueCache(PATTERN).select(torch.tensor([0]))
    assert selected.length == selected.num_bytes == 0


@pytest.mark.parametrize("length", [2, 5])
def test_prefix_of_incomplete_rows_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"a prefix of {length} positions must be the text block"):
        _append(KeyValueCache(PATTERN), _inputs(), 0, length)


def test_two_positions_at_once_are_refused_after_the_prefix() -> None:
    cache = KeyValueCache(PATTERN)
    _append(cache, _inputs(), 0, 3)
    with pytest.raises(ValueError, match="query has 2 positions"):
        _append(cache, _inputs(), 3, 5)


def test_position_beyond_the_pattern_is_refused() -> None:
    cache = KeyValueCache(PATTERN)
    _append(cache, _inputs(), 0, 15)
    with pytest.raises(ValueError, match="the cache is full: its pattern has 15 positions"):
        _append(cache, _inputs(), 0, 1)


def test_bidirectional_pattern_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind \('full'\) attends to the future"):
        KeyValueCache(AttentionPattern("full", 3, 3, 4))


@pytest.mark.parametrize("kind", DECODABLE_KINDS)
def test_text_without_an_image_is_a_whole_sequence(kind: PatternKind) -> None:
    pattern = AttentionPattern(kind, 3, 0, 4)
    inputs = _inputs(pattern)
    assert torch.equal(_append(KeyValueCache(pattern), inputs, 0, 3), attend(*inputs, pattern))
