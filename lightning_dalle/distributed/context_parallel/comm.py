"""Process groups of context parallelism, transfers between neighbours, and what they cost."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work
from torch.distributed.device_mesh import init_device_mesh


@dataclass
class ContextTraffic:
    """Sums of this process since the start; seconds are those of the host, so that a CUDA stream's own count as 0.

    Attributes:
        sent_bytes: Of payload.
        computing_seconds: In blocks of attention.
        waiting_seconds: For messages that had not arrived when they were needed.
        travelling_seconds: From the start of each message to its arrival, or to when it was asked for if that is later.
    """

    sent_bytes: int = 0
    computing_seconds: float = 0.0
    waiting_seconds: float = 0.0
    travelling_seconds: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the messages' time during which this process computed; 1 if there was none."""
        return 1 - self.waiting_seconds / self.travelling_seconds if self.travelling_seconds else 1.0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What is done within counts as computing."""
        start = time.perf_counter()
        yield
        self.computing_seconds += time.perf_counter() - start

    def __sub__(self, other: "ContextTraffic") -> "ContextTraffic":
        """What came after `other`, an earlier copy of the same counters."""
        return ContextTraffic(
            self.sent_bytes - other.sent_bytes,
            self.computing_seconds - other.computing_seconds,
            self.waiting_seconds - other.waiting_seconds,
            self.travelling_seconds - other.travelling_seconds,
        )


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


@dataclass(frozen=True)
class ContextGroups:
    """The group of all of them, and how it is laid out for attention; nothing is a process alone.

    Attributes:
        context: All processes, rank `r * heads.size() + h` of which is rank r of its ring and h of its head group.
    """

    context: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    heads: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many parts there are."""
        return 1 if self.context is None else self.context.size()

    @property
    def rank(self) -> int:
        """Which part this process holds."""
        return 0 if self.context is None else self.context.rank()

    @property
    def head_size(self) -> int:
        """Among how many processes heads are divided."""
        return 1 if self.heads is None else self.heads.size()


def init_context_groups(
    world_size: int, context_parallel_degree: int, head_size: int, device_type: str
) -> ContextGroups:
    """Neighbouring ranks of the world share sequences; all processes must call it.

    Args:
        context_parallel_degree: Must divide `world_size`.
        head_size: Neighbours that trade positions for heads; must divide `context_parallel_degree`. The rest is rings.
    """
    if context_parallel_degree == 1:
        return ContextGroups()
    shape = (world_size // context_parallel_degree, context_parallel_degree // head_size, head_size)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "ring", "heads"))
    joined = init_device_mesh(device_type, (shape[0], context_parallel_degree), mesh_dim_names=("data", "context"))
    return ContextGroups(
        joined.get_group("context"),
        mesh.get_group("ring") if shape[1] > 1 else None,
        mesh.get_group("heads") if head_size > 1 else None,
    )
