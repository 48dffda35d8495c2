"""Values that follow a curve over optimizer steps and then stay."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """From `start` to `end` along half a cosine period, flat at both ends, and `end` from then on.

    The DALL-E paper says "cosine" only; the half period is our reading of it.

    Attributes:
        start: Value at update 0.
        end: Value at update `steps` and after it.
        steps: Optimizer steps of the way; with 0 the value is `end` from the beginning.

    Raises:
        ValueError: If `steps` is negative.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        """Refuse a negative length."""
        if self.steps < 0:
            raise ValueError(f"steps ({self.steps}) must be at least 0; 0 takes the end value ({self.end}) at once")

    def __call__(self, update: int) -> float:
        """Return the value at an update."""
        if update >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * (1 - math.cos(math.pi * update / self.steps)) / 2
