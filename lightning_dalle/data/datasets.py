"""Datasets of captioned samples, seen from their sources."""

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import UInt8
from torch.utils.data import Dataset

from lightning_dalle.data.augmentation import Augmentation, middle_square
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.ops.random import keyed_numpy_generator

CROP, DROPOUT = 0, 1
"""Purposes of randomness, the last number of its key."""


class CaptionedSource(Protocol):
    """What is described, and by which captions; the same each time it is asked for."""

    def __len__(self) -> int: ...

    def caption(self, index: int) -> str:
        """The caption alone."""
        ...


@runtime_checkable
class NegativeCaptionSource(Protocol):
    """A source that knows what a sample nearly shows."""

    def negative_caption(self, index: int) -> str:
        """A text that differs little from the caption and is wrong, for contrastive training."""
        ...


class CaptionedDataset(Dataset, ABC):
    """Captions, their ids if there is a tokenizer, wrong ones if the source has them, and what the subclass adds.

    Indexed by (epoch, index), or by an index alone outside of training.
    """

    def __init__(
        self,
        source: CaptionedSource,
        *,
        seed: int = 0,
        tokenizer: CaptionTokenizer | None = None,
        text_tokens: int = 256,
        dropout: float = 0.0,
    ) -> None:
        self.seed = seed
        self.tokenizer = tokenizer
        self.text_tokens = text_tokens
        self.dropout = dropout
        self._length = len(source)
        self._negatives = source if isinstance(source, NegativeCaptionSource) else None

    def __len__(self) -> int:
        return self._length

    @abstractmethod
    def content(self, epoch: int, index: int) -> dict[str, Any]:
        """The caption, and what it describes."""

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        sample = self.content(epoch, index)
        if self._negatives is not None:
            sample["negative_caption"] = self._negatives.negative_caption(index)
        if self.tokenizer is not None:
            generator = keyed_numpy_generator(self.seed, epoch, index, DROPOUT)
            seed = int(generator.integers(2**62)) if self.dropout else None
            sample["text_tokens"] = self.tokenizer.encode([sample["caption"]], self.text_tokens, self.dropout, seed)[0]
        return sample


class ImageSource(CaptionedSource, Protocol):
    """Where images and captions come from; the same each time they are asked for."""

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 height width"], str]:
        """The image at its own size, and its caption."""
        ...


class CaptionedImageDataset(CaptionedDataset):
    """Images cropped to size; without augmentation an image is its middle square, resized."""

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


class ClipSource(CaptionedSource, Protocol):
    """Where clips and captions come from."""

    def clip(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """The clip and its caption; the generator chooses what part of a longer one is taken, None takes its middle."""
        ...


class CaptionedClipDataset(CaptionedDataset):
    """Clips of a source, cropped at random in training and in the middle elsewhere."""

    def __init__(self, source: ClipSource, *, random_cuts: bool = False, **captions: Any) -> None:
        super().__init__(source, **captions)
        self.source = source
        self.random_cuts = random_cuts

    def content(self, epoch: int, index: int) -> dict[str, Any]:
        """The clip and its caption."""
        generator = keyed_numpy_generator(self.seed, epoch, index, CROP) if self.random_cuts else None
        clip, caption = self.source.clip(index, generator)
        return {"video": torch.from_numpy(clip), "caption": caption}
