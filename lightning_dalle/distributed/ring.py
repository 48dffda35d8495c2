"""A ring of processes, each of which hands blocks to the next while it computes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_traffic import ContextTraffic
from lightning_dalle.distributed.transfer import Transfer, start_transfer


class Ring:
    """The processes of a group in a circle; without a group, this process alone.

    Args:
        traffic: Counters to add to.
    """

    def __init__(self, group: ProcessGroup | None, traffic: ContextTraffic) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.traffic = traffic

    def source(self, step: int) -> int:
        """The rank whose block this process holds after `step` hand-overs."""
        return (self.rank - step) % self.size

    def hand_on(self, tensor: Tensor, shape: Sequence[int]) -> "HandOver":
        """Starts to send a tensor to the next process, and to receive one of that shape from the previous one.

        All processes must call this in the same order. `tensor` must not change before the hand-over was awaited.
        """
        received = torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
        neighbours = (self.rank + 1) % self.size, self.source(1)
        return HandOver(start_transfer(self.group, {neighbours[0]: tensor}, {neighbours[1]: received}, self.traffic))


@dataclass(frozen=True)
class HandOver:
    """A block on its way, with the one that comes for it."""

    transfer: Transfer

    def wait(self) -> Tensor:
        """The block that came, once both have arrived."""
        (received,) = self.transfer.wait().values()
        return received
