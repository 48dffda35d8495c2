"""What mixed precision does to a run: scales, skipped updates, lost gradients, and where it first went wrong."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim import Optimizer

from lightning_dalle.callbacks.gradient_statistics import UpdateFigures
from lightning_dalle.callbacks.loss_scale_sources import LossScaleSource, loss_scale_source
from lightning_dalle.callbacks.non_finite_search import NonFinite, StepReplay
from lightning_dalle.evaluation.logging import log_image


def scale_picture(history: Sequence[tuple[int, Mapping[str, float]]]) -> UInt8[Tensor, "3 height width"]:
    """Draw the binary logarithm of each block's scale, first block on top, over the updates that were looked at."""
    names = list(history[0][1])
    logarithms = torch.tensor([[scales[name] for name in names] for _, scales in history]).double().log2().T
    # A figure of its own, without pyplot, which keeps every picture and chooses a window system.
    figure = Figure(figsize=(8, min(12, 1.5 + 0.2 * len(names))), layout="constrained")
    axes = figure.subplots()
    first, last = history[0][0], history[-1][0]
    picture = axes.imshow(
        logarithms.numpy(), aspect="auto", interpolation="nearest", extent=(first, max(last, first + 1), len(names), 0)
    )
    every = -(-len(names) // 32)
    axes.set_yticks([number + 0.5 for number in range(0, len(names), every)], names[::every], fontsize=7)
    axes.set_xlabel("update")
    figure.colorbar(picture, label="log2 of the scale")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return torch.from_numpy(np.array(canvas.buffer_rgba())[..., :3]).permute(2, 0, 1)


_log = logging.getLogger(__name__)


class LossScaleMonitor(Callback):
    """Watches a run under `PerBlockGradientScaling` or under Lightning's `16-mixed`.

    At every n-th update it logs, under `precision/FIGURE/BLOCK`, the `scale` of each block with the `growths` and
    `divisions` so far, `gradient_norm`, `largest_gradient` and share of `zero_gradients` (unscaled; before clipping),
    `update_ratio` |change| / |value| of the parameters, and `largest_activation` of the block's output. Parameters in
    no block are the block `outside`; under one global scale the whole module is one block. `precision/skipped_updates`
    and `precision/skipped_share` are of the whole run. A heat map of all scales is logged when training ends.

    The first skipped update is looked into: the training step runs once more on the same batch, with the same random
    numbers and weights, and the first module whose output, or else whose gradient, is not finite is written to the log,
    with update, batch and type. Metrics that a training step keeps outside of buffers are updated twice then. Manual
    optimization, where a training step has side effects, is not run again.

    Args:
        every_n_updates: Turns. Between its steps the monitor only counts.
        dump_folder: Where the batch of that first skipped update is kept; None keeps none.
        max_skips_in_a_row: So many skipped updates, one after another, are too many; None bears any number.
        then: What is done about it: end the training, or go on in bfloat16.

    Attributes:
        metrics: Metrics of the last turn, as logged.
        first_non_finite: What was found, on this rank.
        num_updates: So far, skipped ones included.
        num_skipped_updates: So far.

    Raises:
        ValueError: If a number is below 1 or `then` is unknown.
    """

    def __init__(
        self,
        every_n_updates: int = 50,
        dump_folder: str | Path | None = None,
        max_skips_in_a_row: int | None = None,
        then: Literal["stop", "bfloat16"] = "stop",
    ) -> None:
        for name, value in (("every_n_updates", every_n_updates), ("max_skips_in_a_row", max_skips_in_a_row)):
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if then not in ("stop", "bfloat16"):
            raise ValueError(f"then ({then!r}) must be 'stop' or 'bfloat16'")
        self.every_n_updates = every_n_updates
        self.dump_folder = dump_folder
        self.max_skips_in_a_row, self.then = max_skips_in_a_row, then
        self.metrics: dict[str, float] = {}
        self.first_non_finite: NonFinite | None = None
        self.num_updates = self.num_skipped_updates = 0
        self._has_searched = False
        self._skips_in_a_row = 0
        self._history: list[tuple[int, dict[str, float]]] = []
        self._steps: list[StepReplay] = []
        self._turn: UpdateFigures | None = None
        self._updates_at_start = 0

    _source: LossScaleSource

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the scales.

        Raises:
            TypeError: If the precision plugin has none.
        """
        self._source = loss_scale_source(trainer, pl_module)
        self._turn = None
        self._steps = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a turn; keep what a second run of this step would need."""
        if self._turn is None and self.num_updates % self.every_n_updates == 0:
            self._turn = UpdateFigures(pl_module, self._source)
        if not self._has_searched:
            self._steps.append(StepReplay(pl_module, batch, batch_idx))
        self._updates_at_start = self.num_updates

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count, look at the gradients, and look into the first skipped update."""
        is_skipped = self._source.is_skipped(optimizer)
        self.num_updates += 1
        self.num_skipped_updates += is_skipped
        self._skips_in_a_row = self._skips_in_a_row + 1 if is_skipped else 0
        if self._turn is not None:
            self._turn.before_step()
        if is_skipped and not self._has_searched:
            self._search(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a turn after the update; give up where too many were skipped."""
        if self.num_updates == self._updates_at_start:
            return
        self._steps = []
        self._source.after_batch()
        if self._turn is not None:
            self._report(trainer, self._turn.after_step())
            self._turn = None
        if self.max_skips_in_a_row is not None and self._skips_in_a_row >= self.max_skips_in_a_row:
            self._give_up(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the heat map."""
        if self._history and trainer.loggers and trainer.is_global_zero:
            log_image(trainer.loggers, "precision/scales", self.heat_map(), trainer.global_step)

    def heat_map(self) -> UInt8[Tensor, "3 height width"]:
        """Scales of all turns so far, by block over updates.

        Raises:
            RuntimeError: If there was none yet.
        """
        if not self._history:
            raise RuntimeError("the monitor has seen no update yet; fit with it as a callback first")
        return scale_picture(self._history)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "num_updates": self.num_updates,
            "num_skipped_updates": self.num_skipped_updates,
            "has_searched": self._has_searched,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the counts."""
        self.num_updates = state_dict["num_updates"]
        self.num_skipped_updates = state_dict["num_skipped_updates"]
        self._has_searched = state_dict["has_searched"]

    def _report(self, trainer: Trainer, by_figure: Mapping[str, Mapping[str, float]]) -> None:
        growths, divisions = self._source.changes()
        scales = self._source.scales()
        self._history.append((self.num_updates, scales))
        everything = {**by_figure, "scale": scales, "growths": growths, "divisions": divisions}
        self.metrics = {
            f"precision/{metric}/{block}": float(value)
            for metric, values in everything.items()
            for block, value in values.items()
        }
        self.metrics["precision/skipped_updates"] = float(self.num_skipped_updates)
        self.metrics["precision/skipped_share"] = self.num_skipped_updates / self.num_updates
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=trainer.global_step)

    def _search(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the batches of the skipped update again, one after another, until one shows something."""
        self._has_searched = True
        if not pl_module.automatic_optimization:
            _log.warning("update %d is skipped; manual optimization is not run again", self.num_updates)
            return
        for step in self._steps:
            self.first_non_finite = step.find_first_non_finite(trainer, pl_module, self._source.loss_factor())
            if self.first_non_finite is not None:
                self._tell(trainer, step)
                return

    def _tell(self, trainer: Trainer, step: StepReplay) -> None:
        text = "update %d is skipped: batch %d on rank %d first turned non-finite in %s"
        _log.warning(text, self.num_updates, step.batch_idx, trainer.global_rank, self.first_non_finite)
        if self.dump_folder is not None:
            Path(self.dump_folder).mkdir(parents=True, exist_ok=True)
            name = f"non_finite-update_{self.num_updates}-rank_{trainer.global_rank}.pt"
            torch.save({"batch": step.batch, "batch_idx": step.batch_idx}, Path(self.dump_folder) / name)

    def _give_up(self, trainer: Trainer) -> None:
        self._skips_in_a_row = 0
        _log.warning("%s updates in a row were skipped: %s", self.max_skips_in_a_row, self.then)
        if self.then == "stop":
            trainer.should_stop = True
        else:
            self._source.use_bfloat16()
