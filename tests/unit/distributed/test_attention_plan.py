"""Plans of blocks against the mask itself, and the work that they leave to each rank."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.distributed.context_parallel.mask import SequenceMask
from lightning_dalle.distributed.context_parallel.schedule import PlannedBlock, plan_blocks
from lightning_dalle.ops.attention.patterns import AttentionPattern
from tests.distributed.sequences import LENGTH, MASKS, TEXT


def _shown(block: PlannedBlock) -> Tensor:
    """[batch or 1, queries, keys]."""
    if block.hidden is not None:
        return ~block.hidden[:, 0]
    shown = torch.ones(1, len(block.queries), len(block.keys), dtype=torch.int)
    return (shown.tril() if block.causal else shown).bool()


def _seen_by_rank(layout: SequenceLayout, mask: SequenceMask, rank: int, finely: bool) -> tuple[Tensor, Tensor]:
    """How often the plan shows each pair of the rank's queries and all keys, and what the mask shows."""
    own, positions = layout.positions(rank), torch.arange(layout.length)
    expected = mask.attends(own, positions)
    counts = torch.zeros(expected.shape, dtype=torch.int)
    for source in range(layout.num_ranks):
        keys = layout.positions(source)
        for block in plan_blocks(mask, layout.runs(rank), layout.runs(source), finely=finely):
            rows = own[block.query_start : block.query_start + len(block.queries)]
            assert rows.tolist() == list(block.queries)
            columns = keys[block.key_start : block.key_start + len(block.keys)]
            assert columns.tolist() == list(block.keys)
            where = slice(block.query_start, block.query_start + len(block.queries))
            counts[:, where, block.keys.start : block.keys.stop] += _shown(block)
    return counts, expected


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("finely", [False, True])
def test_plan_shows_each_pair_of_the_mask_once(name: str, finely: bool) -> None:
    for kind in get_args(LayoutKind):
        for rank in range(3):
            counts, expected = _seen_by_rank(SequenceLayout(LENGTH, 3, kind), MASKS[name], rank, finely)
            assert torch.equal(counts, expected.int())


def test_text_is_one_block_and_no_block_begins_or_ends_with_a_hidden_key() -> None:
    mask, image = MASKS["row"], range(TEXT, LENGTH)
    blocks = plan_blocks(mask, [range(LENGTH)], [range(LENGTH)])
    assert [block.keys for block in blocks if block.queries == image] == [range(TEXT)]
    partial = [block for block in blocks if block.hidden is not None]
    assert partial
    for block in partial:
        seen = _shown(block).any(1)
        assert seen[:, 0].all()
        assert seen[:, -1].all()


def test_queries_that_see_nothing_of_a_block_are_marked() -> None:
    mask = MASKS["padding_in_front"]
    blocks = plan_blocks(mask, [range(100, 200)], [range(100, 200)])
    assert blocks
    for block in blocks:
        blind = ~_shown(block).any(-1)
        assert blind.any()
        assert block.blind is not None
        assert torch.equal(block.blind[:, 0], blind)


def _work(layout: SequenceLayout, mask: SequenceMask, rank: int) -> float:
    """Pairs that a rank computes; the kernel skips the hidden half of a causal block."""
    blocks = [
        block
        for source in range(layout.num_ranks)
        for block in plan_blocks(mask, layout.runs(rank), layout.runs(source))
    ]
    return sum(len(block.queries) * len(block.keys) / (1 + block.causal) for block in blocks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_zigzag_gives_each_rank_the_same_causal_work(num_ranks: int) -> None:
    work = {
        kind: [_work(SequenceLayout(4096, num_ranks, kind), SequenceMask(), rank) for rank in range(num_ranks)]
        for kind in get_args(LayoutKind)
    }
    assert max(work["zigzag"]) <= 1.05 * min(work["zigzag"])
    assert max(work["contiguous"]) >= 2 * min(work["contiguous"])
    # All that is computed is what the mask shows.
    assert sum(work["zigzag"]) == 4096**2 / 2


def test_a_row_pattern_computes_little_more_than_it_shows() -> None:
    pattern = AttentionPattern("row", 256, 60, 64)
    work = [_work(SequenceLayout(4096, 2, "zigzag"), SequenceMask(pattern), rank) for rank in range(2)]
    assert sum(work) < 0.2 * 4096**2 / 2 + 1.5 * 256 * 4096
    assert max(work) < 1.3 * min(work)
