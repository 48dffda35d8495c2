"""One sample of a captioned set, as a function of (seed, epoch, index)."""

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset

from lightning_dalle.data.keyed_random import keyed_numpy_generator
from lightning_dalle.data.tokenizer import CaptionTokenizer

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
