"""Halo exchange: each process fetches the keys and values that its queries need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dalle.distributed.context_parallel.comm import Transfer, start_transfer
from lightning_dalle.distributed.context_parallel.ring import Ring
from lightning_dalle.ops.attention.online_softmax import (
    OnlineSoftmax,
    OnlineSoftmaxBackward,
    PositionalDropout,
    accumulator_dtype,
)
from lightning_dalle.ops.attention.schedule import WindowSchedule, placed_runs


@dataclass(frozen=True)
class _Segment:
    """Positions that lie side by side both with their holder and in a halo."""

    held_at: int
    needed_at: int
    length: int


class HaloExchange:
    """Halo exchange of keys and values, [2, batch, key_heads, positions, head_dim], between the processes of a ring.

    Args:
        runs: Positions that each process holds, in the order in which its tensors hold them.
        halos: Positions that each process needs, in the order of its halo; they may be its own.
    """

    def __init__(self, ring: Ring, runs: Sequence[Sequence[range]], halos: Sequence[Sequence[range]]) -> None:
        self.ring = ring
        self._length = sum(map(len, halos[ring.rank]))
        self._own = _segments(runs[ring.rank], halos[ring.rank])
        others = [rank for rank in range(ring.size) if rank != ring.rank]
        lent = {rank: _segments(runs[ring.rank], halos[rank]) for rank in others}
        borrowed = {rank: _segments(runs[rank], halos[ring.rank]) for rank in others}
        self._lent = {rank: segments for rank, segments in lent.items() if segments}
        self._borrowed = {rank: segments for rank, segments in borrowed.items() if segments}

    def start(self, pair: Tensor) -> "IncomingHalo":
        """Start to bring this process's halo."""
        sent = {
            rank: torch.cat([_part(pair, segment.held_at, segment) for segment in segments], dim=-2)
            for rank, segments in self._lent.items()
        }
        return IncomingHalo(self, pair, self._start(sent, self._borrowed, pair))

    def return_gradients(self, grad_halo: Tensor, grad_pair: Tensor) -> "ReturningGradients":
        """Start to send gradients of halos to their keys' holders; those of own keys are added at once."""
        for segment in self._own:
            _part(grad_pair, segment.held_at, segment).add_(_part(grad_halo, segment.needed_at, segment))
        sent = {
            rank: torch.cat([_part(grad_halo, segment.needed_at, segment) for segment in segments], dim=-2)
            for rank, segments in self._borrowed.items()
        }
        return ReturningGradients(self._lent, self._start(sent, self._lent, grad_pair))

    def halo(self, pair: Tensor, received: Mapping[int, Tensor]) -> Tensor:
        """Return the halo of own keys and those of others."""
        halo = pair.new_empty(*pair.shape[:-2], self._length, pair.shape[-1])
        for segment in self._own:
            _part(halo, segment.needed_at, segment).copy_(_part(pair, segment.held_at, segment))
        for rank, segments in self._borrowed.items():
            for segment, part in zip(segments, _split(received[rank], segments), strict=True):
                _part(halo, segment.needed_at, segment).copy_(part)
        return halo

    def _start(self, sent: Mapping[int, Tensor], expected: Mapping[int, Sequence[_Segment]], like: Tensor) -> Transfer:
        received = {
            rank: like.new_empty(*like.shape[:-2], sum(segment.length for segment in segments), like.shape[-1])
            for rank, segments in expected.items()
        }
        return start_transfer(self.ring.group, sent, received, self.ring.statistics)


@dataclass(frozen=True)
class IncomingHalo:
    """A halo that is being received."""

    exchange: HaloExchange
    pair: Tensor
    transfer: Transfer

    def wait(self) -> Tensor:
        """Return the halo, once all of it has arrived."""
        return self.exchange.halo(self.pair, self.transfer.wait())


@dataclass(frozen=True)
class ReturningGradients:
    """Gradients that are being sent to the processes that hold the keys."""

    lent: Mapping[int, Sequence[_Segment]]
    transfer: Transfer

    def add_to(self, grad_pair: Tensor) -> None:
        """Add those of this process's keys, once all have arrived."""
        received = self.transfer.wait()
        for rank, segments in self.lent.items():
            for segment, part in zip(segments, _split(received[rank], segments), strict=True):
                _part(grad_pair, segment.held_at, segment).add_(part)


def _segments(runs: Sequence[range], halo: Sequence[range]) -> list[_Segment]:
    segments = []
    for needed in placed_runs(halo):
        for held in placed_runs(runs):
            start = max(needed.positions.start, held.positions.start)
            length = min(needed.positions.stop, held.positions.stop) - start
            if length > 0:
                segments.append(_Segment(start - held.shift, start - needed.shift, length))
    return segments


def _part(pair: Tensor, start: int, segment: _Segment) -> Tensor:
    return pair.narrow(-2, start, segment.length)


def _split(pair: Tensor, segments: Sequence[_Segment]) -> Sequence[Tensor]:
    return pair.split([segment.length for segment in segments], dim=-2)


class WindowAttention(torch.autograd.Function):
    """Attention of [batch, heads, local, head_dim] to the keys that a plan says.

    Keeps what a fused kernel keeps of the local part: query, key, value, output and log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: HaloExchange,
        schedule: WindowSchedule,
        dropout: PositionalDropout | None,
    ) -> Tensor:
        """Merge tiles by their log-sum-exps."""
        query, statistics = query.contiguous(), exchange.ring.statistics
        pair = torch.stack([key, value])
        softmax = OnlineSoftmax(query, accumulator_dtype(query), dropout)
        incoming = exchange.start(pair)
        with statistics.attending():
            for tiles in schedule.inner:
                softmax.add(tiles, *pair)
        halo = incoming.wait()
        with statistics.attending():
            for tiles in schedule.outer:
                softmax.add(tiles, *halo)
        output, log_sum_exp = softmax.finished(query.dtype)
        ctx.exchange, ctx.schedule, ctx.dropout = exchange, schedule, dropout
        ctx.save_for_backward(query, pair, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each tile's share with the log-sum-exp of the whole."""
        query, pair, output, log_sum_exp = ctx.saved_tensors
        exchange, statistics = ctx.exchange, ctx.exchange.ring.statistics
        first_half, second_half = ctx.schedule.inner_halves()
        incoming = exchange.start(pair)
        softmax = OnlineSoftmaxBackward(query, output, log_sum_exp, grad_output.contiguous(), ctx.dropout)
        with statistics.attending():
            grad_query, grad_pair = (torch.zeros_like(each, dtype=accumulator_dtype(each)) for each in (query, pair))
            for tiles in first_half:
                softmax.add(tiles, *pair, gradients=(grad_query, *grad_pair))
        halo = incoming.wait()
        with statistics.attending():
            grad_halo = torch.zeros_like(halo, dtype=grad_pair.dtype)
            for tiles in ctx.schedule.outer:
                softmax.add(tiles, *halo, gradients=(grad_query, *grad_halo))
        returning = exchange.return_gradients(grad_halo, grad_pair)
        with statistics.attending():
            for tiles in second_half:
                softmax.add(tiles, *pair, gradients=(grad_query, *grad_pair))
        returning.add_to(grad_pair)
        grad_key, grad_value = grad_pair.to(pair.dtype).unbind(0)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None
