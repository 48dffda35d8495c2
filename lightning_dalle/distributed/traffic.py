"""Counters of what a process sent, and of what it would have sent without compression."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes of payload that this process sent since the start.

    Attributes:
        sent: By a ring all-reduce, 2 (n - 1) / n of a message for n processes.
        uncompressed: What the same reductions of whole gradients would have sent, in 32 bits.
    """

    sent: int = 0
    uncompressed: int = 0

    @property
    def saved(self) -> int:
        """Bytes that did not travel."""
        return self.uncompressed - self.sent

    @property
    def rate(self) -> float:
        """Share that did not travel."""
        return self.saved / self.uncompressed if self.uncompressed else 0.0
