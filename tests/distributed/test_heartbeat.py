import os
from typing import Any

import pytest
from torch import distributed

from lightning_dalle.distributed.watchdog import Heartbeat
from tests.ranks import run_ranks


def _explain(rank: int) -> str:
    heartbeat = Heartbeat(distributed.distributed_c10d._get_default_store(), rank, 3)
    distributed.barrier()
    if rank == 1:
        heartbeat.report(ValueError("no such file"))
    distributed.barrier()
    explanation = heartbeat.explain(RuntimeError("connection closed"), patience_seconds=3)
    heartbeat.stop()
    return explanation


def _explain_without_two(rank: int) -> Any:
    heartbeat = Heartbeat(distributed.distributed_c10d._get_default_store(), rank, 3)
    distributed.barrier()
    if rank == 2:
        os._exit(1)
    explanation = heartbeat.explain(RuntimeError("connection closed"), patience_seconds=3)
    assert explanation == f"rank {rank} was left by rank(s) 2, which ended without a word"


def test_first_failure_is_told_to_all() -> None:
    assert set(run_ranks(_explain, 3)) == {"the first failure was of rank 1: ValueError: no such file"}


def test_rank_that_is_gone_is_named_by_those_that_are_left() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(_explain_without_two, 3, wait_for_all=True)
    assert [str(failure) for failure in caught.value.exceptions] == ["rank 2 died without an answer"]
