"""`attend_projected` against `attend` of the three parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dalle.ops.attention.api import MASKED_LENGTH, attend, attend_projected
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from lightning_dalle.ops.sharded_sequence import sharded_sequences
from tests.rounding import assert_only_rounded
from tests.unit.ops.attention.oracle import KINDS

# Geometries whose tiles are of all sorts: a head, several equal ones and a rest.
TILED = {kind: AttentionPattern(kind, 70, 15, 13, 5) for kind in KINDS}
LAYOUTS = ((0, 1, 2, 3, 4), (2, 0, 3, 1, 4), (4, 1, 0, 2, 3))


def _projection(
    length: int,
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
    heads: int = 3,
    layout: tuple[int, ...] = LAYOUTS[0],
) -> Tensor:
    """Of [batch, length, 3, heads, head_dim], with its dimensions in memory in the order of `layout`."""
    projected = torch.randn(batch, length, 3, heads, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    inverse = [layout.index(axis) for axis in range(5)]
    return projected.permute(layout).contiguous().permute(inverse).requires_grad_()


def _attend_parts(projected: Tensor, *arguments: Any, **dropout: Any) -> Tensor:
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    return attend(query, key, value, *arguments, **dropout)


def _gradient(output: Tensor, projected: Tensor) -> Tensor:
    # Of eight bits, so that they are the same in every type.
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return torch.autograd.grad(output, projected, weights.to(output.dtype))[0]


def _assert_equals_parts(projected: Tensor, *arguments: Any, **dropout: Any) -> None:
    """In float64."""
    output, expected = (way(projected, *arguments, **dropout) for way in (attend_projected, _attend_parts))
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    gradient, exact = _gradient(output, projected), _gradient(expected, projected)
    # Of text keys it is a sum over all queries, and may be much larger than 1.
    torch.testing.assert_close(gradient, exact, atol=1e-12 * max(1.0, exact.abs().max().item()), rtol=0)


@given(
    pattern=st.builds(
        AttentionPattern,
        st.sampled_from(KINDS),
        st.integers(1, 12),
        st.integers(0, 20),
        st.integers(1, 20),
        st.sampled_from((1, 3, 11)),
    ),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
    dropout=st.sampled_from((0.0, 0.0, 0.4)),
)
@example(AttentionPattern("row", 1, 10, 20, 1), 1, 2, LAYOUTS[0], 0.0)
@example(AttentionPattern("row", 3, 3, 70, 1), 2, 1, LAYOUTS[1], 0.4)
@example(AttentionPattern("column", 140, 13, 7, 1), 2, 1, LAYOUTS[2], 0.0)
@example(AttentionPattern("convolution", 1, 9, 30, 11), 2, 2, LAYOUTS[1], 0.0)
@example(AttentionPattern("convolution", 200, 5, 8, 3), 1, 1, LAYOUTS[2], 0.4)
@settings(max_examples=60, deadline=None)
def test_a_whole_projection_gives_what_its_parts_give_for_any_geometry(
    pattern: AttentionPattern, batch: int, heads: int, layout: tuple[int, ...], dropout: float
) -> None:
    projected = _projection(pattern.length, torch.float64, batch, heads, layout)
    _assert_equals_parts(projected, pattern, dropout=dropout, dropout_seed=pattern.height)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_projection_loses_no_more_than_its_parts_in_any_type(
    kind: PatternKind, dropout: float, dtype: torch.dtype
) -> None:
    assert TILED[kind].length > MASKED_LENGTH
    projected = _projection(TILED[kind].length, dtype)
    exact = projected.detach().double().requires_grad_()
    results = []
    for way, whole in ((attend_projected, projected), (_attend_parts, projected), (_attend_parts, exact)):
        output = way(whole, TILED[kind], dropout=dropout)
        assert output.dtype == whole.dtype
        with torch.no_grad():
            results.append([output, _gradient(output, whole), way(whole, TILED[kind])])
    assert_only_rounded(*results)


def test_packed_parts_of_a_whole_projection_attend_to_themselves() -> None:
    _assert_equals_parts(_projection(5), PackedSegments((2, 3), (2, 3)))


@pytest.mark.parametrize("kind", ["row", "column", "convolution"])
def test_gradients_of_a_projection_that_is_used_twice_add_up(kind: PatternKind) -> None:
    projected = _projection(TILED[kind].length)
    ways: tuple[Callable[..., Tensor], ...] = (attend_projected, _attend_parts)
    output, expected = (
        way(projected, TILED[kind]) + 2 * way(projected.square(), TILED[kind]) + projected.sum() for way in ways
    )
    torch.testing.assert_close(_gradient(output, projected), _gradient(expected, projected), atol=1e-11, rtol=0)


class _FreshBytes(TorchDispatchMode):
    """Counts the bytes of all memory that operations return, and keeps it, so that none is counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, list | tuple) else (results,):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                self._storages[storage.data_ptr()] = storage
        return results


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["row", "column", "convolution"])
def test_gradients_of_keys_and_values_are_summed_where_they_stay(kind: PatternKind, dropout: float) -> None:
    projected = _projection(TILED[kind].length)
    totals = []
    for way in (attend_projected, _attend_parts):
        output = way(projected, TILED[kind], dropout=dropout)
        with _FreshBytes() as fresh:
            torch.autograd.grad(output, projected, torch.ones_like(output))
        totals.append(fresh.total)
    assert totals[1] - totals[0] == projected.nbytes * 2 // 3


def test_a_whole_projection_reaches_a_cut_of_the_sequence_in_its_parts() -> None:
    class Cut:
        def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
            return query + 10 * key + 100 * value

    projected = _projection(4)
    # Of a process that holds 4 of the pattern's positions.
    with sharded_sequences(Cut()):  # type: ignore[arg-type]
        output = attend_projected(projected, TILED["row"])
    query, key, value = projected.unbind(2)
    assert torch.equal(output, (query + 10 * key + 100 * value).transpose(1, 2))


def test_a_projection_of_other_than_three_parts_is_refused() -> None:
    pattern = AttentionPattern("row", 6, 4, 4)
    with pytest.raises(ValueError, match=r"query_key_value has shape \(2, 22, 2, 3, 4\); it must be .*, 3, heads"):
        attend_projected(_projection(pattern.length)[:, :, :2], pattern)


def test_a_projection_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="query_key_value has 18 positions, but the pattern has 22"):
        attend_projected(_projection(18), AttentionPattern("row", 6, 4, 4))


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_that_is_no_probability_below_one_is_refused(dropout: float) -> None:
    pattern = AttentionPattern("row", 6, 4, 4)
    with pytest.raises(ValueError, match=rf"dropout \({dropout}\) must be in \[0, 1\)"):
        attend_projected(_projection(pattern.length), pattern, dropout=dropout)
