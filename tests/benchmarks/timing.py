"""Times of works that are run in turn in one process, so that only their ratios have to be trusted."""

import statistics
import time
from collections.abc import Callable, Mapping

clock = time.perf_counter


def seconds_of(work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def interleaved_medians(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each work; every round runs each once, after one round that is not counted."""
    seconds = [{name: seconds_of(work) for name, work in works.items()} for _ in range(rounds + 1)]
    return {name: statistics.median(each[name] for each in seconds[1:]) for name in works}
