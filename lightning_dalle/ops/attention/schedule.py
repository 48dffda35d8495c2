"""Block schedules: which tiles of queries and keys are computed, and which of their pairs are masked.

A schedule is made once for a mask and then computed again and again (`online_softmax`). Tiles say where their queries
and keys lie in the tensors that a process holds, and which positions of the whole sequence these are: a process that
holds all of a sequence has shifts of 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, product

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from lightning_dalle.ops.attention.kernels import additive_mask
from lightning_dalle.ops.attention.patterns import AttentionPattern

# Queries of a tile. Smaller tiles hold fewer keys that the pattern masks, larger ones are computed faster by the key.
_ROW_TILE, _CONVOLUTION_TILE, DENSE_TILE = 32, 64, 128
_VECTOR = 16
# Elements of a mask that is kept as numbers beside the boolean one.
_KEPT_MASK = 2**16


@dataclass(frozen=True, eq=False)
class Tiles:
    """Tiles of one shape: element j of tile i is at index `start + i * step + j * stride` of a tensor.

    Attributes:
        query_start: Index of the first query of the first tile; `key_start` likewise.
        query_shift: What is added to the index of a query to get its position in the whole sequence.
        key_shift: The same for keys.
        causal: Whether query j of a tile sees its keys 0..j alone.
        masked: True where a query of a tile does not see a key. Of several tiles it is that of each.
        fully_masked: True where a query sees no key of the tile; None where there is no such query.
    """

    query_start: int
    num_queries: int
    key_start: int
    num_keys: int
    count: int = 1
    step: int = 1
    stride: int = 1
    query_shift: int = 0
    key_shift: int = 0
    causal: bool = False
    masked: Bool[Tensor, "#batch 1 queries keys"] | None = None
    fully_masked: Bool[Tensor, "#batch 1 queries"] | None = None
    _additive: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)

    def queries(self, tensor: Shaped[Tensor, "..."], dim: int = -2) -> Shaped[Tensor, "tiles ..."]:
        """Return the queries of all tiles, as a view of a tensor that has positions along `dim`."""
        return self._view(tensor, self.query_start, self.num_queries, dim)

    def keys(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "tiles ..."]:
        """Return the keys of all tiles, as a view, which overlaps itself where tiles share keys."""
        return self._view(tensor, self.key_start, self.num_keys, -2)

    def key_pieces(self, tensor: Shaped[Tensor, "..."]) -> list[Shaped[Tensor, "tiles ..."]]:
        """Return the keys of all tiles in pieces that do not overlap themselves, and so can be added to in place."""
        piece = self.step if self.count > 1 and self.step > 1 else self.num_keys
        return [
            self._view(tensor, self.key_start + start, min(piece, self.num_keys - start), -2)
            for start in range(0, self.num_keys, piece)
        ]

    def positions(
        self, device: torch.device
    ) -> tuple[Int[Tensor, "tiles 1 1 queries 1"], Int[Tensor, "tiles 1 1 1 keys"]]:
        """Return positions of queries and keys in the whole sequence, to be broadcast to the tiles' scores."""
        firsts = torch.arange(self.count, device=device).view(-1, 1, 1, 1, 1) * self.step
        queries = torch.arange(self.num_queries, device=device).unsqueeze(1) * self.stride
        keys = torch.arange(self.num_keys, device=device) * self.stride
        return firsts + queries + self.query_start + self.query_shift, firsts + keys + self.key_start + self.key_shift

    def additive(self, dtype: torch.dtype) -> Tensor | None:
        """`masked` as 0 or -inf; None if nothing is masked, or only what `causal` says."""
        if self.masked is None:
            return None
        if self.masked.numel() > _KEPT_MASK:
            return additive_mask(~self.masked, dtype)
        if dtype not in self._additive:
            self._additive[dtype] = additive_mask(~self.masked, dtype)
        return self._additive[dtype]

    def additive_pairs(self, like: Tensor) -> Tensor:
        """0 or -inf for each pair of a tile, [1, 1, queries, keys], `causal` included."""
        additive = self.additive(like.dtype)
        if additive is None:
            attends = like.new_ones((1, 1, self.num_queries, self.num_keys), dtype=torch.bool)
            additive = self._additive.get(like.dtype)
            if additive is None:
                additive = additive_mask(attends.tril_() if self.causal else attends, like.dtype)
                if additive.numel() <= _KEPT_MASK:
                    self._additive[like.dtype] = additive
        return additive

    def halves(self) -> tuple["Tiles", "Tiles | None"]:
        """Return the same tiles in two."""
        first = self.count - self.count // 2
        if first == self.count:
            return self, None
        rest = replace(
            self,
            query_start=self.query_start + first * self.step,
            key_start=self.key_start + first * self.step,
            count=self.count - first,
        )
        return replace(self, count=first), rest

    def _view(self, tensor: Tensor, start: int, length: int, dim: int) -> Tensor:
        size, stride = list(tensor.shape), list(tensor.stride())
        unit = stride[dim]
        size[dim], stride[dim] = length, self.stride * unit
        offset = tensor.storage_offset() + start * unit
        return tensor.as_strided((self.count, *size), (self.step * unit, *stride), offset)


