"""The common ground of callbacks that draw for fixed captions at the end of a run over data."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_dalle.callbacks.generation_callback import GenerationCallback


class CaptionsCallback(GenerationCallback, ABC):
    """Takes its turn at the end of a validation, test or prediction run.

    Args:
        captions: What is drawn, in this order.
        every_n_validations: As all that follow, see `GenerationCallback`.

    Raises:
        TypeError: If `captions` is one string.
        ValueError: If there are no captions, or `every_n_validations` is below 1.
    """

    def __init__(
        self,
        captions: Sequence[str],
        every_n_validations: int,
        generate_options: Mapping[str, Any] | None,
        seed: int,
    ) -> None:
        super().__init__(every_n_validations, generate_options, seed)
        if isinstance(captions, str):
            raise TypeError(f"captions ({captions!r}) must be a sequence of strings; put one caption into a list")
        if not captions:
            raise ValueError("captions (none) must hold at least one caption")
        self.captions = tuple(captions)

    @abstractmethod
    def _take_turn(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Draw, and log under the stage's name."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw, if it is time."""
        if self._is_turn:
            self._take_turn(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        self._take_turn(trainer, pl_module, "test")

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        self._take_turn(trainer, pl_module, "predict")
