"""Gathered shards of a sequence, and sums over a sequence, with gradients.

The processes of a context group compute one loss together, and their gradients are averaged like those of other
processes. So a gradient that only this process has counts as many times as there are processes.
"""

import time
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout


def gather_positions(
    local: Shaped[Tensor, "..."],
    layout: SequenceLayout,
    dim: int,
    group: ProcessGroup,
    statistics: CommunicationStatistics,
) -> Shaped[Tensor, "..."]:
    """Gather the whole tensor on each process of the group; each must go on with it alike.

    Raises:
        ValueError: If the local shard has another length than the layout says.
    """
    expected = layout.local_length(group.rank())
    if local.shape[dim] != expected:
        raise ValueError(
            f"a tensor to gather has {local.shape[dim]} positions along dim {dim}, but this rank holds {expected} of "
            f"{layout.length}; the plan must shard and gather the same sequence"
        )
    gathered: Tensor = _Gather.apply(local, layout, dim, group, statistics)
    return gathered


def sum_over_context(value: Float[Tensor, "*shape"], group: ProcessGroup) -> Float[Tensor, "*shape"]:
    """Sum over the processes of the group, in at least single precision."""
    total: Tensor = _Sum.apply(value, group)
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        layout: SequenceLayout,
        dim: int,
        group: ProcessGroup,
        statistics: CommunicationStatistics,
    ) -> Tensor:
        ctx.layout, ctx.dim, ctx.group = layout, dim, group
        length, longest = local.shape[dim], max(map(layout.local_length, range(group.size())))
        # all_gather takes tensors of one shape.
        moved = local.transpose(0, dim)
        padded = torch.cat([moved, moved.new_zeros(longest - length, *moved.shape[1:])]).contiguous()
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        start = time.perf_counter()
        distributed.all_gather(parts, padded, group=group)
        seconds = time.perf_counter() - start
        statistics.waiting_seconds += seconds
        statistics.communication_seconds += seconds
        statistics.bytes_sent += padded.nbytes * (group.size() - 1)
        kept = [each[: layout.local_length(rank)] for rank, each in enumerate(parts)]
        return layout.unshard(kept, dim=0).transpose(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        local = ctx.layout.shard(gradient, ctx.group.rank(), ctx.dim)
        return local * ctx.group.size(), None, None, None, None


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
