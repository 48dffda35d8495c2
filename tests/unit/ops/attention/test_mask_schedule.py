"""Schedules of any mask against the mask itself, and the work that they leave to each rank."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.ops.attention.mask import SequenceMask, mask_schedule
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.attention.schedule import Tiles
from tests.distributed.sequences import LENGTH, MASKS, TEXT
from tests.unit.ops.attention.pair_counts import shown_pairs


def _queries(tiles: Tiles) -> range:
    """Positions in the whole sequence."""
    start = tiles.query_start + tiles.query_shift
    return range(start, start + tiles.num_queries)


def _keys(tiles: Tiles) -> range:
    start = tiles.key_start + tiles.key_shift
    return range(start, start + tiles.num_keys)


def _seen_by_rank(layout: SequenceLayout, mask: SequenceMask, rank: int, finely: bool) -> tuple[Tensor, Tensor]:
    """How often the schedule shows each pair of the rank's queries and all keys, and what the mask shows."""
    own, positions = layout.positions(rank), torch.arange(layout.length)
    expected = mask.attends(own, positions)
    counts = torch.zeros(expected.shape, dtype=torch.int)
    for source in range(layout.num_ranks):
        keys = layout.positions(source)
        for tile in mask_schedule(mask, layout.runs(rank), layout.runs(source), finely=finely):
            rows = own[tile.query_start : tile.query_start + tile.num_queries]
            assert rows.tolist() == list(_queries(tile))
            columns = keys[tile.key_start : tile.key_start + tile.num_keys]
            assert columns.tolist() == list(_keys(tile))
            where = slice(tile.query_start, tile.query_start + tile.num_queries)
            counts[:, where, _keys(tile).start : _keys(tile).stop] += shown_pairs(tile)
    return counts, expected


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("finely", [False, True])
def test_schedule_shows_each_pair_of_the_mask_once(name: str, finely: bool) -> None:
    for kind in get_args(LayoutKind):
        for rank in range(3):
            counts, expected = _seen_by_rank(SequenceLayout(LENGTH, 3, kind), MASKS[name], rank, finely)
            assert torch.equal(counts, expected.int())


def test_text_is_one_tile_and_no_tile_begins_or_ends_with_a_masked_key() -> None:
    mask, image = MASKS["row"], range(TEXT, LENGTH)
    schedule = mask_schedule(mask, [range(LENGTH)], [range(LENGTH)])
    assert [_keys(tile) for tile in schedule if _queries(tile) == image] == [range(TEXT)]
    partial = [tile for tile in schedule if tile.masked is not None]
    assert partial
    for tile in partial:
        seen = shown_pairs(tile).any(1)
        assert seen[:, 0].all()
        assert seen[:, -1].all()


def test_queries_that_see_nothing_of_a_tile_are_marked() -> None:
    mask = MASKS["padding_in_front"]
    schedule = mask_schedule(mask, [range(100, 200)], [range(100, 200)])
    assert schedule
    for tile in schedule:
        fully_masked = ~shown_pairs(tile).any(-1)
        assert fully_masked.any()
        assert tile.fully_masked is not None
        assert torch.equal(tile.fully_masked[:, 0], fully_masked)


def _work(layout: SequenceLayout, mask: SequenceMask, rank: int) -> float:
    """Pairs that a rank computes; the kernel skips the masked half of a causal tile."""
    schedule = [
        tile
        for source in range(layout.num_ranks)
        for tile in mask_schedule(mask, layout.runs(rank), layout.runs(source))
    ]
    return sum(tile.num_queries * tile.num_keys / (1 + tile.causal) for tile in schedule)


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
