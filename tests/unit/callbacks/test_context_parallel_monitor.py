import pytest
from torch import distributed

from lightning_dalle.callbacks.context_parallel_monitor import attention_imbalance, context_parallel_metrics
from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics
from tests.ranks import run_ranks


def test_metrics_are_per_step() -> None:
    since = CommunicationStatistics(
        bytes_sent=100, attention_seconds=3.0, waiting_seconds=1.0, communication_seconds=4.0, step_seconds=10.0
    )
    assert context_parallel_metrics(since, steps=2, imbalance=0.5) == {
        "context_parallel/computing_seconds": 4.5,
        "context_parallel/waiting_seconds": 0.5,
        "context_parallel/bytes_sent": 50.0,
        "context_parallel/overlap_ratio": 0.75,
        "context_parallel/imbalance": 0.5,
    }


def _imbalance(rank: int) -> float:
    return attention_imbalance([1.0, 3.0][rank], distributed.group.WORLD, "cpu")


def test_imbalance_is_that_of_the_slowest_process_over_the_mean() -> None:
    assert run_ranks(_imbalance, 2) == [pytest.approx(0.5)] * 2
    assert attention_imbalance(2.0, None, "cpu") == 0
