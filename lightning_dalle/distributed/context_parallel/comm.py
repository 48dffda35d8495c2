"""Process groups of context parallelism, transfers between neighbours, and what they cost."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work
from torch.distributed.device_mesh import init_device_mesh


@dataclass
class CommunicationStatistics:
    """Bytes and seconds of this process since the start; a CUDA stream's own seconds count as 0.

    Attributes:
        bytes_sent: Payload.
        attention_seconds: Time spent in blocks of attention.
        waiting_seconds: Time spent waiting for messages that had not arrived when they were needed.
        communication_seconds: From the start of each message to its arrival, or to when it was awaited if later.
        step_seconds: Time spent in forward and backward passes.
    """

    bytes_sent: int = 0
    attention_seconds: float = 0.0
    waiting_seconds: float = 0.0
    communication_seconds: float = 0.0
    step_seconds: float = 0.0

    @property
    def overlap_ratio(self) -> float:
        """Share of the communication seconds during which this process computed; 1 if there were none."""
        return 1 - self.waiting_seconds / self.communication_seconds if self.communication_seconds else 1.0

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Count the time within as attention."""
        start = time.perf_counter()
        yield
        self.attention_seconds += time.perf_counter() - start

    @contextmanager
    def waiting(self, bytes_sent: int) -> Iterator[None]:
        """Count the time within as communication that nothing overlaps."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.waiting_seconds += seconds
        self.communication_seconds += seconds
        self.bytes_sent += bytes_sent

    def __sub__(self, other: "CommunicationStatistics") -> "CommunicationStatistics":
        """Return what came after `other`, an earlier copy of the same counters."""
        return CommunicationStatistics(
            self.bytes_sent - other.bytes_sent,
            self.attention_seconds - other.attention_seconds,
            self.waiting_seconds - other.waiting_seconds,
            self.communication_seconds - other.communication_seconds,
            self.step_seconds - other.step_seconds,
        )


@dataclass(frozen=True)
class Transfer:
    """Sends and receives in flight, by the rank in the group that they go to and come from."""

    statistics: CommunicationStatistics
    sent: Mapping[int, Tensor]
    received: Mapping[int, Tensor]
    works: Sequence[Work]
    started_at: float

    def wait(self) -> Mapping[int, Tensor]:
        """Return what was received, once all of it has arrived."""
        if not self.works:
            return self.received
        start = time.perf_counter()
        for work in self.works:
            work.wait()
        end = time.perf_counter()
        self.statistics.waiting_seconds += end - start
        self.statistics.communication_seconds += end - self.started_at
        return self.received


def start_transfer(
    group: ProcessGroup | None,
    sent: Mapping[int, Tensor],
    received: Mapping[int, Tensor],
    statistics: CommunicationStatistics,
) -> Transfer:
    """Start to send, and to receive into `received`; what others send must have these shapes.

    All processes of the group must start their transfers in the same order. `sent` must not change before the transfer
    was awaited.
    """
    start = time.perf_counter()
    operations = [P2POp(distributed.isend, tensor, group=group, group_peer=peer) for peer, tensor in sent.items()]
    operations += [P2POp(distributed.irecv, tensor, group=group, group_peer=peer) for peer, tensor in received.items()]
    works = distributed.batch_isend_irecv(operations) if operations else []
    statistics.bytes_sent += sum(tensor.nbytes for tensor in sent.values())
    return Transfer(statistics, sent, received, works, start)


@dataclass(frozen=True)
class ContextGroups:
    """Process groups of one sequence; None stands for a process alone.

    Attributes:
        context: All processes that share the sequence; its rank `r * ulysses.size() + u` is rank r of a ring and u of a
            Ulysses group.
        ring: Processes among which keys and values rotate.
        ulysses: Processes that exchange positions for heads.
    """

    context: ProcessGroup | None = None
    ring: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of processes that share the sequence."""
        return 1 if self.context is None else self.context.size()

    @property
    def rank(self) -> int:
        """Rank of this process among them."""
        return 0 if self.context is None else self.context.rank()

    @property
    def device(self) -> torch.device:
        """Device on which the processes can reduce."""
        if self.context is not None and distributed.get_backend(self.context) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def ulysses_degree(self) -> int:
        """Number of processes among which heads are divided."""
        return 1 if self.ulysses is None else self.ulysses.size()


def init_context_groups(
    world_size: int, context_parallel_degree: int, ulysses_degree: int, device_type: str
) -> ContextGroups:
    """Make groups of neighbouring ranks that share sequences; all processes must call it.

    Args:
        context_parallel_degree: Must divide `world_size`.
        ulysses_degree: Neighbours that exchange positions for heads; must divide `context_parallel_degree`. Rings take
            the rest.
    """
    if context_parallel_degree == 1:
        return ContextGroups()
    shape = (world_size // context_parallel_degree, context_parallel_degree // ulysses_degree, ulysses_degree)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "ring", "ulysses"))
    groups = init_device_mesh(device_type, (shape[0], context_parallel_degree), mesh_dim_names=("data", "context"))
    return ContextGroups(
        groups.get_group("context"),
        mesh.get_group("ring") if shape[1] > 1 else None,
        mesh.get_group("ulysses") if ulysses_degree > 1 else None,
    )
