"""Captioned samples: a source says what they are, a transform what becomes of them."""

from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import UInt8
from torch.utils.data import Dataset

from lightning_dalle.data.augmentation import augmentation_named, middle_square
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.ops.random import keyed_numpy_generator

CROP, DROPOUT = 0, 1
"""Purposes of randomness, the last number of its key."""


class CaptionedSource(Protocol):
    """What is described, and by which captions; the same each time it is asked for."""

    def __len__(self) -> int: ...

    def caption(self, index: int) -> str:
        """Return the caption alone."""
        ...


@runtime_checkable
class NegativeCaptionSource(Protocol):
    """A source that knows what a sample nearly shows."""

    def negative_caption(self, index: int) -> str:
        """Return a text that differs little from the caption and is wrong, for contrastive training."""
        ...


class ImageSource(CaptionedSource, Protocol):
    """Where images and captions come from; the same each time they are asked for."""

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 height width"], str]:
        """Return the image at its own size, and its caption."""
        ...


class ClipSource(CaptionedSource, Protocol):
    """Where clips and captions come from."""

    def clip(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """Return the clip and its caption; the generator chooses the part of a longer one, None takes its middle."""
        ...


Source = TypeVar("Source", bound=CaptionedSource, contravariant=True)


class Transform(Protocol[Source]):
    """What becomes of a sample of a source: a mapping with a `caption`, and what it describes."""

    @property
    def is_random(self) -> bool:
        """Whether it makes use of a generator, which takes longer to make than a small picture to draw."""
        ...

    def __call__(self, source: Source, index: int, generator: np.random.Generator | None) -> dict[str, Any]:
        """Return the sample; without a generator, which is that of training, nothing is random."""
        ...


class ImageTransform:
    """Images cropped to squares: the middle of each, or in training what an augmentation takes.

    Args:
        image_size: Side of the squares in pixels.
        augmentation: Name of an augmentation; `discrete_vae` and `text_to_image` are the paper's listings 1 and 2.

    Raises:
        ValueError: If the size is below 1, or there is no such augmentation.
    """

    def __init__(self, image_size: int, augmentation: str = "none") -> None:
        if image_size < 1:
            raise ValueError(f"image_size ({image_size}) must be at least 1")
        self.image_size = image_size
        self.augmentation = augmentation_named(augmentation)

    @property
    def is_random(self) -> bool:
        """Whether there is an augmentation."""
        return self.augmentation is not None

    def __call__(self, source: ImageSource, index: int, generator: np.random.Generator | None) -> dict[str, Any]:
        """Return `image`, uint8 [3, S, S], and `caption`."""
        image, caption = source.sample(index)
        if generator is None or self.augmentation is None:
            image = middle_square(image, self.image_size)
        else:
            image = self.augmentation(image, self.image_size, generator)
        return {"image": torch.from_numpy(image), "caption": caption}


class ClipTransform:
    """Clips as their source gives them, cropped at random from longer ones in training."""

    is_random = True

    def __call__(self, source: ClipSource, index: int, generator: np.random.Generator | None) -> dict[str, Any]:
        """Return `video`, uint8 [3, T, H, W], and `caption`."""
        clip, caption = source.clip(index, generator)
        return {"video": torch.from_numpy(clip), "caption": caption}


class CaptionedDataset(Dataset, Generic[Source]):
    """Samples of a source, transformed, with caption ids if there is a tokenizer, and wrong captions if there are such.

    Indexed by (epoch, index), or by an index alone outside of training.

    Args:
        training: Whether the transform may be random.
        bpe_dropout: Share of merges that the tokenizer skips.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform[Source],
        *,
        training: bool = False,
        seed: int = 0,
        tokenizer: CaptionTokenizer | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.0,
    ) -> None:
        self.source = source
        self.transform = transform
        self.training = training
        self.seed = seed
        self.tokenizer = tokenizer
        self.text_tokens = text_tokens
        self.bpe_dropout = bpe_dropout
        self._length = len(source)
        negatives: object = source
        self._negatives = negatives if isinstance(negatives, NegativeCaptionSource) else None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        is_random = self.training and self.transform.is_random
        generator = keyed_numpy_generator(self.seed, epoch, index, CROP) if is_random else None
        sample = self.transform(self.source, index, generator)
        if self._negatives is not None:
            sample["negative_caption"] = self._negatives.negative_caption(index)
        if self.tokenizer is not None:
            seed = None
            if self.bpe_dropout:
                seed = int(keyed_numpy_generator(self.seed, epoch, index, DROPOUT).integers(2**62))
            (ids,) = self.tokenizer.encode([sample["caption"]], self.text_tokens, self.bpe_dropout, seed)
            sample["text_tokens"] = ids
        return sample
