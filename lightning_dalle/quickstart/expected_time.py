"""How long a run will take, told from updates that were timed on this machine, and why where that is long."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from lightning_dalle.quickstart.machine import MachineSpeed

TYPICAL_SECONDS: dict[str, dict[str, float]] = {
    "openmoji": {
        "tokenizer": 1,
        "discrete_vae": 117,
        "contrastive": 131,
        "text_to_image": 1395,
        "pictures": 60,
        "report": 2,
    },
    "shapes": {
        "tokenizer": 3,
        "discrete_vae": 36,
        "contrastive": 114,
        "text_to_image": 535,
        "pictures": 30,
        "report": 1,
    },
    "animated-emoji": {"tokenizer": 31, "video_dit": 605, "pictures": 60, "report": 1},
    "moving-shapes": {"tokenizer": 2, "video_dit": 1433, "pictures": 60, "report": 1},
}
"""Of training timed on a machine like `REFERENCE`; of drawing estimated, for shapes timed. A stage
of training is compared with them and never told from them."""

REFERENCE = MachineSpeed(cores=2, core_share=1.0, core_gflops=50.0, fast_bfloat16=False, load=2.0)
"""The machine of `TYPICAL_SECONDS`: two cores of an AMD EPYC with AVX2."""

SLOW = 2.0
"""Times the typical time, from which on a stage is called slow."""
UNNOTICED_SECONDS = 45.0
"""What takes less is not waited for."""
LEAST_CORE_SHARE = 0.7
LEAST_CORE_SPEED = 0.6
RECENT_UPDATES = 30
"""Of which the middle third counts: with a bare median two kinds of updates would make the time jump to and fro."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a stage of training runs on this machine, and how much there is to do.

    Args:
        start_seconds: From the start of the stage to its first update.
        update_seconds: One update with the loading of its batch, once what is computed once is there.
        validation_seconds: One validation.
        updates: Updates of the whole stage.
        validations: Validations of the whole stage, evenly spaced.
    """

    start_seconds: float
    update_seconds: float
    validation_seconds: float
    updates: int
    validations: int

    def stage_seconds(self, done: int = 0) -> float:
        """Return what a stage takes that starts with some updates done, by an attempt before."""
        return self.start_seconds + (self.updates - done) * self.update_seconds + self.seconds_of_validations(done)

    def seconds_of_validations(self, done: int, each: float | None = None) -> float:
        """Return what validations take that are still to come; the one that may follow update `done` is one of them."""
        left = self.validations - self.validations * max(0, done - 1) // self.updates
        return left * (self.validation_seconds if each is None else each)


class RemainingTime:
    """What is left of a stage while it trains, from the middle of its latest updates, which no single slow one moves.

    The latest updates are at first those of the pace found before. In the first epoch an update may also compute what
    is kept for the later ones, such as image tokens; what follows that epoch is therefore told from the pace.

    Args:
        pace: Pace of the stage, as it was found before.
        updates_per_epoch: How many updates see everything once.
        clock: Gives seconds.
    """

    def __init__(self, pace: Pace, updates_per_epoch: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pace = pace
        self._first_epoch_left = updates_per_epoch
        self._clock = clock
        self._recent = self._as_paced()
        self._validation_seconds = pace.validation_seconds
        self._mark = self._validation_start = clock()

    def end_update(self) -> None:
        """Take in how long the update that ends now took; validations do not count."""
        now = self._clock()
        self._recent.append(now - self._mark)
        self._mark = now
        self._first_epoch_left -= 1
        if self._first_epoch_left == 0:
            self._recent = self._as_paced()

    def start_validation(self) -> None:
        """Stop counting for updates."""
        self._validation_start = self._clock()

    def end_validation(self) -> None:
        """Take in how long the validation took that ends now."""
        self._validation_seconds = self._clock() - self._validation_start
        self._mark += self._validation_seconds

    def seconds(self, done: int) -> float:
        """Return what is left after `done` updates of the whole stage."""
        left = self.pace.updates - done
        as_recent = left if self._first_epoch_left <= 0 else min(left, self._first_epoch_left)
        updates = as_recent * self._recent_seconds() + (left - as_recent) * self.pace.update_seconds
        return updates + self.pace.seconds_of_validations(done, self._validation_seconds)

    def _recent_seconds(self) -> float:
        third = RECENT_UPDATES // 3
        return fmean(sorted(self._recent)[third:-third])

    def _as_paced(self) -> deque[float]:
        return deque([self.pace.update_seconds] * RECENT_UPDATES, maxlen=RECENT_UPDATES)


def seconds_without_training(data: str, stage: str, speed: MachineSpeed) -> float:
    """Return what a stage takes that trains nothing: its typical time at the speed of matrix products here."""
    return TYPICAL_SECONDS[data][stage] * REFERENCE.gflops / speed.gflops


def explain_slow_stages(
    expected: Mapping[str, float], typical: Mapping[str, float], titles: Mapping[str, str], speed: MachineSpeed
) -> str | None:
    """Return one line that names stages far slower than typical and says why; None where there are none.

    Args:
        expected: Seconds of whole stages on this machine.
    """
    slow = [
        f"{titles[stage]} ({format_minutes(seconds)}, typically {format_minutes(typical[stage])})"
        for stage, seconds in expected.items()
        if seconds > SLOW * typical[stage] and seconds >= UNNOTICED_SECONDS
    ]
    return f"Slow here: {', '.join(slow)}: {'; '.join(slow_reasons(speed))}." if slow else None


def slow_reasons(speed: MachineSpeed) -> list[str]:
    """Return what this machine lacks that the one of the typical times had."""
    reasons = []
    if speed.cores < REFERENCE.cores:
        reasons.append(f"only {speed.cores:g} {'core' if speed.cores <= 1 else 'cores'} can be used")
    if speed.core_share < LEAST_CORE_SHARE:
        reasons.append(
            f"other processes use the cores, {speed.core_share:.0%} of their time is ours (load {speed.load:.1f})"
        )
    if REFERENCE.fast_bfloat16 and not speed.fast_bfloat16:
        reasons.append("this processor does not multiply fast in bfloat16")
    if speed.core_gflops < LEAST_CORE_SPEED * REFERENCE.core_gflops:
        reasons.append(
            f"a core makes {speed.core_gflops:.0f} GFLOP/s, typically {REFERENCE.core_gflops:.0f}: "
            "it is throttled, or of an older kind"
        )
    return reasons or ["no reason was found, cores are free and as fast as usual"]


def format_minutes(seconds: float) -> str:
    """Return seconds in words that do not promise more than they know.

    Example:
        >>> format_minutes(20), format_minutes(140)
        ('under a minute', 'about 2 min')
    """
    return "under a minute" if seconds < UNNOTICED_SECONDS else f"about {max(1, round(seconds / 60))} min"
