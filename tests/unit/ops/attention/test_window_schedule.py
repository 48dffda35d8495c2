"""Schedules of patterns of limited reach against the mask itself, for any geometry."""

import dataclasses
from typing import get_args

import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from lightning_dalle.ops.attention.schedule import whole_schedule, window_schedule
from tests.unit.ops.attention.pair_counts import add_counts, as_positions

KINDS: list[PatternKind] = ["row", "convolution"]


@st.composite
def patterns(draw: st.DrawFn) -> AttentionPattern:
    """Images of up to several tiles, texts that no rank, one rank, or several ranks hold."""
    sizes = {name: draw(st.integers(1, 24)) for name in ("height", "width")}
    text_length, kernel_size = draw(st.integers(1, 200)), draw(st.sampled_from([1, 3, 5, 11]))
    return AttentionPattern(draw(st.sampled_from(KINDS)), text_length, **sizes, kernel_size=kernel_size)


@settings(max_examples=60, deadline=None)
@given(patterns(), st.integers(1, 4), st.sampled_from(get_args(LayoutKind)))
def test_tiles_show_each_pair_of_the_mask_once(pattern: AttentionPattern, num_ranks: int, kind: LayoutKind) -> None:
    num_ranks = min(num_ranks, pattern.length // 2)
    layout = SequenceLayout(pattern.length, max(num_ranks, 1), kind)
    counts = torch.zeros(pattern.length, pattern.length, dtype=torch.int)
    for rank in range(layout.num_ranks):
        schedule, own = window_schedule(pattern, layout.runs(rank)), layout.positions(rank)
        for half in schedule.inner_halves():
            add_counts(counts, half, own, own)
        if schedule.halo:
            add_counts(counts, schedule.outer, own, as_positions(schedule.halo))
        else:
            assert not schedule.outer
    assert torch.equal(counts, pattern.mask().int())


def test_halo_is_the_text_and_what_the_first_positions_reach() -> None:
    pattern = AttentionPattern("row", text_length=64, height=32, width=30)
    first, second = (window_schedule(pattern, [run]) for run in (range(512), range(512, 1024)))
    # The first process holds all that it sees.
    assert not first.halo
    text, image = second.halo
    assert text == range(64)
    # A row before, rounded up as the tiles are, and the tile of 32 queries that reach it.
    assert image == range(512 - 32, 512 + 32)
    # Both halves are of use while keys and gradients travel.
    assert all(sum(tiles.count for tiles in half) >= 7 for half in second.inner_halves())
    assert [tiles.count for half in first.inner_halves() for tiles in half if tiles.count > 1] == [7, 6]


@given(patterns(), st.sampled_from(get_args(PatternKind)))
def test_a_whole_sequence_is_shown_once_and_its_first_tile_has_every_query(
    pattern: AttentionPattern, kind: PatternKind
) -> None:
    pattern = dataclasses.replace(pattern, kind=kind)
    positions, counts = torch.arange(pattern.length), torch.zeros(pattern.length, pattern.length, dtype=torch.int)
    schedule = whole_schedule(pattern)
    add_counts(counts, schedule, positions, positions)
    assert torch.equal(counts, pattern.mask().int())
    assert (schedule[0].query_start, schedule[0].num_queries, schedule[0].key_start) == (0, pattern.length, 0)
