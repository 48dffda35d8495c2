"""What mixed precision does to a run: scales, skipped updates, lost gradients, and where it first went wrong."""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import UInt8
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from lightning_dalle.callbacks.gradient_statistics import (
    gradient_figures,
    largest_activations,
    parameters_by_block,
    samples,
    update_ratios,
)
from lightning_dalle.callbacks.loss_scale_sources import LossScaleSource, loss_scale_source
from lightning_dalle.callbacks.non_finite_search import NonFinite, find_first_non_finite
from lightning_dalle.callbacks.scale_picture import scale_picture
from lightning_dalle.evaluation.image_logging import log_image

_log = logging.getLogger(__name__)


class LossScaleMonitor(Callback):
    """Watches a run under `PerBlockGradientScaling` or under Lightning's `16-mixed`.

    At every n-th update it logs, under `precision/FIGURE/BLOCK`, the `scale` of each block with the `growths` and
    `divisions` so far, `gradient_norm`, `largest_gradient` and share of `zero_gradients` (unscaled; before clipping),
    `update_ratio` |change| / |value| of the parameters, and `largest_activation` of the block's output. Parameters in no
    block are the block `outside`; under one global scale the whole module is one block. `precision/skipped_updates` and
    `precision/skipped_share` are of the whole run. A heat map of all scales is logged when training ends.

    The first skipped update is looked into: the training step runs once more on the same batch, with the same random
    numbers and weights, and the first module whose output, or else whose gradient, is not finite is written to the log,
    with update, batch and type. Metrics that a training step keeps outside of buffers are updated twice then. Manual
    optimization, where a training step has side effects, is not run again.

    Args:
        every_n_updates: Turns. Off its turn the monitor only counts.
        dump_folder: Where the batch of that first skipped update is kept; None keeps none.
        max_skips_in_a_row: So many skipped updates, one after another, are too many; None bears any number.
        then: What is done about it: end the training, or go on in bfloat16.

    Attributes:
        figures: Of the last turn, as logged.
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
        self.figures: dict[str, float] = {}
        self.first_non_finite: NonFinite | None = None
        self.num_updates = self.num_skipped_updates = 0
        self._has_searched = False
        self._skips_in_a_row = 0
        self._history: list[tuple[int, dict[str, float]]] = []
        self._batches: list[tuple[Any, int, list[Tensor]]] = []
        self._turn: _Turn | None = None
        self._updates_at_start = 0

    _source: LossScaleSource

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the scales.

        Raises:
            TypeError: If the precision plugin has none.
        """
        self._source = loss_scale_source(trainer, pl_module)
        self._turn = None
        self._batches = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a turn; keep what a second run of this step would need."""
        if self._turn is None and self.num_updates % self.every_n_updates == 0:
            self._turn = _Turn(pl_module, self._source)
        if not self._has_searched:
            self._batches.append((batch, batch_idx, _random_states(pl_module.device)))
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
        self._batches = []
        self._source.after_batch()
        if self._turn is not None:
            self._report(trainer, self._turn.end())
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
        """The counts."""
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
        self.figures = {
            f"precision/{figure}/{block}": float(value)
            for figure, values in everything.items()
            for block, value in values.items()
        }
        self.figures["precision/skipped_updates"] = float(self.num_skipped_updates)
        self.figures["precision/skipped_share"] = self.num_skipped_updates / self.num_updates
        for logger in trainer.loggers:
            logger.log_metrics(self.figures, step=trainer.global_step)

    def _search(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the batches of the skipped update again, one after another, until one shows something."""
        self._has_searched = True
        if not pl_module.automatic_optimization:
            _log.warning("update %d is skipped; manual optimization is not run again", self.num_updates)
            return
        for batch, batch_idx, states in self._batches:
            with _silent(pl_module), isolate_rng(), trainer.precision_plugin.train_step_context():
                _set_random_states(states, pl_module.device)
                self.first_non_finite = find_first_non_finite(
                    pl_module, batch, lambda: _loss(pl_module, batch, batch_idx), self._source.loss_factor()  # noqa: B023
                )
            if self.first_non_finite is not None:
                self._tell(trainer, batch, batch_idx)
                return

    def _tell(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        _log.warning(
            "update %d is skipped: batch %d on rank %d first turned non-finite in %s",
            self.num_updates, batch_idx, trainer.global_rank, self.first_non_finite,
        )  # fmt: skip
        if self.dump_folder is not None:
            Path(self.dump_folder).mkdir(parents=True, exist_ok=True)
            name = f"non_finite-update_{self.num_updates}-rank_{trainer.global_rank}.pt"
            torch.save({"batch": batch, "batch_idx": batch_idx}, Path(self.dump_folder) / name)

    def _give_up(self, trainer: Trainer) -> None:
        self._skips_in_a_row = 0
        _log.warning("%s updates in a row were skipped: %s", self.max_skips_in_a_row, self.then)
        if self.then == "stop":
            trainer.should_stop = True
        else:
            self._source.use_bfloat16()


class _Turn:
    """One look at an update, from before its first forward pass until after it."""

    def __init__(self, pl_module: LightningModule, source: LossScaleSource) -> None:
        blocks = source.blocks()
        self._groups = parameters_by_block(pl_module, blocks)
        self._stack = ExitStack()
        self._activations = self._stack.enter_context(largest_activations(blocks))
        self._gradients: dict[str, dict[str, float]] = {}
        self._before: dict[str, Tensor] = {}

    def before_step(self) -> None:
        self._stack.close()
        self._gradients = gradient_figures(self._groups)
        self._before = samples(self._groups)

    def end(self) -> dict[str, dict[str, float]]:
        by_figure: dict[str, dict[str, float]] = {}
        for block, figures in self._gradients.items():
            for figure, value in figures.items():
                by_figure.setdefault(figure, {})[block] = value
        by_figure["update_ratio"] = update_ratios(self._before, samples(self._groups))
        by_figure["largest_activation"] = {name: value.item() for name, value in self._activations.items()}
        return by_figure


def _loss(pl_module: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    takes_index = "batch_idx" in inspect.signature(pl_module.training_step).parameters
    output = pl_module.training_step(batch, batch_idx) if takes_index else pl_module.training_step(batch)
    loss = output["loss"] if isinstance(output, Mapping) else output
    assert isinstance(loss, Tensor)
    return loss


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@contextmanager
def _silent(pl_module: LightningModule) -> Iterator[None]:
    """What a second run of a training step logs would be counted twice, or refused in this hook."""
    pl_module.log = pl_module.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pl_module.log, pl_module.log_dict
