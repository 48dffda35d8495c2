"""Gathered shards of a sequence and sums over it, with gradients; and whether processes hold the same values.

The processes of a context group compute one loss together, and their gradients are averaged like those of other
processes. So a gradient that only this process has counts as many times as there are processes.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.ops.random import mix_bits


def gather_positions(
    local: Shaped[Tensor, "..."],
    layout: SequenceLayout,
    dim: int,
    group: ProcessGroup,
    statistics: CommunicationStatistics,
    has_shards_behind: Callable[[], bool],
) -> Shaped[Tensor, "..."]:
    """Gather the whole tensor on each process of the group.

    Args:
        has_shards_behind: Whether processes have gone on with different parts of the result. Their gradients are then
            summed; otherwise each has that of the whole already, and nothing is sent. Asked in the backward pass.

    Raises:
        ValueError: If the local shard has another length than the layout says.
    """
    expected = layout.local_length(group.rank())
    if local.shape[dim] != expected:
        raise ValueError(
            f"a tensor to gather has {local.shape[dim]} positions along dim {dim}, but this rank holds {expected} of "
            f"{layout.length}; the plan must shard and gather the same sequence"
        )
    gathered: Tensor = _Gather.apply(local, layout, dim, group, statistics, has_shards_behind)
    return gathered


def sum_over_context(value: Float[Tensor, "*shape"], group: ProcessGroup) -> Float[Tensor, "*shape"]:
    """Sum over the processes of the group, in at least single precision."""
    total: Tensor = _Sum.apply(value, group)
    return total


def validate_batches_agree(batch: Any, group: ProcessGroup, device: torch.device, everywhere: bool = True) -> None:
    """Refuse batches that differ within the group.

    Args:
        everywhere: Let the processes of all groups refuse together, for which all of the world must call; otherwise
            those of the group do, and the others wait for them.

    Raises:
        ValueError: If they differ.
    """
    differs = (~_hold_the_same(batch, group, device)).to(torch.int64)
    if everywhere:
        distributed.all_reduce(differs, op=distributed.ReduceOp.MAX)
    if differs:
        raise ValueError(
            "the processes of a context group got different batches, but share one sequence; draw augmentations by "
            "sample instead of by rank or worker, and samplers by trainer.distributed_sampler_kwargs"
        )


def is_replicated(tensor: Shaped[Tensor, "..."], dim: int, group: ProcessGroup) -> bool:
    """Return whether all processes of the group hold the same values, and these differ along `dim`.

    Values that are alike at all positions tell nothing: shards of them are equal too.
    """
    first = tensor.narrow(dim, 0, 1)
    varies = bool((tensor != first).any())
    return bool(_hold_the_same(tensor, group, tensor.device)) and varies


def _hold_the_same(tree: Any, group: ProcessGroup, device: torch.device) -> Tensor:
    digest = _digest(tree, device)
    extremes = torch.stack([digest, -digest])
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX, group=group)
    return extremes[0] == -extremes[1]


def _digest(tree: Any, device: torch.device) -> Tensor:
    """Hash tensors where they are, numbers and texts; the rest counts as equal."""
    digest = torch.zeros((), dtype=torch.int64, device=device)
    others = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            others.update(repr((tuple(leaf.shape), leaf.dtype)).encode())
            digest = mix_bits(digest + _hash(leaf.detach()).to(device))
        elif isinstance(leaf, bool | int | float | str | bytes):
            others.update(repr(leaf).encode())
    # One bit less, so that its negative exists.
    return (digest + int.from_bytes(others.digest(), "big", signed=True)) >> 1


def _hash(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's words of 64 bits, each times a random number of its place (multilinear hashing)."""
    octets = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = torch.cat([octets, octets.new_zeros(-len(octets) % 8)]).view(torch.int64)
    return (words * mix_bits(torch.arange(1, len(words) + 1, device=words.device))).sum()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        layout: SequenceLayout,
        dim: int,
        group: ProcessGroup,
        statistics: CommunicationStatistics,
        has_shards_behind: Callable[[], bool],
    ) -> Tensor:
        ctx.layout, ctx.dim, ctx.group = layout, dim, group
        ctx.statistics, ctx.has_shards_behind = statistics, has_shards_behind
        length, longest = local.shape[dim], max(map(layout.local_length, range(group.size())))
        # all_gather takes tensors of one shape.
        moved = local.transpose(0, dim)
        padded = torch.cat([moved, moved.new_zeros(longest - length, *moved.shape[1:])]).contiguous()
        parts = [torch.empty_like(padded) for _ in range(group.size())]
        with statistics.waiting(padded.nbytes * (group.size() - 1)):
            distributed.all_gather(parts, padded, group=group)
        kept = [each[: layout.local_length(rank)] for rank, each in enumerate(parts)]
        return layout.unshard(kept, dim=0).transpose(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rank, size = ctx.group.rank(), ctx.group.size()
        if not ctx.has_shards_behind():
            return ctx.layout.shard(gradient, rank, ctx.dim) * size, None, None, None, None, None
        total = gradient.contiguous().clone()
        # A ring sends all but one part of the tensor twice.
        with ctx.statistics.waiting(2 * total.nbytes * (size - 1) // size):
            distributed.all_reduce(total, group=ctx.group)
        return ctx.layout.shard(total, rank, ctx.dim), None, None, None, None, None


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
