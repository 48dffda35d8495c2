"""Drawn shapes with exact captions, and compositions that training never shows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.augmentation import AugmentationName
from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.datasets import ImageTransform
from lightning_dalle.data.shapes.scenes import (
    MIN_IMAGE_SIZE,
    OBJECT_INDEX,
    Scene,
    draw,
    held_out_scenes,
    negative_scene,
    place,
    trained_scenes,
)
from lightning_dalle.ops.random import keyed_numpy_generator

_SPLIT_KEYS = {"train": 0, "val": 1, "held_out": 2}


class ShapesSource:
    """Scenes at fixed places, drawn when asked for (some microseconds an image)."""

    def __init__(self, scenes: Sequence[Scene], image_size: int, generator: np.random.Generator) -> None:
        self.scenes = scenes
        self.image_size = image_size
        self._corners = [place(scene, image_size, generator) for scene in scenes]
        # Drawn last: pictures are the same as without.
        self._negatives = [negative_scene(scene, generator) for scene in scenes]

    def __len__(self) -> int:
        return len(self.scenes)

    def caption(self, index: int) -> str:
        """Return what the picture shows, exactly."""
        return self.scenes[index].caption

    def negative_caption(self, index: int) -> str:
        """Return what it does not show, but nearly."""
        return self._negatives[index].caption

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 size size"], str]:
        """Return the picture and its caption."""
        objects = [OBJECT_INDEX[item] for item in self.scenes[index].objects]
        return draw(objects, self._corners[index], self.image_size), self.caption(index)


class CaptionedShapesDataModule(CaptionedDataModule):
    """Pictures of one object, or of two and their relation, which `shapes_oracle` reads back.

    Batches also have a `negative_caption`: of two objects the opposite relation, of one another word.

    The split `held_out` has one picture of each composition that is never trained on, the same ones for every seed;
    `Trainer.test` and `Trainer.predict` see it. `train` and `val` show different pictures of the same compositions.

    Args:
        image_size: Side of the images in pixels.
        one_object_share: Share of the pictures that show one object; the others show two. At 1 or 0 there are none of
            the other kind. The few compositions of one object are soon known by heart, and then taught again and again.
        num_train: Training pictures. Compositions are drawn uniformly, within those of one and those of two objects.
        num_val: Validation pictures.
        augmentation: Augmentation of training images; see `ImageTransform`.
        batch_size: As all that follow, see `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
    """

    splits = ("train", "val", "held_out")
    test_split = "held_out"
    sample_name = "pictures"

    def __init__(
        self,
        *,
        image_size: int = 40,
        one_object_share: float = 0.2,
        num_train: int = 50_000,
        num_val: int = 1_000,
        augmentation: AugmentationName = "none",
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            ImageTransform(image_size, augmentation),
            batch_size=batch_size,
            tokenizer=tokenizer,
            text_tokens=text_tokens,
            bpe_dropout=bpe_dropout,
            num_workers=num_workers,
            seed=seed,
        )
        self.image_size = image_size
        if image_size < MIN_IMAGE_SIZE:
            raise ValueError(f"image_size ({image_size}) must be at least {MIN_IMAGE_SIZE}, or the shapes look alike")
        for name, value in (("num_train", num_train), ("num_val", num_val)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if not 0 <= one_object_share <= 1:
            raise ValueError(f"one_object_share ({one_object_share}) must be between 0 and 1, such as 0.2")
        self._shares = {1: one_object_share, 2: 1 - one_object_share}
        self.counts = tuple(count for count, share in self._shares.items() if share > 0)
        self._num_pictures = {"train": num_train, "val": num_val}

    def load_sources(self, split: str) -> dict[str, ShapesSource]:
        """Draw the scenes of one split."""
        generator = keyed_numpy_generator(self.seed, _SPLIT_KEYS[split])
        return {split: ShapesSource(self._scenes(split, generator), self.image_size, generator)}

    def _scenes(self, split: str, generator: np.random.Generator) -> list[Scene]:
        if split == "held_out":
            return [scene for count in self.counts for scene in held_out_scenes(count)]
        pools = {count: trained_scenes(count) for count in self.counts}
        drawn = np.where(generator.random(self._num_pictures[split]) < self._shares[1], 1, 2)
        return [pools[count][generator.integers(len(pools[count]))] for count in drawn.tolist()]

    def held_out_captions(self, num_objects: int) -> list[str]:
        """Return captions of one or of two objects that describe no training picture."""
        return [scene.caption for scene in held_out_scenes(num_objects)]
