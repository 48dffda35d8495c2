"""Attention over a sequence that is sharded among two, three and four ranks, against one process."""

import itertools
import operator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, distributed

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.ops.attention.mask import SequenceMask
from lightning_dalle.ops.attention.patterns import AttentionPattern
from tests.distributed.engines import ENGINES, groups
from tests.distributed.sequences import (
    LENGTH,
    MASKS,
    inputs,
    plain_attention,
    shards,
)
from tests.ranks import run_ranks
from tests.rounding import FACTOR, largest_error, rounding_bar
from tests.unit.ops.attention.oracle import masked_attention


def _run(
    rank: int, engine: str, layout: SequenceLayout, mask: SequenceMask, tensors: list[Tensor], **options: Any
) -> list[Tensor]:
    """The rank's part of output and gradients."""
    query, key, value, grad_output = shards(layout, rank, tensors)
    attention = ContextAttention(layout, mask, **groups(engine))
    output = attention(query, key, value, **options)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad_output)]


def _errors(rank: int, engines: list[str], masks: list[str], dtype: torch.dtype) -> dict[tuple[str, ...], list[float]]:
    """Largest difference to one process in double precision, of output and gradients by case."""
    size = distributed.get_world_size()
    errors: dict[tuple[str, ...], list[float]] = {}
    for name, key_heads in itertools.product(masks, (2 * size, size)):
        tensors = inputs(2 * size, key_heads, dtype)
        expected = plain_attention(MASKS[name], [tensor.double() for tensor in tensors])
        for engine, kind in itertools.product(engines, get_args(LayoutKind)):
            layout = SequenceLayout(LENGTH, size, kind)
            parts = zip(_run(rank, engine, layout, MASKS[name], tensors), expected, strict=True)
            case = (name, engine, kind, str(key_heads))
            errors[case] = [largest_error(mine, layout.shard(whole, rank, -2)) for mine, whole in parts]
    return errors


def _assert_no_worse_than_one_process(
    world_size: int, engines: list[str], masks: list[str], dtype: torch.dtype, factor: float = FACTOR
) -> None:
    """Errors on ranks are at most a few times those of plain attention of the same type on one process."""
    bars = {}
    for name, key_heads in itertools.product(masks, (2 * world_size, world_size)):
        tensors = inputs(2 * world_size, key_heads, dtype)
        plain = plain_attention(MASKS[name], tensors)
        exact = plain_attention(MASKS[name], [tensor.double() for tensor in tensors])
        bars[name, str(key_heads)] = [rounding_bar(*pair, factor) for pair in zip(plain, exact, strict=True)]
    for errors in run_ranks(_errors, world_size, engines, masks, dtype):
        worse = {
            case: (error, bars[case[0], case[-1]])
            for case, error in errors.items()
            if not all(map(operator.le, error, bars[case[0], case[-1]]))
        }
        assert worse == {}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_attention_equals_that_of_one_process(world_size: int) -> None:
    for errors in run_ranks(_errors, world_size, ENGINES[world_size], list(MASKS), torch.float64):
        # Sums in another order; a wrong block would cost 1e-2.
        assert {case: error for case, error in errors.items() if not max(error) <= 1e-13} == {}
        assert len(errors) == 4 * len(ENGINES[world_size]) * len(MASKS)


@pytest.mark.parametrize("world_size", [2, 4])
def test_single_precision_does_not_lose_more_with_more_ranks(world_size: int) -> None:
    masks = ["causal", "bidirectional", "row", "column"]
    _assert_no_worse_than_one_process(world_size, ["ring"], masks, torch.float32)


@pytest.mark.parametrize("world_size", [2])
def test_half_precision_keeps_sums_in_single(world_size: int) -> None:
    # Fused attention of one process keeps its sums in single precision too: to keep them in half costs more than twice.
    masks = ["causal", "row", "column"]
    _assert_no_worse_than_one_process(world_size, ["ring", "heads"], masks, torch.bfloat16, factor=2)


DROPPED = ("row", "column", "convolution", "pattern_causal")


