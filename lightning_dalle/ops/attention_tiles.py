"""The parts of a sequence that a pattern shows, cut into dense tiles of queries and keys."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from lightning_dalle.ops.attention_pattern import AttentionPattern

# Queries of a tile. Smaller tiles hold fewer keys that the pattern hides, larger ones are computed faster by the key.
_ROW_TILE, _CONVOLUTION_TILE, _DENSE_TILE = 32, 64, 128
_VECTOR = 16
CALL_ELEMENTS = 2**18
"""Elements of the queries that one call takes on the CPU, a megabyte of float32: large results cost more than calls."""


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of one shape: element j of tile i is the position `start + i * step + j * stride`.

    Args:
        shown: All keys of a tile to all of its queries; `causal`, keys 0..j to query j; or what the pattern shows,
            which is then a part of `window_mask`.
    """

    query_start: int
    num_queries: int
    key_start: int
    num_keys: int
    shown: Literal["all", "causal", "pattern"]
    count: int = 1
    step: int = 1
    stride: int = 1

    def queries(self, tensor: Shaped[Tensor, "..."], dim: int = -2) -> Shaped[Tensor, "tiles ..."]:
        """The queries of all tiles, as a view of a tensor that has positions along `dim`."""
        return self._view(tensor, self.query_start, self.num_queries, dim)

    def keys(self, tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "tiles ..."]:
        """The keys of all tiles, as a view, which overlaps itself where tiles share keys."""
        return self._view(tensor, self.key_start, self.num_keys, -2)

    def key_pieces(self, tensor: Shaped[Tensor, "..."]) -> list[Shaped[Tensor, "tiles ..."]]:
        """The keys of all tiles piece by piece, such that no piece overlaps itself: what can be added to in place."""
        piece = self.num_keys if self.step == 1 else self.step
        return [
            self._view(tensor, self.key_start + start, min(piece, self.num_keys - start), -2)
            for start in range(0, self.num_keys, piece)
        ]

    def _view(self, tensor: Tensor, start: int, length: int, dim: int) -> Tensor:
        size, stride = list(tensor.shape), list(tensor.stride())
        unit = stride[dim]
        size[dim], stride[dim] = length, self.stride * unit
        offset = tensor.storage_offset() + start * unit
        return tensor.as_strided((self.count, *size), (self.step * unit, *stride), offset)


def tiles_of(pattern: AttentionPattern) -> list[AttentionTiles]:
    """Tiles that hold all that the pattern shows, each pair once; the first of them has every query."""
    if pattern.kind in ("causal", "full") or pattern.height == 0:
        return _dense_tiles(pattern)
    text, width = pattern.text_length, pattern.width
    whole_text = AttentionTiles(0, pattern.length, 0, text, "causal")
    if pattern.kind == "column":
        height = pattern.height
        return [whole_text, AttentionTiles(text, height, text, height, "causal", count=width, stride=width)]
    return [whole_text, *_window_tiles(pattern)]


def window_mask(pattern: AttentionPattern, device: torch.device | str = "cpu") -> Bool[Tensor, "queries keys"]:
    """Who attends to whom in a tile of image positions in raster order, whose first query reaches its first key.

    It depends on offsets alone, so that the mask of any tile whose keys start later is a part of it.
    """
    first = pattern.text_length + window_reach(pattern)
    queries = torch.arange(first, first + _window_size(pattern), device=device).unsqueeze(1)
    keys = torch.arange(pattern.text_length, first + _window_size(pattern), device=device)
    return pattern.attends(queries, keys)


def window_reach(pattern: AttentionPattern) -> int:
    """Positions before a tile's first query that its keys start at: the pattern's reach, rounded up if long.

    Products are faster where numbers of keys fill whole vectors.
    """
    reach = pattern.reach
    return reach if reach < _VECTOR else -(-reach // _VECTOR) * _VECTOR


def _window_size(pattern: AttentionPattern) -> int:
    return _ROW_TILE if pattern.kind == "row" else _CONVOLUTION_TILE


def _window_tiles(pattern: AttentionPattern) -> list[AttentionTiles]:
    """Image positions in raster order, each with the keys of its reach."""
    start, end = pattern.text_length, pattern.length
    reach, size = window_reach(pattern), _window_size(pattern)
    tiles = []
    # The reach of the first queries is cut by the image's start.
    while start < min(pattern.text_length + reach, end):
        queries = min(size, end - start)
        keys = start + queries - pattern.text_length
        tiles.append(AttentionTiles(start, queries, pattern.text_length, keys, "pattern"))
        start += queries
    count, rest = divmod(end - start, size)
    if count:
        tiles.append(AttentionTiles(start, size, start - reach, reach + size, "pattern", count, size))
    if rest:
        tiles.append(AttentionTiles(end - rest, rest, end - rest - reach, reach + rest, "pattern"))
    return tiles


def _dense_tiles(pattern: AttentionPattern) -> list[AttentionTiles]:
    """Some keys at a time with all queries that see them, for what no fused kernel computes."""
    tiles = []
    for start in range(0, pattern.length, _DENSE_TILE):
        size = min(_DENSE_TILE, pattern.length - start)
        if pattern.kind == "full":
            tiles.append(AttentionTiles(0, pattern.length, start, size, "all"))
        else:
            tiles.append(AttentionTiles(start, pattern.length - start, start, size, "causal"))
    return tiles
