"""Tiles of the column pattern between two sets of runs of positions."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Literal

from lightning_dalle.distributed.planned_tiles import PlacedRun, PlannedTiles, placed_runs, text_tiles
from lightning_dalle.ops.attention_pattern import AttentionPattern
from lightning_dalle.ops.attention_tiles import AttentionTiles


def plan_columns(
    pattern: AttentionPattern, query_runs: Sequence[range], key_runs: Sequence[range]
) -> list[PlannedTiles]:
    """Tiles that hold all that the column pattern shows, each pair once.

    Args:
        query_runs: Positions of the queries, in the order in which their tensor holds them; each is one of `key_runs`,
            or has none of their positions.
    """
    return [
        tiles
        for queries, keys in product(placed_runs(query_runs), placed_runs(key_runs))
        for tiles in (*text_tiles(pattern.text_length, queries, keys), *_image_tiles(pattern, queries, keys))
    ]


def _image_tiles(pattern: AttentionPattern, queries: PlacedRun, keys: PlacedRun) -> Iterator[PlannedTiles]:
    """A tile for each column: its queries of a run see its keys of an earlier run, and their own up to themselves."""
    if keys.positions.start > queries.positions.start:
        return
    shown: Literal["causal", "all"] = "causal" if keys.positions == queries.positions else "all"
    for columns in _alike(pattern, queries.positions, keys.positions):
        rows = (_rows(pattern, run.positions, columns.start) for run in (queries, keys))
        query_rows, key_rows = rows
        if query_rows and key_rows:
            first, width = pattern.text_length + columns.start, pattern.width
            places = first + query_rows.start * width - queries.shift, first + key_rows.start * width - keys.shift
            tiles = AttentionTiles(
                places[0], len(query_rows), places[1], len(key_rows), shown, len(columns), stride=width
            )
            yield PlannedTiles(tiles, queries.shift, keys.shift)


def _alike(pattern: AttentionPattern, *runs: range) -> Iterator[range]:
    """Neighbouring columns of which each run has the same rows: it may start and end within a row."""
    ends = {max(end - pattern.text_length, 0) % pattern.width for run in runs for end in (run.start, run.stop)}
    return (range(*pair) for pair in pairwise(sorted({0, pattern.width, *ends})))


def _rows(pattern: AttentionPattern, run: range, column: int) -> range:
    """The rows in which the run has a column."""
    start, stop = (-((pattern.text_length + column - end) // pattern.width) for end in (run.start, run.stop))
    return range(max(start, 0), max(stop, 0))
