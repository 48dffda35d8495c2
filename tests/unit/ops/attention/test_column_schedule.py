"""Schedules for the column pattern against the mask itself, for any geometry."""

from typing import get_args

import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.attention.schedule import column_schedule
from tests.unit.ops.attention.pair_counts import add_counts


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.sampled_from(get_args(LayoutKind))
)
def test_tiles_show_each_pair_of_the_mask_once(
    text_length: int, height: int, width: int, num_ranks: int, kind: LayoutKind
) -> None:
    pattern = AttentionPattern("column", text_length, height, width)
    layout = SequenceLayout(pattern.length, max(min(num_ranks, pattern.length // 2), 1), kind)
    counts = torch.zeros(pattern.length, pattern.length, dtype=torch.int)
    for rank in range(layout.num_ranks):
        for source in range(layout.num_ranks):
            schedule = column_schedule(pattern, layout.runs(rank), layout.runs(source))
            add_counts(counts, schedule, layout.positions(rank), layout.positions(source))
    assert torch.equal(counts, pattern.mask().int())


def test_no_pair_of_the_image_is_computed_in_vain() -> None:
    pattern = AttentionPattern("column", text_length=64, height=16, width=12)
    schedule = column_schedule(pattern, [range(pattern.length)], [range(pattern.length)])
    # The text for all queries, and each column for itself.
    assert [(tiles.count, tiles.num_queries, tiles.num_keys) for tiles in schedule] == [
        (1, pattern.length, 64),
        (12, 16, 16),
    ]
    assert all(tiles.causal and tiles.masked is None for tiles in schedule)
