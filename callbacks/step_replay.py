"""A training step that can be run once more, as it was."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_dalle.callbacks.non_finite_search import NonFinite, find_first_non_finite


class StepReplay:
    """What a second run of a training step needs: its batch, and the random numbers that it began with."""

    def __init__(self, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch, self.batch_idx = batch, batch_idx
        self._random_state = torch.get_rng_state()
        self._device = pl_module.device
        self._device_state = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def find_first_non_finite(
        self, trainer: Trainer, pl_module: LightningModule, loss_factor: float
    ) -> NonFinite | None:
        """Run the step under the Trainer's precision; nothing is logged, and global random states are put back."""
        with _silent(pl_module), isolate_rng(), trainer.precision_plugin.train_step_context():
            torch.set_rng_state(self._random_state)
            if self._device_state is not None:
                torch.cuda.set_rng_state(self._device_state, self._device)
            return find_first_non_finite(pl_module, self.batch, lambda: self._loss(pl_module), loss_factor)

    def _loss(self, pl_module: LightningModule) -> Tensor:
        takes_index = "batch_idx" in inspect.signature(pl_module.training_step).parameters
        arguments = (self.batch, self.batch_idx) if takes_index else (self.batch,)
        output = pl_module.training_step(*arguments)
        loss = output["loss"] if isinstance(output, Mapping) else output
        assert isinstance(loss, Tensor)
        return loss


@contextmanager
def _silent(pl_module: LightningModule) -> Iterator[None]:
    """What a second run of a training step logs would be counted twice, or refused in the hook that runs it."""
    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    pl_module.log = pl_module.log_dict = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pl_module.log, pl_module.log_dict
