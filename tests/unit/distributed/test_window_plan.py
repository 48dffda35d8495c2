"""Plans of tiles for patterns of limited reach against the mask itself, for any geometry."""

from typing import get_args

import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.distributed.context_parallel.schedule import plan_window
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from tests.unit.distributed.pair_counts import add_counts, as_positions

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
        plan, own = plan_window(pattern, layout.runs(rank)), layout.positions(rank)
        for half in plan.inner:
            add_counts(counts, half, own, own)
        if plan.border:
            add_counts(counts, plan.outer, own, as_positions(plan.border))
        else:
            assert not plan.outer
    assert torch.equal(counts, pattern.mask().int())


def test_border_is_the_text_and_what_the_first_positions_reach() -> None:
    pattern = AttentionPattern("row", text_length=64, height=32, width=30)
    first, second = (plan_window(pattern, [run]) for run in (range(512), range(512, 1024)))
    # The first process holds all that it sees.
    assert not first.border
    text, image = second.border
    assert text == range(64)
    # A row before, rounded up as the tiles are, and the tile of 32 queries that reach it.
    assert image == range(512 - 32, 512 + 32)
    # Both halves are of use while keys and gradients travel.
    assert all(sum(tiles.tiles.count for tiles in half) >= 7 for half in second.inner)
    assert [tiles.tiles.count for half in first.inner for tiles in half if tiles.tiles.count > 1] == [6, 7]
