"""A few real updates of each stage of training, timed in a folder of their own before the stages are run."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_dalle.commands.trainer import SuiteCLI
from lightning_dalle.quickstart.expected_time import Pace
from lightning_dalle.quickstart.machine import training_precision
from lightning_dalle.quickstart.settings import RunFolder, Settings
from lightning_dalle.quickstart.training import quiet, recipe_arguments

SLOW_UPDATES = 2
"""The first ones also prepare kernels and buffers, and do not count."""
MIN_UPDATES, MAX_UPDATES = 4, 8
UPDATE_SECONDS = 2.0
"""What the updates of a stage take together, unless the fewest take longer."""
LONGEST_SECONDS = 8.0
"""From here on two updates are enough, where a machine is so slow that their start no longer matters."""
VALIDATION_BATCHES = 2


def rehearse(settings: Settings, folder: RunFolder, stages: Iterable[str]) -> dict[str, Pace]:
    """Time the first updates of stages, one after the other, each with what the ones before it left.

    Nothing is written to the folder of the run, no logger sees it, and random states are put back.

    Args:
        folder: Has the tokenizer, and what the stages before these have left.
    """
    stages = tuple(stages)
    with tempfile.TemporaryDirectory() as path, isolate_rng(), quiet():
        scratch = RunFolder(path)
        shutil.copyfile(folder.tokenizer, scratch.tokenizer)
        for stage in settings.trained_stages:
            if stage not in stages and folder.checkpoint(stage).exists():
                shutil.copyfile(folder.checkpoint(stage), scratch.checkpoint(stage))
        return {stage: _rehearse_stage(settings, scratch, stage) for stage in stages}


def _rehearse_stage(settings: Settings, scratch: RunFolder, stage: str) -> Pace:
    timer = UpdateTimer()
    arguments = [
        f"--trainer.precision={training_precision()}",
        *recipe_arguments(settings, scratch, stage),
        f"--trainer.default_root_dir={scratch.work(stage)}",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]
    cli = SuiteCLI(arguments, run=False)
    limit, found = cli.trainer.limit_val_batches, len(cli.datamodule.val_dataloader())
    validation_batches = min(limit, found) if isinstance(limit, int) else int(limit * found)
    cli.trainer.limit_val_batches = min(VALIDATION_BATCHES, validation_batches)
    cli.trainer.callbacks.append(timer)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    # Of no use but to the stages that build on it.
    cli.trainer.save_checkpoint(scratch.checkpoint(stage), weights_only=True)
    return timer.pace(validation_batches)


class UpdateTimer(Callback):
    """Times a few updates and one short validation of a training that it then stops.

    All updates see the first batch, so that those after the first find what a stage keeps of earlier epochs, as most
    updates of a long run do. Each still loads a batch of its own.

    Args:
        clock: Gives seconds. It runs from here on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mark = clock()
        self._first_batch: dict[str, Any] | None = None
        self._start_seconds = 0.0
        self._updates: list[float] = []
        self._validation_batches: list[float] = []
        self._rest_of_validation = 0.0
        self._planned_updates = 1
        self._planned_validations = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what the whole stage will do."""
        self._start_seconds = self._lap()
        self._planned_updates = int(trainer.estimated_stepping_batches)
        interval = trainer.val_check_batch if trainer.limit_val_batches else None
        self._planned_validations = 0 if interval is None else int(self._planned_updates // interval)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Show the first batch again."""
        if self._first_batch is None:
            self._first_batch = dict(batch)
        batch.update(self._first_batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop after a few updates."""
        self._updates.append(self._lap())
        seconds, count = sum(self._updates), len(self._updates)
        enough = (seconds >= UPDATE_SECONDS and count >= MIN_UPDATES) or (seconds >= LONGEST_SECONDS and count >= 2)
        if enough or count >= MAX_UPDATES:
            # Lightning validates before it stops.
            trainer.should_stop = True

    def on_validation_batch_start(self, *_: Any) -> None:
        """Keep what came before the batch apart."""
        self._rest_of_validation += self._lap()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Note a batch."""
        self._validation_batches.append(self._lap())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what other callbacks have drawn and scored."""
        self._rest_of_validation += self._lap()

    def pace(self, validation_batches: int) -> Pace:
        """Return what was found.

        Args:
            validation_batches: Validation batches of a validation of the real stage.
        """
        batch = min(self._validation_batches, default=0.0)
        return Pace(
            start_seconds=self._start_seconds,
            update_seconds=median(self._updates[SLOW_UPDATES:] or self._updates[-1:]),
            validation_seconds=self._rest_of_validation + validation_batches * batch,
            updates=self._planned_updates,
            validations=self._planned_validations,
        )

    def _lap(self) -> float:
        """Return seconds since the last call."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = self._clock()
        seconds, self._mark = now - self._mark, now
        return seconds
