"""One bar for a whole stage of training, which shows what is left of it and of the whole run."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from lightning_dalle.quickstart.expected_time import Pace, RemainingTime, format_minutes


class StageProgressBar(ProgressBar):
    """Updates done and to do, the remaining time of the stage and of the whole run, and the loss.

    Args:
        title: Title of the stage.
        pace: Pace of the stage, as it was found before.
        later_seconds: Estimate of what the stages after this one take.
    """

    def __init__(self, title: str, pace: Pace, later_seconds: float) -> None:
        super().__init__()
        self.title = title
        self.pace = pace
        self.later_seconds = later_seconds
        self._enabled = True
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._remaining: RemainingTime | None = None

    def disable(self) -> None:
        """Show nothing, as on ranks other than 0."""
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the bar, from where a resumed stage stands."""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("[cyan]{task.fields[remaining]}"),
            TextColumn("[dim]{task.fields[loss]}"),
            disable=not self._enabled,
        )
        self._remaining = RemainingTime(self.pace, trainer.num_training_batches)
        steps, done = int(trainer.estimated_stepping_batches), trainer.global_step
        self._task = self._bar.add_task(self.title, total=steps, completed=done, remaining=self._words(done), loss="")
        self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar."""
        if self._bar is None or self._remaining is None:
            return
        self._remaining.end_update()
        loss = trainer.progress_bar_metrics.get("train/loss")
        text = "" if loss is None else f"loss {float(loss):.3g}"
        done = trainer.global_step
        self._bar.update(self._task, completed=done, loss=text, remaining=self._words(done))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the pause out of the updates."""
        if self._remaining is not None:
            self._remaining.start_validation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the updates."""
        if self._remaining is not None:
            self._remaining.end_validation()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the full bar behind."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the console back."""
        self._stop()

    def _words(self, done: int) -> str:
        assert self._remaining is not None
        seconds = self._remaining.seconds(done)
        return f"{format_minutes(seconds)}, all stages: {format_minutes(seconds + self.later_seconds)}"

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
