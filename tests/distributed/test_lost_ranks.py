"""Ranks that are killed amid training under the strategy: what the others say, and what is left."""

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, distributed

from tests.distributed.toy_module import Toy, batches, powersgd_strategy, trainer_of
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks

pytestmark = LIGHTNING_WARNINGS
LOW_RANK: dict[str, Any] = {
    "matrix_approximation_rank": 2,
    "min_compression_rate": 1.0,
    "timeout": timedelta(seconds=30),
}


class _Killed(Toy):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.killed_rank = rank

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 3 and self.global_rank == self.killed_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _killed_run(rank: int, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    keep = ModelCheckpoint(folder / "kept", every_n_train_steps=2, filename="{step}")
    strategy = powersgd_strategy(shard_size=2, **LOW_RANK)
    trainer = trainer_of(4, strategy, enable_checkpointing=True, callbacks=[keep])
    _fit_and_tell(trainer, rank, 4, _Killed(3), folder)


def _fit_and_tell(trainer: Trainer, rank: int, world_size: int, module: Toy, folder: Path) -> None:
    loader = batches(6, rank, world_size, torch.float64)
    try:
        trainer.fit(module, loader, loader)
    except BaseException as error:
        (folder / f"rank{rank}").write_text("".join(error.__notes__))
        raise


def _resumed_run(rank: int, folder: Path) -> int:
    os.environ["LOCAL_RANK"] = str(rank)
    trainer = trainer_of(4, powersgd_strategy(shard_size=2, **LOW_RANK))
    loader = batches(6, rank, 4, torch.float64)
    trainer.fit(Toy(), loader, loader, ckpt_path=str(folder / "kept" / "step=2.ckpt"))
    return trainer.global_step


def test_killed_rank_is_named_and_the_last_checkpoint_resumes(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(_killed_run, 4, tmp_path, wait_for_all=True)
    assert len(caught.value.exceptions) == 4
    for rank in range(3):
        assert "left by rank(s) 3, which ended without a word" in (tmp_path / f"rank{rank}").read_text()
    assert set(run_ranks(_resumed_run, 4, tmp_path, timeout=120)) == {6}


def _run_without_the_store(rank: int, folder: Path) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    # As in runs that launchers start, rank 0 holds the store: here over a port that the file passes on.
    files = distributed.distributed_c10d._get_default_store()
    store = distributed.TCPStore("localhost", 0 if rank == 0 else int(files.get("port")), is_master=rank == 0)
    if rank == 0:
        files.set("port", str(store.port))
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    _fit_and_tell(trainer_of(2, powersgd_strategy(shard_size=1, **LOW_RANK)), rank, 2, _Killed(0), folder)


def test_killed_rank_that_held_the_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_ranks(_run_without_the_store, 2, tmp_path, wait_for_all=True)
    failures = sorted(str(failure).splitlines()[0] for failure in caught.value.exceptions)
    assert failures == ["rank 0 died without an answer", "rank 1 failed:"]
    assert "rank 1 lost the store of the process group, which rank 0 holds" in (tmp_path / "rank1").read_text()
