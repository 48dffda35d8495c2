"""Attention patterns of the text-to-image transformer, and the one entry point that applies them.

Every model calls `attend` (a whole sequence) or a `KeyValueCache` (decoding). A pattern is the only description of who
sees whom: its boolean mask is the definition, whatever kernel stands behind the entry point.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
    def length(self) -> int:
        """Positions of the whole sequence."""
        return self.text_length + self.height * self.width

    def with_height(self, height: int) -> "AttentionPattern":
        """The same pattern over the first `height` rows; its mask is the top left part of this one's."""
        return replace(self, height=height)

    def mask(self, device: torch.device | str = "cpu") -> Bool[Tensor, "length length"]:
        """The definition of the pattern: True where the position of the row attends to the position of the column."""
        positions = torch.arange(self.length, device=device)
        return self._attends(positions.unsqueeze(1), positions.unsqueeze(0))

    def reachable_keys(self, position: int, device: torch.device | str = "cpu") -> Int[Tensor, " keys"]:
        """Positions that `position` attends to, ascending: all that its decoding step has to read."""
        positions = torch.arange(self.length, device=device)
        return positions[self._attends(positions.new_tensor(position), positions)]

    def _attends(self, query: Tensor, key: Tensor) -> Tensor:
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


@lru_cache(maxsize=32)
def _additive_mask(
    pattern: AttentionPattern, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "length length"]:
    """0 where the pattern attends, else -inf: what the fused kernels take without a conversion per call."""
    # A mask first built while sampling in inference mode must still be usable by a backward pass later.
    with torch.inference_mode(mode=False), torch.no_grad():
        attends = pattern.mask(device)
        return torch.zeros(attends.shape, dtype=dtype, device=device).masked_fill_(~attends, float("-inf"))


def attend(
    query: Float[Tensor, "batch heads length head_dim"],
    key: Float[Tensor, "batch heads length head_dim"],
    value: Float[Tensor, "batch heads length head_dim"],
    pattern: AttentionPattern,
) -> Float[Tensor, "batch heads length head_dim"]:
    """Softmax attention of a whole sequence under `pattern`, scores scaled by `head_dim ** -0.5`.

    Text and image keys share one softmax (paper, section 2.2).

    Raises:
        ValueError: If the sequence does not have the pattern's length.
    """
    if query.shape[-2] != pattern.length:
        raise ValueError(
            f"query has {query.shape[-2]} positions, but the pattern has {pattern.length} "
            f"(text_length {pattern.text_length} + {pattern.height} x {pattern.width}); "
            "use pattern.with_height for a prefix"
        )
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.requires_grad:
        # The fused CPU kernel's backward is slower in bf16 than in fp32.
        with torch.autocast("cpu", enabled=False):
            return _attend_dense(query.float(), key.float(), value.float(), pattern).to(query.dtype)
    return _attend_dense(query, key, value, pattern)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern) -> Tensor:
    if pattern.kind in ("full", "causal"):
        return scaled_dot_product_attention(query, key, value, is_causal=pattern.kind == "causal")
    mask = _additive_mask(pattern, query.device, query.dtype)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask)


def attend_cached(
    query: Float[Tensor, "batch heads 1 head_dim"],
    key: Float[Tensor, "batch heads cached head_dim"],
    value: Float[Tensor, "batch heads cached head_dim"],
    pattern: AttentionPattern,
    position: int,
) -> Float[Tensor, "batch heads 1 head_dim"]:
    """The row `position` of `attend`, from cached keys and values; what is cached beyond `position` is not read.

    Raises:
        ValueError: If the pattern is not causal, or the cache does not reach up to `position`.
    """
    if pattern.kind == "full":
        raise ValueError("kind ('full') attends to the future and cannot be decoded step by step; use a causal pattern")
    if not position < min(key.shape[-2], pattern.length):
        raise ValueError(
            f"position ({position}) must be below the cached positions ({key.shape[-2]}) "
            f"and the pattern's length ({pattern.length})"
        )
    keys = slice(0, position + 1)
    mask = None
    if pattern.kind != "causal":
        mask = _additive_mask(pattern, query.device, query.dtype)[position : position + 1, keys]
    return scaled_dot_product_attention(query, key[:, :, keys], value[:, :, keys], attn_mask=mask)
