"""Generation at intervals, with captions that are encoded once."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Shaped, UInt8
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lightning_dalle.callbacks.protocols import CandidateGenerator
from lightning_dalle.models.modes import evaluation_mode
from lightning_dalle.ops.random import keyed_generator


class GenerationCallback(Callback):
    """Takes its turn at every n-th validation of a fit, at each validation or test run, and never in the sanity check.

    Between its intervals it does nothing at all.

    Args:
        every_n_validations: Sampling is slow; validations themselves come by the Trainer's `check_val_every_n_epoch`,
            in epochs, or `val_check_interval`, in steps.
        generate_options: Passed on to the model's `generate`, such as `temperature`.
        seed: Seeds the images, which are drawn from the same random numbers each time.

    Raises:
        ValueError: If `every_n_validations` is below 1.
    """

    def __init__(self, every_n_validations: int, generate_options: Mapping[str, Any] | None, seed: int) -> None:
        if every_n_validations < 1:
            raise ValueError(
                f"every_n_validations ({every_n_validations}) must be at least 1; leave the callback out to have none"
            )
        self.every_n_validations = every_n_validations
        self.generate_options = dict(generate_options or {})
        self.seed = seed
        self._num_validations = 0
        self._should_run = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a model that cannot generate.

        Raises:
            TypeError: If the model has no `generate`.
        """
        if not isinstance(pl_module, CandidateGenerator):
            raise TypeError(
                f"{type(self).__name__} needs a LightningModule with generate(captions, num_candidates, generator=...) "
                f"and {type(pl_module).__name__} has none; add it, or leave the callback out"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whose turn it is."""
        if trainer.sanity_checking:
            return
        if trainer.state.fn == TrainerFn.FITTING:
            self._num_validations += 1
            self._should_run = self._num_validations % self.every_n_validations == 0
        else:
            self._should_run = True

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the turn."""
        self._should_run = True

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the turn."""
        self._should_run = True

    def state_dict(self) -> dict[str, Any]:
        """Return the number of validations so far, so that a resumed run keeps the turns."""
        return {"num_validations": self._num_validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the turns."""
        self._num_validations = state_dict["num_validations"]

    @contextmanager
    def _sampling(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
        """Evaluation mode, averaged weights and the Trainer's precision, all put back with the global random state."""
        # Inside Lightning's inference mode a moved scorer and the results would be inference tensors for ever.
        with (
            torch.inference_mode(False),
            isolate_rng(include_cuda=pl_module.device.type == "cuda"),
            evaluation_mode(pl_module),
            self._averaged_weights(trainer, pl_module),
        ):
            yield
        self._should_run = False

    def _generate(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        captions: Sequence[str],
        num_candidates: int,
        key: tuple[int, ...] = (),
    ) -> UInt8[Tensor, "captions num_candidates 3 *size"]:
        """Draw images or clips from a generator seeded by `seed` and `key`.

        Raises:
            TypeError: If they are no uint8 images [captions, num_candidates, 3, height, width], nor clips with frames
                before the height.
        """
        generator = keyed_generator((self.seed, *key), pl_module.device)
        model = cast(CandidateGenerator, pl_module)
        with trainer.precision_plugin.forward_context():
            images = model.generate(list(captions), num_candidates, generator=generator, **self.generate_options)
        is_drawn = images.dtype == torch.uint8 and images.ndim in (5, 6)
        if not is_drawn or images.shape[:3] != (len(captions), num_candidates, 3):
            raise TypeError(
                f"generate of {type(pl_module).__name__} returned {images.dtype} {tuple(images.shape)}; it must be "
                f"uint8 [captions ({len(captions)}), num_candidates ({num_candidates}), 3, height, width], for clips "
                "[..., 3, frames, height, width]"
            )
        return images

    def _own_share(self, trainer: Trainer, count: int) -> list[int]:
        """Return which of `count` things this rank is to do; shares are equal, so the last one may repeat."""
        share = -(-count // trainer.world_size)
        return [min(trainer.global_rank * share + index, count - 1) for index in range(share)]

    def _gather_shares(
        self, trainer: Trainer, share: Shaped[Tensor, "share *row"], count: int
    ) -> Shaped[Tensor, "count *row"]:
        """Return what all ranks did, in order, on the CPU."""
        gathered = share if trainer.world_size == 1 else trainer.strategy.all_gather(share).flatten(0, 1)
        return gathered[:count].cpu()

    @contextmanager
    def _averaged_weights(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
        """Lightning's weight averaging swaps at the ends of the validation epoch: its turn may have passed already."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        before = callbacks[: callbacks.index(self)]
        swapped_back = [callback for callback in before if isinstance(callback, WeightAveraging) and trainer.validating]
        for callback in swapped_back:
            callback.on_validation_epoch_start(trainer, pl_module)
        try:
            yield
        finally:
            for callback in swapped_back:
                callback.on_validation_epoch_end(trainer, pl_module)


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
    def _run_stage(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Draw, and log under the stage's name."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw, if it is time."""
        if self._should_run:
            self._run_stage(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        self._run_stage(trainer, pl_module, "test")

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw."""
        self._run_stage(trainer, pl_module, "predict")
