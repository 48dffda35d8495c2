"""Values that follow a curve over optimizer updates and then stay."""

import math


def linear_schedule(update: int, *, start: float, end: float, updates: int) -> float:
    """Go from ``start`` at update 0 to ``end`` at update ``updates`` in a straight line, then stay there.

    ``updates=0`` is ``end`` from the beginning.
    """
    return start + (end - start) * _progress(update, updates)


def cosine_schedule(update: int, *, start: float, end: float, updates: int) -> float:
    """Go from ``start`` at update 0 to ``end`` at update ``updates`` along half a cosine period, then stay there.

    The paper says "cosine" only; flat at both ends (half a period) is our reading of it.
    ``updates=0`` is ``end`` from the beginning.
    """
    return start + (end - start) * (1 - math.cos(math.pi * _progress(update, updates))) / 2


def _progress(update: int, updates: int) -> float:
    return 1.0 if update >= updates else update / updates
