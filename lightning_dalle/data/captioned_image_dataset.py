"""Captioned images, each cut to size."""

from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8

from lightning_dalle.data.augmentation import Augmentation, middle_square
from lightning_dalle.data.captioned_dataset import CROP, CaptionedDataset, CaptionedSource
from lightning_dalle.data.keyed_random import keyed_numpy_generator


class ImageSource(CaptionedSource, Protocol):
    """Where images and captions come from; the same each time they are asked for."""

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 height width"], str]:
        """The image at its own size, and its caption."""
        ...


class CaptionedImageDataset(CaptionedDataset):
    """Images cut to size; without augmentation an image is its middle square, resized."""

    def __init__(
        self, source: ImageSource, image_size: int, *, augmentation: Augmentation | None = None, **captions: Any
    ) -> None:
        super().__init__(source, **captions)
        self.source = source
        self.image_size = image_size
        self.augmentation = augmentation

    def content(self, epoch: int, index: int) -> dict[str, Any]:
        """The image and its caption."""
        image, caption = self.source.sample(index)
        if self.augmentation is None:
            image = middle_square(image, self.image_size)
        else:
            image = self.augmentation(image, self.image_size, keyed_numpy_generator(self.seed, epoch, index, CROP))
        return {"image": torch.from_numpy(image), "caption": caption}
