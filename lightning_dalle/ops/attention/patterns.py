"""Attention patterns of the DALL-E paper, as boolean masks."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
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

    The boolean mask is the definition, whatever kernel attends: those only skip what it masks.

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
        """Return the same pattern over the first `height` rows; its mask is the top left part of this one's."""
        return replace(self, height=height)

    def mask(self, device: torch.device | str = "cpu") -> Bool[Tensor, "length length"]:
        """Return the definition of the pattern: True where the row's position attends to the column's."""
        positions = torch.arange(self.length, device=device)
        return self.attends(positions.unsqueeze(1), positions.unsqueeze(0))

    def attends(self, query: Int[Tensor, "..."], key: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        """Return the mask at chosen pairs of positions, which are broadcast against each other."""
        offset = query - key
        if self.kind == "full":
            return torch.ones_like(offset, dtype=torch.bool)
        text_key = key < self.text_length
        return (offset >= 0) & (text_key | self._near(offset))

    def _near(self, offset: Tensor) -> Tensor:
        """Return whether two image positions, `offset` apart in raster order, see each other."""
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
