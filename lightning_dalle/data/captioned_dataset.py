"""One sample of a captioned image set, as a function of (seed, epoch, index)."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import UInt8
from torch.utils.data import Dataset

from lightning_dalle.data.augmentation import Augmentation, middle_square
from lightning_dalle.data.keyed_random import keyed_numpy_generator
from lightning_dalle.data.tokenizer import CaptionTokenizer

_CROP, _DROPOUT = 0, 1


class CaptionedSource(Protocol):
    """Where images and captions come from; the same each time they are asked for."""

    def __len__(self) -> int: ...

    def caption(self, index: int) -> str:
        """The caption alone."""
        ...

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 height width"], str]:
        """The image at its own size, and its caption."""
        ...


@runtime_checkable
class NegativeCaptionSource(Protocol):
    """A source that knows what a picture nearly shows."""

    def negative_caption(self, index: int) -> str:
        """A text that differs little from the caption and is wrong, for contrastive training."""
        ...


class CaptionedDataset(Dataset):
    """Images cut to size, captions, and their ids if there is a tokenizer; wrong captions if the source has them.

    Without augmentation an image is its middle square, resized.
    Indexed by (epoch, index), or by an index alone outside of training.
    """

    def __init__(
        self,
        source: CaptionedSource,
        image_size: int,
        *,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        tokenizer: CaptionTokenizer | None = None,
        text_tokens: int = 256,
        dropout: float = 0.0,
    ) -> None:
        self.source = source
        self.image_size = image_size
        self.seed = seed
        self.augmentation = augmentation
        self.tokenizer = tokenizer
        self.text_tokens = text_tokens
        self.dropout = dropout

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        image, caption = self.source.sample(index)
        if self.augmentation is None:
            image = middle_square(image, self.image_size)
        else:
            image = self.augmentation(image, self.image_size, keyed_numpy_generator(self.seed, epoch, index, _CROP))
        sample = {"image": torch.from_numpy(image), "caption": caption}
        if isinstance(self.source, NegativeCaptionSource):
            sample["negative_caption"] = self.source.negative_caption(index)
        if self.tokenizer is not None:
            seed = (
                int(keyed_numpy_generator(self.seed, epoch, index, _DROPOUT).integers(2**62)) if self.dropout else None
            )
            sample["text_tokens"] = self.tokenizer.encode([caption], self.text_tokens, self.dropout, seed)[0]
        return sample
