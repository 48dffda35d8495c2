"""What the benchmarks of attention over a sharded sequence attend, and one step of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is attended; the sequence is a text of 1/16 of it and an image about as wide as high."""

    length: int = 4096
    heads: int = 8
    head_dim: int = 64
    rounds: int = 15
    depth: int = 8

    def pattern(self, kind: PatternKind) -> AttentionPattern:
        text = self.length // 16
        width = max(2, int((self.length - text) ** 0.5) // 4 * 4)
        while (self.length - text) % width:
            width -= 1
        return AttentionPattern(kind, text, (self.length - text) // width, width)


def whole_inputs(sizes: Sizes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, sizes.heads, sizes.length, sizes.head_dim)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def step(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors[3])]
