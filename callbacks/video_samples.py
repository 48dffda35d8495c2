"""Clips of a model in training, where its logger shows them, and how much moves in them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import UInt8
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_dalle.callbacks.generation import CaptionsCallback
from lightning_dalle.evaluation.clip_features import frame_difference
from lightning_dalle.evaluation.logging import CLIP_SUFFIXES, clip_grid, log_clip
from lightning_dalle.optional import require

MAX_CLIPS_AT_ONCE = 64
"""Clips of one call of `generate`, or of one caption if it has more."""


class VideoSamples(CaptionsCallback):
    """Draws clips of fixed captions and logs them as one clip, a caption a row.

    At the end of a validation, test or prediction run; W&B gets an encoded file, other loggers have it in their folder.
    Logged beside the grid `STAGE/samples`: `STAGE/sample_motion`, the mean absolute difference of neighbouring frames
    in grey levels, and where batches have a `video`, `STAGE/data_motion` of those and the ratio `STAGE/motion_ratio`,
    1 where as much moves as in the data (not at prediction). Each rank draws its share of the captions.

    Args:
        num_candidates: Clips of each caption.
        frame_rate: Frames per second at which they are shown.
        suffix: Format of the files, `.mp4` with the extra `video`, else `.gif` or lossless `.webp`, of which W&B gets
            a `.gif`.
        every_n_validations: Turns, see `GenerationCallback`.
        generate_options: Passed on to `generate`.
        seed: Seeds the clips.

    Attributes:
        clips: Clips of the last turn, uint8 [captions, num_candidates, 3, frames, height, width], None before the
            first.

    Raises:
        TypeError: If `captions` is one string.
        ValueError: If there are no captions, or a setting is out of its range.
        ModuleNotFoundError: If `.mp4` is asked for and the extra `video` is not installed.
    """

    def __init__(
        self,
        captions: Sequence[str],
        num_candidates: int = 1,
        frame_rate: float = 8.0,
        suffix: str = ".mp4",
        every_n_validations: int = 1,
        generate_options: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(captions, every_n_validations, generate_options, seed)
        if num_candidates < 1:
            raise ValueError(f"num_candidates ({num_candidates}) must be at least 1")
        if suffix not in CLIP_SUFFIXES:
            raise ValueError(f"suffix ({suffix!r}) must be one of {', '.join(CLIP_SUFFIXES)}")
        if suffix == ".mp4":
            require("av", "video")
        if frame_rate <= 0:
            raise ValueError(f"frame_rate ({frame_rate}) must be above 0, such as 8 frames a second")
        self.num_candidates = num_candidates
        self.frame_rate = frame_rate
        self.suffix = suffix
        self.clips: UInt8[Tensor, "captions num_candidates 3 frames height width"] | None = None
        self._data_motion: list[Tensor] = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure the motion of the data, if it is time."""
        if self._should_run:
            self._measure(batch)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure the motion of the data."""
        self._measure(batch)

    def _measure(self, batch: Any) -> None:
        if isinstance(batch, Mapping) and "video" in batch:
            self._data_motion.append(frame_difference(batch["video"]))

    def _run_stage(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with self._sampling(trainer, pl_module):
            own = torch.cat(self._own_clips(trainer, pl_module))
            self.clips = self._gather_shares(trainer, own, len(self.captions))
        if stage != "predict":
            self._log_motion(trainer, pl_module, stage, frame_difference(self.clips.flatten(0, 1)).mean())
        self._data_motion = []
        if trainer.is_global_zero:
            grid = clip_grid(self.clips.flatten(0, 1), self.num_candidates)
            text = "\n".join(self.captions)
            log_clip(trainer.loggers, f"{stage}/samples", grid, trainer.global_step, text, self.frame_rate, self.suffix)
        trainer.strategy.barrier(type(self).__name__)

    def _own_clips(self, trainer: Trainer, pl_module: LightningModule) -> list[Tensor]:
        """Clips of this rank's captions, in chunks."""
        numbers = self._own_share(trainer, len(self.captions))
        at_once = max(1, MAX_CLIPS_AT_ONCE // self.num_candidates)
        chunks = []
        for start in range(0, len(numbers), at_once):
            captions = [self.captions[number] for number in numbers[start : start + at_once]]
            chunks.append(self._generate(trainer, pl_module, captions, self.num_candidates, key=(numbers[start],)))
            if chunks[-1].ndim != 6:
                raise TypeError(
                    f"generate of {type(pl_module).__name__} returned images {tuple(chunks[-1].shape)}; VideoSamples "
                    "needs clips [captions, num_candidates, 3, frames, height, width]"
                )
        return chunks

    def _log_motion(self, trainer: Trainer, pl_module: LightningModule, stage: str, sample_motion: Tensor) -> None:
        metrics = {"sample_motion": sample_motion}
        if self._data_motion:
            # All ranks have data or none has: a sampler gives them equally many samples.
            data_motion = trainer.strategy.reduce(torch.cat(self._data_motion).mean(), reduce_op="mean")
            metrics |= {"data_motion": data_motion, "motion_ratio": sample_motion.to(data_motion.device) / data_motion}
        pl_module.log_dict({f"{stage}/{name}": value for name, value in metrics.items()}, sync_dist=True)
