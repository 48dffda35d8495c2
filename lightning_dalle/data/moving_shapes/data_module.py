"""Clips of moving shapes with exact captions, and motions that training never shows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.base import CaptionedDataModule, check_clip_size
from lightning_dalle.data.datasets import ClipTransform
from lightning_dalle.data.moving_shapes.motions import (
    ShapeMotion,
    check_clip_shape,
    draw_motion,
    held_out_motions,
    place_motion,
    trained_motions,
)
from lightning_dalle.ops.random import keyed_numpy_generator

_SPLIT_KEYS = {"train": 0, "val": 1, "held_out": 2}


class MotionsSource:
    """Motions from fixed places, drawn when asked for (some microseconds a clip)."""

    def __init__(
        self, motions: Sequence[ShapeMotion], clip_shape: tuple[int, int, int], generator: np.random.Generator
    ) -> None:
        self.motions = motions
        self.clip_shape = clip_shape
        self._corners = [place_motion(motion, *clip_shape, generator) for motion in motions]

    def __len__(self) -> int:
        return len(self.motions)

    def caption(self, index: int) -> str:
        """Return what the clip shows, exactly."""
        return self.motions[index].caption

    def clip(
        self, index: int, generator: np.random.Generator | None = None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """Return the clip and its caption; the generator has no choice to make."""
        return draw_motion(self.motions[index], self._corners[index], *self.clip_shape), self.caption(index)


class MovingShapesDataModule(CaptionedDataModule):
    """Clips of one shape that moves in one direction, which `moving_shapes_oracle` reads back.

    The split `held_out` has one clip of each motion that is never trained on, the same ones for every seed;
    `Trainer.test` and `Trainer.predict` see it. `train` and `val` show different clips of the same motions.

    Args:
        frames: Frames of every clip; height and width in pixels.
        num_train: Training clips, their motions drawn uniformly.
        num_val: Validation clips.
        batch_size: As all that follow, see `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
    """

    splits = ("train", "val", "held_out")
    test_split = "held_out"
    sample_name = "clips"

    def __init__(
        self,
        *,
        frames: int = 8,
        height: int = 32,
        width: int = 32,
        num_train: int = 50_000,
        num_val: int = 1_000,
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            ClipTransform(),
            batch_size=batch_size,
            tokenizer=tokenizer,
            text_tokens=text_tokens,
            bpe_dropout=bpe_dropout,
            num_workers=num_workers,
            seed=seed,
        )
        self.frames, self.height, self.width = check_clip_size(frames, height, width)
        check_clip_shape(frames, height, width)
        for name, value in (("num_train", num_train), ("num_val", num_val)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        self._num_clips = {"train": num_train, "val": num_val}

    def load_sources(self, split: str) -> dict[str, MotionsSource]:
        """Draw the motions of one split."""
        generator = keyed_numpy_generator(self.seed, _SPLIT_KEYS[split])
        motions: Sequence[ShapeMotion] = held_out_motions()
        if split != "held_out":
            pool = trained_motions()
            drawn = generator.integers(len(pool), size=self._num_clips[split])
            motions = [pool[index] for index in drawn.tolist()]
        return {split: MotionsSource(motions, (self.frames, self.height, self.width), generator)}

    def held_out_captions(self) -> list[str]:
        """Return captions that describe no training clip."""
        return [motion.caption for motion in held_out_motions()]
