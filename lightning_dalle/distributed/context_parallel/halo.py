"""Halo exchange: each process fetches the keys and values that its queries need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dalle.distributed.context_parallel.comm import Transfer, start_transfer
from lightning_dalle.distributed.context_parallel.online_softmax import (
    AttentionResult,
    OnlineSoftmax,
    PositionalDropout,
    accumulator_dtype,
)
from lightning_dalle.distributed.context_parallel.ring import Ring
from lightning_dalle.distributed.context_parallel.schedule import WindowPlan, placed_runs


@dataclass(frozen=True)
class _Segment:
    """Positions that lie side by side both with their holder and in a border."""

    held_at: int
    needed_at: int
    length: int


class KeyExchange:
    """Trades pairs of keys and values, [2, batch, key_heads, positions, head_dim], between the processes of a ring.

    Args:
        runs: Positions that each process holds, in the order in which its tensors hold them.
        borders: Positions that each process needs, in the order of its border; they may be its own.
    """

    def __init__(self, ring: Ring, runs: Sequence[Sequence[range]], borders: Sequence[Sequence[range]]) -> None:
        self.ring = ring
        self._length = sum(map(len, borders[ring.rank]))
        self._own = _segments(runs[ring.rank], borders[ring.rank])
        others = [rank for rank in range(ring.size) if rank != ring.rank]
        lent = {rank: _segments(runs[ring.rank], borders[rank]) for rank in others}
        borrowed = {rank: _segments(runs[rank], borders[ring.rank]) for rank in others}
        self._lent = {rank: segments for rank, segments in lent.items() if segments}
        self._borrowed = {rank: segments for rank, segments in borrowed.items() if segments}

    def fetch(self, pair: Tensor) -> "Fetched":
        """Starts to bring this process's border."""
        sent = {
            rank: torch.cat([_part(pair, segment.held_at, segment) for segment in segments], dim=-2)
            for rank, segments in self._lent.items()
        }
        return Fetched(self, pair, self._start(sent, self._borrowed, pair))

    def bring_home(self, grad_border: Tensor, grad_pair: Tensor) -> "BroughtHome":
        """Starts to bring the gradients of borders home; those of this process's own keys are added at once."""
        for segment in self._own:
            _part(grad_pair, segment.held_at, segment).add_(_part(grad_border, segment.needed_at, segment))
        sent = {
            rank: torch.cat([_part(grad_border, segment.needed_at, segment) for segment in segments], dim=-2)
            for rank, segments in self._borrowed.items()
        }
        return BroughtHome(self._lent, self._start(sent, self._lent, grad_pair))

    def border(self, pair: Tensor, received: Mapping[int, Tensor]) -> Tensor:
        """The border of own keys and those of others."""
        border = pair.new_empty(*pair.shape[:-2], self._length, pair.shape[-1])
        for segment in self._own:
            _part(border, segment.needed_at, segment).copy_(_part(pair, segment.held_at, segment))
        for rank, segments in self._borrowed.items():
            for segment, part in zip(segments, _split(received[rank], segments), strict=True):
                _part(border, segment.needed_at, segment).copy_(part)
        return border

    def _start(self, sent: Mapping[int, Tensor], expected: Mapping[int, Sequence[_Segment]], like: Tensor) -> Transfer:
        received = {
            rank: like.new_empty(*like.shape[:-2], sum(segment.length for segment in segments), like.shape[-1])
            for rank, segments in expected.items()
        }
        return start_transfer(self.ring.group, sent, received, self.ring.statistics)


@dataclass(frozen=True)
class Fetched:
    """A border on its way."""

    exchange: KeyExchange
    pair: Tensor
    transfer: Transfer

    def wait(self) -> Tensor:
        """The border, once all of it has arrived."""
        return self.exchange.border(self.pair, self.transfer.wait())


@dataclass(frozen=True)
class BroughtHome:
    """Gradients on their way to the processes that hold the keys."""

    lent: Mapping[int, Sequence[_Segment]]
    transfer: Transfer

    def add_to(self, grad_pair: Tensor) -> None:
        """Adds those of this process's keys, once all have arrived."""
        received = self.transfer.wait()
        for rank, segments in self.lent.items():
            for segment, part in zip(segments, _split(received[rank], segments), strict=True):
                _part(grad_pair, segment.held_at, segment).add_(part)


def _segments(runs: Sequence[range], border: Sequence[range]) -> list[_Segment]:
    segments = []
    for needed in placed_runs(border):
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
        exchange: KeyExchange,
        plan: WindowPlan,
        dropout: PositionalDropout | None,
    ) -> Tensor:
        """Joins the tiles by their log-sum-exps."""
        query, statistics = query.contiguous(), exchange.ring.statistics
        pair = torch.stack([key, value])
        softmax = OnlineSoftmax.empty(query)
        fetched = exchange.fetch(pair)
        with statistics.attending():
            for tiles in (*plan.inner[0], *plan.inner[1]):
                softmax.add(tiles, query, pair, dropout)
        border = fetched.wait()
        with statistics.attending():
            for tiles in plan.outer:
                softmax.add(tiles, query, border, dropout)
        output, log_sum_exp = softmax.finished(query.dtype)
        ctx.exchange, ctx.plan, ctx.dropout = exchange, plan, dropout
        ctx.save_for_backward(query, pair, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Computes each tile's share with the log-sum-exp of the whole."""
        query, pair, output, log_sum_exp = ctx.saved_tensors
        exchange, plan, statistics = ctx.exchange, ctx.plan, ctx.exchange.ring.statistics
        fetched = exchange.fetch(pair)
        result = AttentionResult(query, output, log_sum_exp, grad_output.contiguous(), ctx.dropout)
        with statistics.attending():
            grad_query, grad_pair = (torch.zeros_like(each, dtype=accumulator_dtype(each)) for each in (query, pair))
            result.add_gradients(plan.inner[0], pair, grad_query, grad_pair)
        border = fetched.wait()
        with statistics.attending():
            grad_border = torch.zeros_like(border, dtype=grad_pair.dtype)
            result.add_gradients(plan.outer, border, grad_query, grad_border)
        brought_home = exchange.bring_home(grad_border, grad_pair)
        with statistics.attending():
            result.add_gradients(plan.inner[1], pair, grad_query, grad_pair)
        brought_home.add_to(grad_pair)
        grad_key, grad_value = grad_pair.to(pair.dtype).unbind(0)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None
