"""A ring of processes, each of which hands blocks to the next while it computes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work

from lightning_dalle.distributed.context_traffic import ContextTraffic


class Ring:
    """The processes of a group in a circle; without a group, this process alone.

    Args:
        traffic: Counters to add to.
    """

    def __init__(self, group: ProcessGroup | None, traffic: ContextTraffic) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.traffic = traffic

    def source(self, step: int) -> int:
        """The rank whose block this process holds after `step` hand-overs."""
        return (self.rank - step) % self.size

    def hand_on(self, tensor: Tensor, shape: Sequence[int]) -> "Transfer":
        """Starts to send a tensor to the next process, and to receive one of that shape from the previous one.

        All processes must call this in the same order. `tensor` must not change before the transfer was awaited.
        """
        start = time.perf_counter()
        received = torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
        works = distributed.batch_isend_irecv(
            [
                P2POp(distributed.isend, tensor, group=self._group, group_peer=(self.rank + 1) % self.size),
                P2POp(distributed.irecv, received, group=self._group, group_peer=(self.rank - 1) % self.size),
            ]
        )
        self.traffic.sent_bytes += tensor.numel() * tensor.element_size()
        return Transfer(self.traffic, tensor, received, works, start)


@dataclass(frozen=True)
class Transfer:
    """A block on its way, with the one that comes for it."""

    traffic: ContextTraffic
    sent: Tensor
    received: Tensor
    works: Sequence[Work]
    started_at: float

    def wait(self) -> Tensor:
        """The block that came, once both have arrived."""
        start = time.perf_counter()
        for work in self.works:
            work.wait()
        end = time.perf_counter()
        self.traffic.waiting_seconds += end - start
        self.traffic.travelling_seconds += end - self.started_at
        return self.received
