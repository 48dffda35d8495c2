import os
import time

import pytest
import torch
from torch import distributed

from tests.ranks import run_ranks


def _sum_of_ranks(rank: int, offset: float) -> tuple[int, float]:
    value = torch.tensor(float(rank) + offset)
    distributed.all_reduce(value)
    return os.getpid(), value.item()


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one cannot")
    distributed.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    distributed.barrier()


def _wait_for_ever(rank: int) -> None:
    time.sleep(1000 * rank)


def test_each_rank_is_a_process_and_a_collective_reaches_all_of_them() -> None:
    results = run_ranks(_sum_of_ranks, 3, 0.5)
    assert [total for _, total in results] == [0.5 + 1.5 + 2.5] * 3
    assert len({process for process, _ in results} | {os.getpid()}) == 4


def test_traceback_of_the_failing_rank_is_raised_while_others_wait_for_it() -> None:
    with pytest.raises(RuntimeError, match="(?s)rank 1 failed:.*_fail_on_one.*rank one cannot"):
        run_ranks(_fail_on_one, 2)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1 died without an answer"):
        run_ranks(_die_on_one, 2)


def test_a_rank_that_hangs_is_named_after_the_timeout() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[1\] gave no answer within 4 s"):
        run_ranks(_wait_for_ever, 2, timeout=4)