@dataclass(frozen=True)
class PlacedRun:
    """Positions that lie side by side in a tensor.

    Attributes:
        shift: What is added to an index of the tensor to get the position.
    """

    positions: range
    shift: int


def placed_runs(runs: Sequence[range]) -> list[PlacedRun]:
    """Return runs of positions with where they lie in a tensor that holds them in this order."""
    starts = accumulate(map(len, runs), initial=0)
    return [PlacedRun(run, run.start - start) for start, run in zip(starts, runs, strict=False)]


@lru_cache(maxsize=64)
def whole_schedule(pattern: AttentionPattern, device: torch.device | str = "cpu") -> tuple[Tiles, ...]:
    """Return tiles that hold all that a pattern shows of a whole sequence, once each; the first has all queries."""
    # Queries run down, keys to the right.
    #
    #      text    image keys
    #     +------+-----------------+     row and convolution:             column: one tile for each
    #     |causal|                 |     ....[=====reach=====][==]        column of the grid, all of
    #     |------+  tiles of the   |       ....[=====reach=====][==]      one shape, every `width`-th
    #     | all  |  image's        |     tiles of 32 or 64 queries with   query and key, causal
    #     |      |  pattern        |     the keys of their reach, masked
    #     +------+-----------------+     at both ends
    run = [range(pattern.length)]
    if pattern.kind in ("causal", "full") or pattern.height == 0:
        return tuple(_dense_tiles(pattern))
    if pattern.kind == "column":
        return tuple(column_schedule(pattern, run, run))
    return tuple(window_schedule(pattern, run, device).inner)


def _dense_tiles(pattern: AttentionPattern) -> Iterator[Tiles]:
    """Some keys at a time with all queries that see them: for what no fused kernel computes, such as dropout."""
    for start in range(0, pattern.length, DENSE_TILE):
        num_keys = min(DENSE_TILE, pattern.length - start)
        if pattern.kind == "full":
            yield Tiles(0, pattern.length, start, num_keys)
        else:
            yield Tiles(start, pattern.length - start, start, num_keys, causal=True)


def text_tiles(text_length: int, queries: PlacedRun, keys: PlacedRun) -> Iterator[Tiles]:
    """Yield what queries see of the text among keys: all of it before them, and of their own up to themselves."""
    end = min(keys.positions.stop, text_length)
    before = range(keys.positions.start, min(end, queries.positions.start))
    if before:
        yield tile_at(queries.positions, before, queries.shift, keys.shift)
    among = range(max(keys.positions.start, queries.positions.start), min(end, queries.positions.stop))
    if among:
        yield tile_at(range(among.start, queries.positions.stop), among, queries.shift, keys.shift, causal=True)


def tile_at(
    queries: range,
    keys: range,
    query_shift: int,
    key_shift: int,
    causal: bool = False,
    masked: Tensor | None = None,
    fully_masked: Tensor | None = None,
) -> Tiles:
    """Return one tile, given the positions of its queries and keys."""
    return Tiles(
        queries.start - query_shift,
        len(queries),
        keys.start - key_shift,
        len(keys),
        query_shift=query_shift,
        key_shift=key_shift,
        causal=causal,
        masked=masked,
        fully_masked=fully_masked,
    )


def column_schedule(pattern: AttentionPattern, query_runs: Sequence[range], key_runs: Sequence[range]) -> list[Tiles]:
    """Return tiles that hold all that the column pattern shows, each pair once.

    Args:
        query_runs: Positions of the queries, in the order in which their tensor holds them; each is one of `key_runs`,
            or has none of their positions.
    """
    return [
        tiles
        for queries, keys in product(placed_runs(query_runs), placed_runs(key_runs))
        for tiles in (*text_tiles(pattern.text_length, queries, keys), *_column_tiles(pattern, queries, keys))
    ]


def _column_tiles(pattern: AttentionPattern, queries: PlacedRun, keys: PlacedRun) -> Iterator[Tiles]:
    """Yield a tile for each column: queries of a run see keys of an earlier run, and their own up to themselves."""
    if keys.positions.start > queries.positions.start:
        return
    for columns in _columns_of_equal_rows(pattern, queries.positions, keys.positions):
        query_rows, key_rows = (_rows(pattern, run.positions, columns.start) for run in (queries, keys))
        if query_rows and key_rows:
            first, width = pattern.text_length + columns.start, pattern.width
            yield Tiles(
                first + query_rows.start * width - queries.shift,
                len(query_rows),
                first + key_rows.start * width - keys.shift,
                len(key_rows),
                count=len(columns),
                stride=width,
                query_shift=queries.shift,
                key_shift=keys.shift,
                causal=keys.positions == queries.positions,
            )


def _columns_of_equal_rows(pattern: AttentionPattern, *runs: range) -> Iterator[range]:
    """Yield neighbouring columns of which each run has the same rows: a run may start and end within a row."""
    ends = {max(end - pattern.text_length, 0) % pattern.width for run in runs for end in (run.start, run.stop)}
    return (range(*pair) for pair in pairwise(sorted({0, pattern.width, *ends})))


