"""Tiles of the row and convolution patterns for the positions of one process, and the keys of others that they need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from lightning_dalle.distributed.planned_tiles import PlacedRun, PlannedTiles, placed_runs, text_tiles
from lightning_dalle.ops.attention_pattern import AttentionPattern
from lightning_dalle.ops.attention_tiles import AttentionTiles, window_mask, window_reach


@dataclass(frozen=True)
class WindowPlan:
    """What a process computes with keys of its own, and with a border that holds keys of others too.

    Attributes:
        inner: Tiles of its own keys alone, in two halves.
        outer: Tiles of the border's keys.
        border: Positions of the border's keys, in its order.
    """

    inner: tuple[Sequence[PlannedTiles], Sequence[PlannedTiles]]
    outer: Sequence[PlannedTiles]
    border: Sequence[range]


# A tile's queries and keys.
_Tile = tuple[range, range]


def plan_window(pattern: AttentionPattern, runs: Sequence[range], device: torch.device | str = "cpu") -> WindowPlan:
    """Tiles that hold all that a pattern of limited reach shows to some queries, each pair once.

    The border is the text, unless this process holds all of it, and before each run of the image as much of the image
    as its first positions reach, with the positions themselves.

    Args:
        runs: Positions of the queries, in the order in which their tensor holds them.
    """
    border: list[range] = []
    outer: list[PlannedTiles] = []
    halves: tuple[list[PlannedTiles], list[PlannedTiles]] = ([], [])
    queries = placed_runs(runs)
    text = range(min(pattern.text_length, max(run.stop for run in runs)))
    holders = [run for run in queries if run.positions.start == 0 and run.positions.stop >= text.stop]
    if not holders:
        border.append(text)
    keys = holders[0] if holders else PlacedRun(text, 0)
    for run in queries:
        (halves[0] if holders else outer).extend(text_tiles(pattern.text_length, run, keys))
    for run in queries:
        tiles, first = list(_tiles(pattern, run.positions)), max(run.positions.start, pattern.text_length)
        across = [tile for tile in tiles if tile[1].start < first]
        if across:
            needed = range(across[0][1].start, across[-1][1].stop)
            outer += _joined(pattern, across, run.shift, needed.start - sum(map(len, border)), device)
            border.append(needed)
        within = tiles[len(across) :]
        middle = len(within) // 2
        for half, some in zip(halves, (within[:middle], within[middle:]), strict=True):
            half += _joined(pattern, some, run.shift, run.shift, device)
    return WindowPlan(halves, outer, border)


def _tiles(pattern: AttentionPattern, run: range) -> Iterator[_Tile]:
    """The run's image positions in raster order, with the keys of their reach."""
    size, reach = len(window_mask(pattern)), window_reach(pattern)
    for start in range(max(run.start, pattern.text_length), run.stop, size):
        stop = min(start + size, run.stop)
        yield range(start, stop), range(max(pattern.text_length, start - reach), stop)


def _joined(
    pattern: AttentionPattern, tiles: Sequence[_Tile], query_shift: int, key_shift: int, device: torch.device | str
) -> Iterator[PlannedTiles]:
    """Neighbours of one shape as one."""
    for (num_queries, num_keys), group in groupby(tiles, key=lambda tile: (len(tile[0]), len(tile[1]))):
        same = list(group)
        queries, keys = same[0]
        first_key = keys.start + window_reach(pattern) - queries.start
        shown = window_mask(pattern, device)[:num_queries, first_key : first_key + num_keys]
        places = queries.start - query_shift, num_queries, keys.start - key_shift, num_keys
        placed = AttentionTiles(*places, "pattern", len(same), num_queries)
        yield PlannedTiles(placed, query_shift, key_shift, ~shown[None, None])
