"""Parts of a sequence joined, and sums over a sequence, with gradients.

The processes of a context group compute one loss together, and their gradients are averaged like those of other
processes. So a gradient that only this process has counts as many times as there are processes.
"""

import time
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_parallel.comm import ContextTraffic
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout


def join_positions(
    part: Shaped[Tensor, "..."], layout: SequenceLayout, dim: int, group: ProcessGroup, traffic: ContextTraffic
) -> Shaped[Tensor, "..."]:
    """The whole tensor, on each process of the group; each must go on with it alike.

    Raises:
        ValueError: If this process's part has another length than the layout says.
    """
    expected = layout.local_length(group.rank())
    if part.shape[dim] != expected:
        raise ValueError(
            f"a tensor to join has {part.shape[dim]} positions along dim {dim}, but this rank holds {expected} of "
            f"{layout.length}; the plan must cut and join the same sequence"
        )
    joined: Tensor = _Join.apply(part, layout, dim, group, traffic)
    return joined


def sum_over_context(value: Float[Tensor, "*shape"], group: ProcessGroup) -> Float[Tensor, "*shape"]:
    """The sum over the processes of the group, at least in single precision."""
    total: Tensor = _Sum.apply(value, group)
    return total


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, layout: SequenceLayout, dim: int, group: ProcessGroup, traffic: ContextTraffic
    ) -> Tensor:
        ctx.layout, ctx.dim, ctx.group = layout, dim, group
        own, longest = part.shape[dim], max(map(layout.local_length, range(group.size())))
        # Gathered parts must be equally long.
        moved = part.transpose(0, dim)
        padded = torch.cat([moved, moved.new_zeros(longest - own, *moved.shape[1:])]).contiguous()
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        start = time.perf_counter()
        distributed.all_gather(parts, padded, group=group)
        seconds = time.perf_counter() - start
        traffic.waiting_seconds += seconds
        traffic.travelling_seconds += seconds
        traffic.sent_bytes += padded.nbytes * (group.size() - 1)
        kept = [each[: layout.local_length(rank)] for rank, each in enumerate(parts)]
        return layout.unshard(kept, dim=0).transpose(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.layout.shard(gradient, ctx.group.rank(), ctx.dim)
        return own * ctx.group.size(), None, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup) -> Tensor:
        ctx.size, ctx.dtype = group.size(), value.dtype
        total = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient * ctx.size).to(ctx.dtype), None
