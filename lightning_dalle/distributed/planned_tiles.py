"""Tiles of a pattern's grid between the positions that one process holds and those that one process gave it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from lightning_dalle.ops.attention_tiles import CALL_ELEMENTS, AttentionTiles
from lightning_dalle.ops.block_attention import additive_mask


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
