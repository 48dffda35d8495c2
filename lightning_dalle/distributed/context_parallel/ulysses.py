"""Ulysses all-to-all between sharded heads and sharded positions."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics


class UlyssesAllToAll:
    """All-to-all from a shard of positions with all heads to all positions with a shard of the heads, and back.

    Args:
        lengths: Positions that each process of the group holds.
        statistics: Counters to add to.
    """

    def __init__(self, group: ProcessGroup, lengths: Sequence[int], statistics: CommunicationStatistics) -> None:
        self._group = group
        self._lengths = list(lengths)
        self.rank, self.size = group.rank(), group.size()
        self._statistics = statistics

    def check_heads(self, query: Tensor, key: Tensor) -> None:
        """Refuse heads that cannot be divided.

        Raises:
            ValueError: If the query's or the key's number of heads is no multiple of the group's size.
        """
        for name, tensor in (("query", query), ("key", key)):
            if tensor.shape[1] % self.size != 0:
                raise ValueError(
                    f"{name} has {tensor.shape[1]} heads, which must be divisible by the {self.size} ranks of the "
                    "Ulysses group; use a smaller group, or a ring, which divides positions alone"
                )

    def shard_heads(self, tensor: Tensor) -> Tensor:
        """[batch, heads, local, head_dim] to [batch, heads / size, positions of the group, head_dim]."""
        exchanged: Tensor = _ShardHeads.apply(tensor, self)
        return exchanged

    def shard_positions(self, tensor: Tensor) -> Tensor:
        """Return heads gathered and positions sharded again."""
        exchanged: Tensor = _ShardPositions.apply(tensor, self)
        return exchanged

    def positions_to_heads(self, tensor: Tensor) -> Tensor:
        """`shard_heads`, without gradients."""
        batch, heads, _, head_dim = tensor.shape
        parts = tensor.reshape(batch, self.size, heads // self.size, -1, head_dim).transpose(0, 1)
        received = [tensor.new_empty(batch, heads // self.size, length, head_dim) for length in self._lengths]
        return torch.cat(self._exchange(list(parts), received), dim=-2)

    def heads_to_positions(self, tensor: Tensor) -> Tensor:
        """`shard_positions`, without gradients."""
        own = (*tensor.shape[:-2], self._lengths[self.rank], tensor.shape[-1])
        received = [tensor.new_empty(own) for _ in self._lengths]
        return torch.cat(self._exchange(list(tensor.split(self._lengths, dim=-2)), received), dim=1)

    def _exchange(self, parts: list[Tensor], received: list[Tensor]) -> list[Tensor]:
        """Send part i to process i; `received` says which shapes come."""
        sent = torch.cat([part.reshape(-1) for part in parts])
        sizes = [part.numel() for part in parts], [part.numel() for part in received]
        flat = sent.new_empty(sum(sizes[1]))
        start = time.perf_counter()
        distributed.all_to_all_single(flat, sent, sizes[1], sizes[0], group=self._group)
        seconds = time.perf_counter() - start
        self._statistics.waiting_seconds += seconds
        self._statistics.communication_seconds += seconds
        self._statistics.bytes_sent += (sum(sizes[0]) - sizes[0][self.rank]) * sent.element_size()
        return [part.view(like.shape) for part, like in zip(flat.split(sizes[1]), received, strict=True)]


class _ShardHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: UlyssesAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.positions_to_heads(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.heads_to_positions(gradient), None


class _ShardPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: UlyssesAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.heads_to_positions(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.positions_to_heads(gradient), None
