"""Saving on some replicas and shards, resuming on others, and the one file for a single device."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dalle.distributed.powersgd.checkpoint import error_feedback_sums
from lightning_dalle.strategies import consolidate_checkpoint
from tests.distributed.toy_module import (
    Toy,
    batches,
    fit_on_rank,
    powersgd_strategy,
    trainer_of,
    whole_state,
    whole_tensors,
)
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks

pytestmark = LIGHTNING_WARNINGS
LOW_RANK: dict[str, Any] = {"matrix_approximation_rank": 1, "min_compression_rate": 1.0}
HALF = 4


class _SumOfErrorFeedback(Callback):
    """Sums what all replicas have missed when training is about to take a step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.sums: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            gradients = trainer.strategy.gradients  # type: ignore[attr-defined]
            self.sums = whole_tensors(error_feedback_sums(gradients))


def _save(rank: int, settings: dict[str, Any], folder: Path) -> Any:
    keep = ModelCheckpoint(folder, every_n_train_steps=HALF, save_top_k=-1, filename="{step}")
    errors = _SumOfErrorFeedback(HALF)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [keep, errors]}
    return fit_on_rank(rank, 4, settings, 2 * HALF, **options) | {"errors": errors.sums}


def _resume(rank: int, world_size: int, settings: dict[str, Any], file: Path) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module, errors = Toy(), _SumOfErrorFeedback(HALF)
    trainer = trainer_of(world_size, powersgd_strategy(**settings), callbacks=[errors])
    loader = batches(HALF, rank, world_size, torch.float64, start=HALF)
    trainer.fit(module, loader, loader, ckpt_path=str(file))
    return {"losses": module.losses, "state": whole_state(module), "errors": errors.sums}


def _mean_losses(ranks: list[Any]) -> list[float]:
    return [sum(losses) / len(ranks) for losses in zip(*(answer["losses"] for answer in ranks), strict=True)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Checkpoints of two replicas with two shards each, halfway and at the end."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(_save, 4, {**LOW_RANK, "shard_size": 2}, folder, timeout=240)


@pytest.mark.parametrize(("world_size", "shard_size"), [(4, 2), (2, 2), (2, 1), (4, 1)])
def test_training_goes_on_elsewhere(saved: tuple[Path, list[Any]], world_size: int, shard_size: int) -> None:
    folder, first = saved
    settings = {**LOW_RANK, "shard_size": shard_size}
    resumed = run_ranks(_resume, world_size, world_size, settings, folder / f"step={HALF}.ckpt", timeout=240)
    assert _mean_losses(resumed)[0] == pytest.approx(_mean_losses(first)[HALF], rel=1e-9)
    # All that was missed arrives, however many replicas it is spread over.
    original = first[0]["errors"]
    assert max(float(value.abs().max()) for value in original.values()) > 1e-3
    for name, value in original.items():
        # One replica compresses nothing, and so has no buffer of what nothing uses.
        arrived = resumed[0]["errors"].get(name, torch.zeros_like(value))
        torch.testing.assert_close(arrived, value, rtol=1e-12, atol=1e-12)
    if (world_size, shard_size) == (4, 2):
        # The mean gradient depends on the sum of the buffers alone, and so the same mesh goes on as if nothing was.
        torch.testing.assert_close(resumed[0]["state"], first[0]["state"], rtol=1e-9, atol=1e-10)


def _save_and_resume_warm(rank: int, folder: Path) -> Any:
    """Train on two replicas with two shards each, then on the same, then on four with one."""
    settings = {**LOW_RANK, "warm_start": True}
    first = _save(rank, {**settings, "shard_size": 2}, folder)
    answers = []
    for shard_size in (2, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = _resume(rank, 4, {**settings, "shard_size": shard_size}, folder / f"step={HALF}.ckpt")
        messages = [str(warning.message) for warning in caught if "warm Q" in str(warning.message)]
        answers.append(answer | {"warnings": messages})
    return first, *answers


def test_warm_q_goes_on_over_the_same_shards_and_starts_again_over_others(tmp_path: Path) -> None:
    first, same, other = zip(*run_ranks(_save_and_resume_warm, 4, tmp_path, timeout=240), strict=True)
    # The loss after a step tells whether its Q was the same; that before it does not.
    assert _mean_losses(list(same)) == pytest.approx(_mean_losses(list(first))[HALF:], rel=1e-9)
    assert _mean_losses(list(other))[0] == pytest.approx(_mean_losses(list(first))[HALF], rel=1e-9)
    assert _mean_losses(list(other))[1] != pytest.approx(_mean_losses(list(first))[HALF + 1], rel=1e-9)
    torch.testing.assert_close(same[0]["state"], first[0]["state"], rtol=1e-9, atol=1e-10)
    assert not any(answer["warnings"] for answer in (*same, *other[1:]))
    (warning,) = other[0]["warnings"]
    assert warning.startswith("the warm Q of another sharding starts again: blocks.0.fc1.weight, blocks.0.fc2")


def test_one_file_is_read_on_one_device(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, first = saved
    consolidate_checkpoint(folder / f"step={2 * HALF}.ckpt", tmp_path / "consolidated.ckpt")
    module = Toy.load_from_checkpoint(tmp_path / "consolidated.ckpt", weights_only=True, seed=5)
    torch.testing.assert_close(whole_state(module), first[0]["state"], rtol=0, atol=0)


def _resume_from_file(rank: int, file: Path) -> Any:
    """Resume as a replica each, then as shards."""
    return [
        _resume(rank, 2, {"matrix_approximation_rank": 99, "min_compression_rate": 0.0, "shard_size": size}, file)
        for size in (1, 2)
    ]


def test_one_file_resumes_in_plain_tensors_and_in_shards(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, first = saved
    consolidate_checkpoint(folder / f"step={HALF}.ckpt", tmp_path / "consolidated.ckpt")
    plain, sharded = zip(*run_ranks(_resume_from_file, 2, tmp_path / "consolidated.ckpt", timeout=120), strict=True)
    assert _mean_losses(list(plain))[0] == pytest.approx(_mean_losses(first)[HALF], rel=1e-9)
    # Moments arrive too; the second is that of the step after.
    assert _mean_losses(list(plain)) == pytest.approx(_mean_losses(list(sharded)), rel=1e-9)
    torch.testing.assert_close(plain[0]["state"], sharded[0]["state"], rtol=1e-9, atol=1e-10)


def test_checkpoint_of_an_ordinary_run_resumes(tmp_path: Path) -> None:
    loader = batches(2 * HALF, 0, 1, torch.float64)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=HALF, save_top_k=-1, filename="{step}")
    module = Toy()
    trainer_of(1, "auto", enable_checkpointing=True, callbacks=[keep]).fit(module, loader, loader)
    ranks = run_ranks(_resume_from_file, 2, tmp_path / f"step={HALF}.ckpt", timeout=120)
    for answers in zip(*ranks, strict=True):
        assert _mean_losses(list(answers)) == pytest.approx(module.losses[HALF:], rel=1e-9)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must be a checkpoint of shards, with a file meta.pt"):
        consolidate_checkpoint(tmp_path, tmp_path / "consolidated.ckpt")
