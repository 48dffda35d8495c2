"""Captioned clips, each of the same number of frames, height and width."""

from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import UInt8

from lightning_dalle.data.captioned_dataset import CROP, CaptionedDataset, CaptionedSource
from lightning_dalle.data.keyed_random import keyed_numpy_generator


class ClipSource(CaptionedSource, Protocol):
    """Where clips and captions come from."""

    def clip(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """The clip and its caption; the generator chooses where a longer one is cut, None takes its middle."""
        ...


class CaptionedClipDataset(CaptionedDataset):
    """Clips of a source, cut at random in training and in the middle elsewhere."""

    def __init__(self, source: ClipSource, *, random_cuts: bool = False, **captions: Any) -> None:
        super().__init__(source, **captions)
        self.source = source
        self.random_cuts = random_cuts

    def content(self, epoch: int, index: int) -> dict[str, Any]:
        """The clip and its caption."""
        generator = keyed_numpy_generator(self.seed, epoch, index, CROP) if self.random_cuts else None
        clip, caption = self.source.clip(index, generator)
        return {"video": torch.from_numpy(clip), "caption": caption}
