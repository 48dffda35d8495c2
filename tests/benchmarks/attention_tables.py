"""Attention of one layer, forward and backward, against torch's fused dense attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.ops.attention.api import attend, attend_projected
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from tests.benchmarks.table import Table, milliseconds, times_faster
from tests.benchmarks.timing import interleaved_medians

SPARSE_KINDS: tuple[PatternKind, ...] = ("row", "column", "convolution")
GOALS = {32: {"row": "2.2x", "column": "2.2x", "convolution": "1.5x"}, 64: {"row": "5x", "column": "5x"}}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
ProjectedAttention = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AttentionSizes:
    text_length: int = 256
    batch: int = 2
    num_heads: int = 8
    head_dim: int = 64
    grids: tuple[int, ...] = (32, 64)
    growth: tuple[int, ...] = (16, 32, 48, 64)
    rounds: int = 11


class LayerAttention:
    """Attention between a layer's fused projection and its output projection, as a model calls it."""

    def __init__(self, sizes: AttentionSizes, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (sizes.batch, length, 3, sizes.num_heads, sizes.head_dim)
        self._projected = torch.randn(shape, generator=generator).requires_grad_()
        self._grad_output = torch.randn(sizes.batch, length, sizes.num_heads * sizes.head_dim, generator=generator)
        self._separate = tuple(part.detach().contiguous().requires_grad_() for part in _parts(self._projected))
        self._grad_separate = torch.randn(self._separate[0].shape, generator=generator)

    def forward(self, attention: ProjectedAttention) -> Tensor:
        return attention(self._projected).transpose(1, 2).flatten(2)

    def forward_and_backward(self, attention: ProjectedAttention) -> None:
        torch.autograd.grad(self.forward(attention), self._projected, self._grad_output)

    def alone(self, attention: Attention) -> None:
        """Without what splits a projection and concatenates its gradients."""
        torch.autograd.grad(attention(*self._separate), self._separate, self._grad_separate)

    def saved_bytes(self, attention: ProjectedAttention) -> int:
        saved: list[int] = []

        def measured(tensor: Tensor) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(measured, lambda tensor: tensor):
            self.forward(attention)
        return sum(saved)


def _parts(projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def layer_table(sizes: AttentionSizes) -> Table:
    table = Table(
        "Attention of one layer, forward and backward",
        f"Text {sizes.text_length}, {sizes.num_heads} heads of {sizes.head_dim}, batch {sizes.batch}, fp32. Dense is "
        "`scaled_dot_product_attention`, and faster is against its faster way. Alone: of separate query, key and "
        "value, against causal; the other columns are of one projection, of which structured attention takes the "
        "whole, and dense attention three views, whose gradients are concatenated. "
        "Saved: MB kept for the backward pass.",
        (
            "grid",
            "pattern",
            "ms",
            "dense causal ms",
            "dense masked ms",
            "faster",
            "alone",
            "goal",
            "saved",
            "dense saved",
        ),
    )
    for grid in sizes.grids:
        for kind in SPARSE_KINDS:
            table.rows.append(_layer_row(sizes, AttentionPattern(kind, sizes.text_length, grid, grid)))
    return table


def _layer_row(sizes: AttentionSizes, pattern: AttentionPattern) -> tuple[str, ...]:
    layer = LayerAttention(sizes, pattern.length)
    mask = torch.zeros(pattern.length, pattern.length).masked_fill_(~pattern.mask(), float("-inf"))
    causal = partial(scaled_dot_product_attention, is_causal=True)
    attentions: dict[str, ProjectedAttention] = {
        "structured": partial(attend_projected, pattern=pattern),
        "causal": lambda projected: causal(*_parts(projected)),
        "masked": lambda projected: scaled_dot_product_attention(*_parts(projected), attn_mask=mask),
    }
    works = {name: partial(layer.forward_and_backward, attention) for name, attention in attentions.items()}
    alone = {
        "structured alone": partial(layer.alone, partial(attend, pattern=pattern)),
        "causal alone": partial(layer.alone, causal),
    }
    seconds = interleaved_medians(works | alone, sizes.rounds)
    dense = min(seconds["causal"], seconds["masked"])
    saved = [f"{layer.saved_bytes(attentions[name]) / 1e6:.1f}" for name in ("structured", "causal")]
    return (
        f"{pattern.height}x{pattern.width}",
        pattern.kind,
        *(milliseconds(seconds[name]) for name in attentions),
        times_faster(dense, seconds["structured"]),
        times_faster(seconds["causal alone"], seconds["structured alone"]),
        GOALS.get(pattern.width, {}).get(pattern.kind, ""),
        *saved,
    )


def growth_table(sizes: AttentionSizes) -> Table:
    columns = [f"{grid}x{grid}" for grid in sizes.growth]
    table = Table(
        "Microseconds for each image token, forward and backward",
        "Constant is linear growth. At a fixed width the pattern reaches equally far whatever the number of tokens: "
        f"{sizes.growth[1]} columns for row and convolution, {sizes.growth[1]} rows for column, as many tokens as in "
        "the square grid above.",
        ("pattern", *columns, "growth"),
    )
    for kind in (*SPARSE_KINDS, "causal"):
        squares = [AttentionPattern(kind, sizes.text_length, grid, grid) for grid in sizes.growth]
        table.rows.append(_growth_row(sizes, f"{kind}, square grid", squares))
    for kind in SPARSE_KINDS:
        fixed = [_of_fixed_width(kind, sizes, grid) for grid in sizes.growth]
        table.rows.append(_growth_row(sizes, f"{kind}, fixed width", fixed))
    return table


def _of_fixed_width(kind: PatternKind, sizes: AttentionSizes, grid: int) -> AttentionPattern:
    width = sizes.growth[1]
    shape = (width, grid * grid // width) if kind == "column" else (grid * grid // width, width)
    return AttentionPattern(kind, sizes.text_length, *shape)


def _growth_row(sizes: AttentionSizes, name: str, patterns: list[AttentionPattern]) -> tuple[str, ...]:
    works = {
        str(pattern): partial(
            LayerAttention(sizes, pattern.length).forward_and_backward, partial(attend_projected, pattern=pattern)
        )
        for pattern in patterns
    }
    seconds = interleaved_medians(works, sizes.rounds).values()
    per_token = [1e6 * each / pattern.image_length for each, pattern in zip(seconds, patterns, strict=True)]
    return name, *(f"{each:.0f}" for each in per_token), f"{per_token[-1] / per_token[0]:.2f}x"
