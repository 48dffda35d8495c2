"""Counters of what attention over a cut sequence sends, and of the time that it computes and waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


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