def _rows(pattern: AttentionPattern, run: range, column: int) -> range:
    """Return the rows in which the run has a column."""
    start, stop = (-((pattern.text_length + column - end) // pattern.width) for end in (run.start, run.stop))
    return range(max(start, 0), max(stop, 0))


@dataclass(frozen=True)
class WindowSchedule:
    """Tiles of a process with its own keys, and with a halo of keys that others hold too.

    Attributes:
        inner: Tiles of its own keys alone.
        outer: Tiles of the halo's keys.
        halo: Positions of the halo's keys, in its order.
    """

    inner: list[Tiles]
    outer: list[Tiles]
    halo: list[range]

    def inner_halves(self) -> tuple[list[Tiles], list[Tiles]]:
        """Return `inner` in two parts of about equal work."""
        halves = [tiles.halves() for tiles in self.inner]
        return [first for first, _ in halves], [second for _, second in halves if second is not None]


def window_schedule(
    pattern: AttentionPattern, runs: Sequence[range], device: torch.device | str = "cpu"
) -> WindowSchedule:
    """Return tiles that hold all that a pattern of limited reach shows to some queries, each pair once.

    Args:
        runs: Positions of the queries, in the order in which their tensor holds them.
    """
    # A run of the image, in tiles of queries:  [=1=][=2=][=3=][=4=]
    # What tile 1 reaches, and so the halo:  [---reach---===]
    # What tile 2 reaches is in the run:           [---reach---===]
    queries = placed_runs(runs)
    schedule = WindowSchedule([], [], [])
    # 1. The text, by own keys if this process holds all of it, else by the halo.
    text = range(min(pattern.text_length, max(run.stop for run in runs)))
    holders = [run for run in queries if run.positions.start == 0 and run.positions.stop >= text.stop]
    if not holders:
        schedule.halo.append(text)
    text_keys = holders[0] if holders else PlacedRun(text, 0)
    for run in queries:
        (schedule.inner if holders else schedule.outer).extend(text_tiles(pattern.text_length, run, text_keys))
    for run in queries:
        tiles = list(_window_tiles(pattern, run.positions))
        first_image = max(run.positions.start, pattern.text_length)
        across = [tile for tile in tiles if tile[1].start < first_image]
        # 2. Tiles that reach across the start of the run: the halo holds their own keys again, so that they are whole.
        if across:
            needed = range(across[0][1].start, across[-1][1].stop)
            halo_shift = needed.start - sum(map(len, schedule.halo))
            schedule.outer.extend(_equal_tiles(pattern, across, run.shift, halo_shift, device))
            schedule.halo.append(needed)
        # 3. All others, by own keys; equal ones are computed at once.
        schedule.inner.extend(_equal_tiles(pattern, tiles[len(across) :], run.shift, run.shift, device))
    return schedule


def _window_tiles(pattern: AttentionPattern, run: range) -> Iterator[tuple[range, range]]:
    """Yield the run's image positions in raster order, tile by tile, each with the keys of its reach."""
    size, reach = _window_size(pattern), window_reach(pattern)
    for start in range(max(run.start, pattern.text_length), run.stop, size):
        stop = min(start + size, run.stop)
        yield range(start, stop), range(max(pattern.text_length, start - reach), stop)


def _equal_tiles(
    pattern: AttentionPattern,
    tiles: Sequence[tuple[range, range]],
    query_shift: int,
    key_shift: int,
    device: torch.device | str,
) -> Iterator[Tiles]:
    """Yield neighbours of one shape as one batch of tiles."""
    for (num_queries, num_keys), group in groupby(tiles, key=lambda tile: (len(tile[0]), len(tile[1]))):
        same = list(group)
        queries, keys = same[0]
        first_key = keys.start + window_reach(pattern) - queries.start
        shown = window_mask(pattern, device)[:num_queries, first_key : first_key + num_keys]
        tile = tile_at(queries, keys, query_shift, key_shift, masked=~shown[None, None])
        yield replace(tile, count=len(same), step=num_queries)


def window_mask(pattern: AttentionPattern, device: torch.device | str = "cpu") -> Bool[Tensor, "queries keys"]:
    """Return who attends to whom in a tile of image positions in raster order, whose first query reaches its first key.

    It depends on offsets alone, so that the mask of any tile whose keys start later is a part of it.
    """
    first = pattern.text_length + window_reach(pattern)
    queries = torch.arange(first, first + _window_size(pattern), device=device).unsqueeze(1)
    keys = torch.arange(pattern.text_length, first + _window_size(pattern), device=device)
    return pattern.attends(queries, keys)


def window_reach(pattern: AttentionPattern) -> int:
    """Return how far before a tile's first query its keys start: the pattern's reach, rounded up if long.

    Products are faster where numbers of keys fill whole vectors.
    """
    reach = pattern.reach
    return reach if reach < _VECTOR else -(-reach // _VECTOR) * _VECTOR


def _window_size(pattern: AttentionPattern) -> int:
    return _ROW_TILE if pattern.kind == "row" else _CONVOLUTION_TILE