def _with_dropout(rank: int) -> list[list[Tensor]]:
    size = distributed.get_world_size()
    tensors = inputs(2 * size, 2 * size)
    return [
        _run(rank, engine, SequenceLayout(LENGTH, size, kind), MASKS[name], tensors, dropout=0.3, dropout_seed=7)
        for name, engine, kind in itertools.product(DROPPED, ENGINES[size], get_args(LayoutKind))
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_dropout_depends_on_positions_alone(world_size: int) -> None:
    tensors = inputs(2 * world_size, 2 * world_size)
    ranks = run_ranks(_with_dropout, world_size)
    cases = itertools.product(DROPPED, ENGINES[world_size], get_args(LayoutKind))
    for case, (name, _, kind) in enumerate(cases):
        query, key, value = (tensor.clone().requires_grad_() for tensor in tensors[:3])
        rule = MASKS[name].rule
        assert isinstance(rule, AttentionPattern)
        output = masked_attention(query, key, value, rule, 0.3, 7)
        expected = [output.detach(), *torch.autograd.grad(output, (query, key, value), tensors[3])]
        layout = SequenceLayout(LENGTH, world_size, kind)
        for place, whole in enumerate(expected):
            gathered = layout.unshard([rank[case][place] for rank in ranks], dim=-2)
            torch.testing.assert_close(gathered, whole, rtol=0, atol=1e-13)


def _with_other_document(rank: int) -> list[list[Tensor]]:
    tensors, size = inputs(4, 4), distributed.get_world_size()
    results = []
    for changed in (False, True):
        if changed:
            for tensor in tensors:
                tensor[:, :, 50:180] = 100.0
        for engine, kind in itertools.product(ENGINES[size], get_args(LayoutKind)):
            results.append(_run(rank, engine, SequenceLayout(LENGTH, size, kind), MASKS["document_ids"], tensors))
    return results


def test_packed_documents_never_see_each_other() -> None:
    ranks = run_ranks(_with_other_document, 2)
    cases = list(itertools.product(ENGINES[2], get_args(LayoutKind)))
    for case, (_, kind) in enumerate(cases):
        layout = SequenceLayout(LENGTH, 2, kind)
        for place in range(4):
            before = layout.unshard([rank[case][place] for rank in ranks], dim=-2)
            after = layout.unshard([rank[case + len(cases)][place] for rank in ranks], dim=-2)
            assert not torch.equal(before[:, :, 50:180], after[:, :, 50:180])
            for others in (slice(50), slice(180, None)):
                torch.testing.assert_close(after[:, :, others], before[:, :, others], rtol=0, atol=0)


def _refusals(rank: int) -> None:
    layout, mask = SequenceLayout(LENGTH, 2), SequenceMask()
    attention = ContextAttention(layout, mask, **groups("heads"))
    rule = "heads, which must be divisible by the 2 ranks of the Ulysses group; use a smaller group, or a ring"
    for heads, key_heads, subject in ((3, 3, "query has 3"), (4, 1, "key has 1")):
        with pytest.raises(ValueError, match=f"{subject} {rule}"):
            attention(*shards(layout, rank, inputs(heads, key_heads)[:3]))


def test_heads_that_cannot_be_divided_are_refused_on_every_rank() -> None:
    run_ranks(_refusals, 2)


def test_published_numbers() -> None:
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    key = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    value = torch.tensor([[1.0, 2.0], [2.0, 0.0], [0.0, 3.0], [4.0, 1.0]], dtype=torch.float64)
    expected = [
        [1.713718770414283, 1.717687377514301],
        [1.2665573014232199, 1.5456752591767888],
        [1.0997727863231592, 1.8971610659128877],
        [1.4668769743932526, 1.12351663241973],
    ]
    for world_size in (2, 4):
        rows = torch.cat(run_ranks(_small, world_size, [query, key, value]), dim=-2)
        torch.testing.assert_close(rows[0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


def _small(rank: int, tensors: list[Tensor]) -> Tensor:
    layout = SequenceLayout(4, distributed.get_world_size())
    query, key, value = (layout.shard(tensor[None, None], rank, dim=-2) for tensor in tensors)
    output: Tensor = ContextAttention(layout, SequenceMask("bidirectional"), **groups("ring"))(query, key, value)
    return output
