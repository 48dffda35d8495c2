"""One bar for a whole stage of training, which also knows how long the stages after it will take."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class StageProgressBar(ProgressBar):
    """Updates done and to do, the remaining time of the stage and of the whole run, and the loss.

    Args:
        title: Of the stage.
        later_seconds: Estimate of what the stages after this one take.
    """

    def __init__(self, title: str, later_seconds: float) -> None:
        super().__init__()
        self.title = title
        self.later_seconds = later_seconds
        self._enabled = True
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def disable(self) -> None:
        """Show nothing, as on ranks other than 0."""
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the bar, from where a resumed stage stands."""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("[cyan]{task.fields[overall]}"),
            TextColumn("[dim]{task.fields[loss]}"),
            disable=not self._enabled,
        )
        steps = int(trainer.estimated_stepping_batches)
        self._task = self._bar.add_task(self.title, total=steps, completed=trainer.global_step, overall="", loss="")
        self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar."""
        if self._bar is None:
            return
        loss = trainer.progress_bar_metrics.get("train/loss")
        text = "" if loss is None else f"loss {float(loss):.3g}"
        self._bar.update(self._task, completed=trainer.global_step, loss=text, overall=self._overall())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the full bar behind."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the console back."""
        self._stop()

    def _overall(self) -> str:
        assert self._bar is not None
        remaining = self._bar.tasks[0].time_remaining
        if remaining is None:
            return ""
        return f"all stages: {format_minutes(remaining + self.later_seconds)}"

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def format_minutes(seconds: float) -> str:
    """Seconds in words that do not promise more than they know.

    Example:
        >>> format_minutes(20), format_minutes(140)
        ('under a minute', 'about 2 min')
    """
    return "under a minute" if seconds < 45 else f"about {max(1, round(seconds / 60))} min"
