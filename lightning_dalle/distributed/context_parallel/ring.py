"""Ring attention: keys and values rotate from process to process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics, Transfer, start_transfer
from lightning_dalle.ops.attention.online_softmax import (
    OnlineSoftmax,
    OnlineSoftmaxBackward,
    PositionalDropout,
    accumulator_dtype,
)
from lightning_dalle.ops.attention.schedule import Tiles


class Ring:
    """The processes of a group in a circle; without a group, this process alone.

    Args:
        statistics: Counters to add to.
    """

    def __init__(self, group: ProcessGroup | None, statistics: CommunicationStatistics) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.statistics = statistics

    def source(self, step: int) -> int:
        """Return the rank whose block this process holds after `step` rotations."""
        return (self.rank - step) % self.size

    def rotate(self, tensor: Tensor, shape: Sequence[int]) -> "IncomingBlock":
        """Start to send a tensor to the next process, and to receive one of that shape from the previous one.

        All processes must call this in the same order. `tensor` must not change before the rotation was awaited.
        """
        received = torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
        neighbours = (self.rank + 1) % self.size, self.source(1)
        return IncomingBlock(
            start_transfer(self.group, {neighbours[0]: tensor}, {neighbours[1]: received}, self.statistics)
        )


@dataclass(frozen=True)
class IncomingBlock:
    """A block on its way, with the one that comes for it."""

    transfer: Transfer

    def wait(self) -> Tensor:
        """Return the block that came, once both have arrived."""
        (received,) = self.transfer.wait().values()
        return received


@dataclass(frozen=True)
class RingSchedule:
    """Tiles of a process with the keys of each process of its ring.

    Attributes:
        lengths: Positions that each process holds.
    """

    tiles: Sequence[Sequence[Tiles]]
    lengths: Sequence[int]


class RingAttention(torch.autograd.Function):
    """Attention of [batch, heads, local, head_dim] to the keys of all processes of a ring.

    Keeps what a fused kernel keeps of the local part: query, key, value, output and log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ring: Ring,
        schedule: RingSchedule,
        dropout: PositionalDropout | None,
    ) -> Tensor:
        """Merge blocks by their log-sum-exps, in the order in which they come."""
        query = query.contiguous()
        softmax = OnlineSoftmax(query, accumulator_dtype(query), dropout)
        # Kept in this form, which the backward pass sends round again.
        own = pair = torch.stack([key, value])
        for step in range(ring.size):
            on_its_way = None if step + 1 == ring.size else ring.rotate(pair, _shape(pair, ring, schedule, step + 1))
            with ring.statistics.attending():
                for tiles in schedule.tiles[ring.source(step)]:
                    softmax.add(tiles, *pair)
            if on_its_way is not None:
                pair = on_its_way.wait()
        output, log_sum_exp = softmax.finished(query.dtype)
        ctx.ring, ctx.schedule, ctx.dropout = ring, schedule, dropout
        ctx.save_for_backward(query, own, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each block's share with the log-sum-exp of the whole."""
        query, pair, output, log_sum_exp = ctx.saved_tensors
        softmax = OnlineSoftmaxBackward(query, output, log_sum_exp, grad_output.contiguous(), ctx.dropout)
        grad_query = torch.zeros_like(query, dtype=accumulator_dtype(query))
        own = _rotate_backward(ctx, softmax, pair, grad_query)
        grad_key, grad_value = own.to(pair.dtype).unbind(0)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None


def _rotate_backward(ctx: Any, softmax: OnlineSoftmaxBackward, pair: Tensor, grad_query: Tensor) -> Tensor:
    """Return the gradient of this process's keys and values, to which every process has added its share."""
    ring, schedule = ctx.ring, ctx.schedule
    pair_on_its_way = ring.rotate(pair, _shape(pair, ring, schedule, 1)) if ring.size > 1 else None
    with ring.statistics.attending():
        own = torch.zeros_like(pair, dtype=accumulator_dtype(pair))
        for tiles in schedule.tiles[ring.rank]:
            softmax.add(tiles, *pair, gradients=(grad_query, *own))
    gradient_on_its_way = None
    for step in range(1, ring.size):
        assert pair_on_its_way is not None
        pair = pair_on_its_way.wait()
        if step + 1 < ring.size:
            pair_on_its_way = ring.rotate(pair, _shape(pair, ring, schedule, step + 1))
        with ring.statistics.attending():
            share = torch.zeros_like(pair, dtype=accumulator_dtype(pair))
            for tiles in schedule.tiles[ring.source(step)]:
                softmax.add(tiles, *pair, gradients=(grad_query, *share))
        if gradient_on_its_way is not None:
            share += gradient_on_its_way.wait()
        gradient_on_its_way = ring.rotate(share, _shape(pair, ring, schedule, step + 1))
    return own if gradient_on_its_way is None else own + gradient_on_its_way.wait()


def _shape(pair: Tensor, ring: Ring, schedule: RingSchedule, step: int) -> tuple[int, ...]:
    """Return the shape of the keys and values that this process holds after `step` rotations."""
    return (*pair.shape[:-2], schedule.lengths[ring.source(step)], pair.shape[-1])
