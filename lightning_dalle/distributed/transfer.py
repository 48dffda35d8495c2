"""Messages between the processes of a context group, on their way while this process computes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work

from lightning_dalle.distributed.context_traffic import ContextTraffic


@dataclass(frozen=True)
class Transfer:
    """Tensors on their way, with those that come; by the rank in the group that they go to and come from."""

    traffic: ContextTraffic
    sent: Mapping[int, Tensor]
    received: Mapping[int, Tensor]
    works: Sequence[Work]
    started_at: float

    def wait(self) -> Mapping[int, Tensor]:
        """What came, once all have arrived."""
        if not self.works:
            return self.received
        start = time.perf_counter()
        for work in self.works:
            work.wait()
        end = time.perf_counter()
        self.traffic.waiting_seconds += end - start
        self.traffic.travelling_seconds += end - self.started_at
        return self.received


def start_transfer(
    group: ProcessGroup | None, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], traffic: ContextTraffic
) -> Transfer:
    """Starts to send, and to receive into `received`; what others send must have these shapes.

    All processes of the group must start their transfers in the same order. `sent` must not change before the transfer
    was awaited.
    """
    start = time.perf_counter()
    operations = [P2POp(distributed.isend, tensor, group=group, group_peer=peer) for peer, tensor in sent.items()]
    operations += [P2POp(distributed.irecv, tensor, group=group, group_peer=peer) for peer, tensor in received.items()]
    works = distributed.batch_isend_irecv(operations) if operations else []
    traffic.sent_bytes += sum(tensor.nbytes for tensor in sent.values())
    return Transfer(traffic, sent, received, works, start)
