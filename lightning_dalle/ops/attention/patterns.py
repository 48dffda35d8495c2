"""Attention patterns of the DALL-E paper: boolean masks, and the tiles that they are made of."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

PatternKind = Literal["row", "column", "convolution", "causal", "full"]


@dataclass(frozen=True)
class AttentionPattern:
    """Who attends to whom in `[text block, image grid in raster order]` (Ramesh et al. 2021, section 2.2, figure 11).

    Text is causal, and every image position also attends to the whole text block. Among image positions

    - `row`: itself and the `width` positions before it in raster order, across row ends;
    - `column`: its own column, down to its own row;
    - `convolution`: the causal half of a `kernel_size` x `kernel_size` window, which wraps around row ends in raster
      order: the figure leaves that open, but the mean of 55.8 keys at 32 x 32 does not;
    - `causal`: everything up to itself; `full`: everything, also for text, so it cannot be decoded step by step.

    The boolean mask is the definition, whatever kernel attends: those only skip what it hides.

    Args:
        text_length: Positions of the text block, its start and end markers included.
        height: Rows of the grid; 0 is a sequence of text alone.
        kernel_size: Side of the convolution's window, odd; the other kinds ignore it.

    Raises:
        ValueError: If the kind is unknown, a size is too small, or the kernel size is even.
    """

    kind: PatternKind
    text_length: int
    height: int
    width: int
    kernel_size: int = 11

    def __post_init__(self) -> None:
        if self.kind not in get_args(PatternKind):
            raise ValueError(f"kind ({self.kind!r}) must be one of {', '.join(get_args(PatternKind))}")
        for name, least in (("text_length", 1), ("height", 0), ("width", 1), ("kernel_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {least}")
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size ({self.kernel_size}) must be odd, so that the window has a centre")

    @property
    def image_length(self) -> int:
        """Positions of the image grid."""
        return self.height * self.width

    @property
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.text_length + self.image_length

    @property
    def reach(self) -> int:
        """Positions in raster order between an image position and the farthest image position it may attend to."""
        match self.kind:
            case "row":
                return self.width
            case "convolution":
                return self.kernel_size // 2 * (self.width + 1)
            case _:
                return max(self.image_length - 1, 0)

    def with_height(self, height: int) -> "AttentionPattern":
        """The same pattern over the first `height` rows; its mask is the top left part of this one's."""
        return replace(self, height=height)

    def mask(self, device: torch.device | str = "cpu") -> Bool[Tensor, "length length"]:
        """The definition of the pattern: True where the position of the row attends to the position of the column."""
        positions = torch.arange(self.length, device=device)
        return self.attends(positions.unsqueeze(1), positions.unsqueeze(0))

    def reachable_keys(self, position: int, device: torch.device | str = "cpu") -> Int[Tensor, " keys"]:
        """Positions that `position` attends to, ascending: all that its decoding step has to read."""
        positions = torch.arange(self.length, device=device)
        return positions[self.attends(positions.new_tensor(position), positions)]

    def attends(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """The mask at chosen pairs of positions, which are broadcast against each other."""
        offset = query - key
        if self.kind == "full":
            return torch.ones_like(offset, dtype=torch.bool)
        text_key = key < self.text_length
        return (offset >= 0) & (text_key | self._near(offset))

    def _near(self, offset: Tensor) -> Tensor:
        """Whether two image positions, `offset` apart in raster order, see each other."""
        match self.kind:
            case "row":
                return offset <= self.width
            case "column":
                return offset % self.width == 0
            case "convolution":
                reach = torch.arange(-(self.kernel_size // 2), self.kernel_size // 2 + 1, device=offset.device)
                return torch.isin(offset, (reach.unsqueeze(1) * self.width + reach).flatten())
            case _:
                return torch.ones_like(offset, dtype=torch.bool)


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
    # The reach of the first queries ends at the image's start.
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
