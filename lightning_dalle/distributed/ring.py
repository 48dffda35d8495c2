"""A ring of processes, each of which hands blocks to the next while it computes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work


class Ring:
    """The processes of a group in a circle; without a group, this process alone.

    Attributes:
        sent_bytes: Of payload, by this process since the start.
        waiting_seconds: That this process spent on waiting for blocks; a CUDA stream waits by itself and counts as 0.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.sent_bytes = 0
        self.waiting_seconds = 0.0

    def source(self, step: int) -> int:
        """The rank whose block this process holds after `step` hand-overs."""
        return (self.rank - step) % self.size

    def hand_on(self, tensor: Tensor, shape: Sequence[int]) -> "Transfer":
        """Starts to send a tensor to the next process, and to receive one of that shape from the previous one.

        All processes must call this in the same order. `tensor` must not change before the transfer was awaited.
        """
        received = torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
        works = distributed.batch_isend_irecv(
            [
                P2POp(distributed.isend, tensor, group=self._group, group_peer=(self.rank + 1) % self.size),
                P2POp(distributed.irecv, received, group=self._group, group_peer=(self.rank - 1) % self.size),
            ]
        )
        self.sent_bytes += tensor.numel() * tensor.element_size()
        return Transfer(self, tensor, received, works)


@dataclass(frozen=True)
class Transfer:
    """A block on its way, with the one that comes for it."""

    ring: Ring
    sent: Tensor
    received: Tensor
    works: Sequence[Work]

    def wait(self) -> Tensor:
        """The block that came, once both have arrived."""
        start = time.perf_counter()
        for work in self.works:
            work.wait()
        self.ring.waiting_seconds += time.perf_counter() - start
        return self.received
