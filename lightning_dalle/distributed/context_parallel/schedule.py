"""Block schedules: which tiles of a sharded sequence attend to which keys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product
from typing import Literal

import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.mask import SequenceMask, Verdict
from lightning_dalle.ops.attention.kernels import additive_mask
from lightning_dalle.ops.attention.patterns import (
    CALL_ELEMENTS,
    AttentionPattern,
    AttentionTiles,
    window_mask,
    window_reach,
)


@dataclass(frozen=True)
class PlannedTiles:
    """Dense tiles of one shape, computed in one call.

    Attributes:
        tiles: By places in the tensors that hold queries and keys.
        query_shift: What to add to the place of a query to get its position in the whole sequence.
        key_shift: The same for keys.
        hidden: True where a query of a tile does not see a key, [1, 1, queries, keys]; each sees one.
    """

    tiles: AttentionTiles
    query_shift: int
    key_shift: int
    hidden: Tensor | None = None
    blind: None = None

    @property
    def causal(self) -> bool:
        """Whether query i of a tile sees its keys 0..i alone."""
        return self.tiles.shown == "causal"

    def of_queries(self, tensor: Tensor, dim: int = -2) -> Tensor:
        """The tiles' queries of a contiguous tensor [batch, heads, ...], as a view [tiles, batch * heads, ...]."""
        return self.tiles.queries(tensor, dim).flatten(1, 2)

    def of_keys(self, pair: Tensor) -> Tensor:
        """The tiles' keys and values, as a view [2, tiles, batch * key_heads, ...], which may overlap itself."""
        return self.tiles.keys(pair).transpose(0, 1).flatten(2, 3)

    def key_pieces(self, total: Tensor) -> list[Tensor]:
        """The tiles' keys of [batch, key_heads, keys, head_dim] as views that do not overlap themselves."""
        return [piece.flatten(1, 2) for piece in self.tiles.key_pieces(total)]

    def call_size(self, queries: Tensor) -> int:
        """How many of the tiles one call takes: on the CPU, large results cost more than many calls."""
        return max(1, CALL_ELEMENTS // queries[0].numel()) if queries.device.type == "cpu" else len(queries)

    def additive_mask(self, like: Tensor) -> Tensor:
        """0 or -inf for each pair of a tile, [1, 1, queries, keys]."""
        if self.hidden is not None:
            return additive_mask(~self.hidden, like.dtype)
        attends = like.new_ones((1, 1, self.tiles.num_queries, self.tiles.num_keys), dtype=torch.bool)
        return additive_mask(attends.tril_() if self.causal else attends, like.dtype)

    def of_sequences(self, numbers: Tensor) -> Tensor:
        """Numbers of samples and heads, [batch, heads, 1, 1], to be broadcast to the tiles' scores."""
        return numbers.flatten(0, 1)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Those of queries and keys in the whole sequence, to be broadcast to the tiles' scores."""
        tiles, firsts = self.tiles, torch.arange(self.tiles.count, device=device).view(-1, 1, 1, 1) * self.tiles.step
        queries = torch.arange(tiles.num_queries, device=device).unsqueeze(1) * tiles.stride
        keys = torch.arange(tiles.num_keys, device=device) * tiles.stride
        start = tiles.query_start + self.query_shift, tiles.key_start + self.key_shift
        return firsts + queries + start[0], firsts + keys + start[1]


@dataclass(frozen=True)
class PlacedRun:
    """Positions that lie side by side in a tensor.

    Attributes:
        shift: What to add to a place in the tensor to get the position.
    """

    positions: range
    shift: int


def placed_runs(runs: Sequence[range]) -> list[PlacedRun]:
    """Runs of positions that one tensor holds in this order."""
    starts = accumulate(map(len, runs), initial=0)
    return [PlacedRun(run, run.start - start) for start, run in zip(starts, runs, strict=False)]


def text_tiles(text_length: int, queries: PlacedRun, keys: PlacedRun) -> Iterator[PlannedTiles]:
    """What the queries see of the text among the keys: all of it before them, and of their own up to themselves."""
    end = min(keys.positions.stop, text_length)
    before = range(keys.positions.start, min(end, queries.positions.start))
    if before:
        yield _text_tile(queries.positions, before, "all", queries.shift, keys.shift)
    among = range(max(keys.positions.start, queries.positions.start), min(end, queries.positions.stop))
    if among:
        yield _text_tile(range(among.start, queries.positions.stop), among, "causal", queries.shift, keys.shift)


def _text_tile(
    queries: range, keys: range, shown: Literal["all", "causal"], query_shift: int, key_shift: int
) -> PlannedTiles:
    places = queries.start - query_shift, len(queries), keys.start - key_shift, len(keys)
    return PlannedTiles(AttentionTiles(*places, shown), query_shift, key_shift)


# Side of the blocks that a partly masked block is split into. Smaller ones mask less, larger ones are computed faster.
_BLOCK = 128


@dataclass(frozen=True)
class PlannedBlock:
    """A dense block of queries and keys.

    Attributes:
        queries: Their positions in the whole sequence.
        query_start: Where they start in the tensor that holds them.
        causal: Whether query i of the block sees its keys 0..i alone.
        hidden: True where a query does not see a key, [batch or 1, 1, queries, keys].
        blind: True where a query sees no key of the block, [batch or 1, 1, queries]; nothing if there is none.
    """

    queries: range
    keys: range
    query_start: int
    key_start: int
    causal: bool = False
    hidden: Tensor | None = None
    blind: Tensor | None = None

    def of_queries(self, tensor: Tensor, dim: int = -2) -> Tensor:
        """The block's queries, as a view of a tensor that has positions along `dim`."""
        return tensor.narrow(dim, self.query_start, len(self.queries))

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The block's keys, as a view."""
        return tensor.narrow(-2, self.key_start, len(self.keys))

    def key_pieces(self, total: Tensor) -> list[Tensor]:
        """The block's keys of [batch, key_heads, keys, head_dim], as a view."""
        return [self.of_keys(total)]

    def call_size(self, queries: Tensor) -> int:
        """How many samples one call takes: all."""
        return len(queries)

    def of_sequences(self, numbers: Tensor) -> Tensor:
        """Numbers of samples and heads, [batch, heads, 1, 1], to be broadcast to the block's scores."""
        return numbers

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Those of queries and keys in the whole sequence, to be broadcast to the block's scores."""
        return _positions(self.queries, device).unsqueeze(-1), _positions(self.keys, device)


def plan_blocks(
    mask: SequenceMask,
    query_runs: Sequence[range],
    key_runs: Sequence[range],
    device: torch.device | str = "cpu",
    finely: bool = False,
) -> list[PlannedBlock]:
    """Blocks that hold all that the mask shows, each pair once.

    Args:
        query_runs: Positions of the queries, in the order in which their tensor holds them.
        finely: Cut blocks that are wholly shown too, for what holds all scores of a block.
    """
    return [
        _block(mask, verdict, queries, keys, query_start + queries.start, key_start + keys.start, device)
        for query_start, query_run in _placed(query_runs, mask.border)
        for key_start, key_run in _placed(key_runs, mask.border)
        for verdict, queries, keys in _shown(mask, query_run, key_run, finely)
    ]


def _placed(runs: Sequence[range], border: int) -> Iterator[tuple[int, range]]:
    """Each run, in two where it goes across the border, with what to add to a position to get its place."""
    starts = accumulate(map(len, runs), initial=0)
    for start, run in zip(starts, runs, strict=False):
        middle = min(max(border, run.start), run.stop)
        for part in (range(run.start, middle), range(middle, run.stop)):
            if part:
                yield start - run.start, part


def _shown(mask: SequenceMask, queries: range, keys: range, finely: bool) -> Iterator[tuple[Verdict, range, range]]:
    verdict = mask.classify(queries, keys)
    if verdict == "skip":
        return
    if verdict != "partial" and not finely:
        yield verdict, queries, keys
        return
    for strip in _split(queries):
        classified = ((_classify(mask, strip, part), part) for part in _split(keys))
        for joint, neighbours in groupby(classified, key=lambda pair: pair[0]):
            parts = [part for _, part in neighbours]
            together = range(parts[0].start, parts[-1].stop)
            if joint != "skip":
                yield joint, strip, _seen(mask, strip, together) if joint == "partial" else together


def _split(run: range) -> Iterator[range]:
    return (run[start : start + _BLOCK] for start in range(0, len(run), _BLOCK))


def _classify(mask: SequenceMask, queries: range, keys: range) -> Verdict:
    """The verdict, with a look at the pairs where it is not clear."""
    verdict = mask.classify(queries, keys)
    if verdict != "partial":
        return verdict
    seen = mask.attends(_positions(queries), _positions(keys))
    if seen.all():
        return "full"
    return "partial" if seen.any() else "skip"


def _seen(mask: SequenceMask, queries: range, keys: range) -> range:
    """The keys without those at both ends that no query sees."""
    seen = mask.attends(_positions(queries), _positions(keys)).flatten(0, 1).any(0).nonzero()
    return keys[int(seen[0]) : int(seen[-1]) + 1]


def _block(
    mask: SequenceMask,
    verdict: Verdict,
    queries: range,
    keys: range,
    query_start: int,
    key_start: int,
    device: torch.device | str,
) -> PlannedBlock:
    if verdict != "partial":
        return PlannedBlock(queries, keys, query_start, key_start, causal=verdict == "causal")
    hidden = ~mask.attends(_positions(queries, device), _positions(keys, device)).unsqueeze(1)
    blind = hidden.all(-1)
    return PlannedBlock(queries, keys, query_start, key_start, False, hidden, blind if blind.any() else None)


def _positions(run: range, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(run.start, run.stop, device=device)


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
            outer += _same_mask_regions(pattern, across, run.shift, needed.start - sum(map(len, border)), device)
            border.append(needed)
        within = tiles[len(across) :]
        middle = len(within) // 2
        for half, some in zip(halves, (within[:middle], within[middle:]), strict=True):
            half += _same_mask_regions(pattern, some, run.shift, run.shift, device)
    return WindowPlan(halves, outer, border)


def _tiles(pattern: AttentionPattern, run: range) -> Iterator[_Tile]:
    """The run's image positions in raster order, with the keys of their reach."""
    size, reach = len(window_mask(pattern)), window_reach(pattern)
    for start in range(max(run.start, pattern.text_length), run.stop, size):
        stop = min(start + size, run.stop)
        yield range(start, stop), range(max(pattern.text_length, start - reach), stop)


def _same_mask_regions(
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
