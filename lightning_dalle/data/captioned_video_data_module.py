"""What all captioned video sets share."""

import logging
from abc import abstractmethod
from collections import Counter
from typing import Any

from lightning_dalle.data.captioned_clip_dataset import CaptionedClipDataset, ClipSource
from lightning_dalle.data.captioned_data_module import CaptionedDataModule

logger = logging.getLogger(__name__)


class CaptionedVideoDataModule(CaptionedDataModule):
    """Batches `{"video": uint8 [B, 3, T, H, W], "caption": list of B strings, "text_tokens": int64 [B, L]}`.

    Args:
        frames: T, of every clip.
        height: H, in pixels.
        width: W, in pixels.
        settings: See `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
    """

    def __init__(self, *, frames: int = 8, height: int = 32, width: int = 32, **settings: Any) -> None:
        super().__init__(**settings)
        for name, value in (("frames", frames), ("height", height), ("width", width)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        self.frames = frames
        self.height = height
        self.width = width

    @abstractmethod
    def source(self, split: str) -> ClipSource:
        """Clips and captions of a split, `train` or `val` at least; made once, then the same object."""

    def dataset(self, split: str, *, training: bool = False) -> CaptionedClipDataset:
        """Clips of a split, cut at random places of longer ones in training only."""
        return CaptionedClipDataset(self.source(split), random_cuts=training, **self._caption_settings(training))

    def setup(self, stage: str | None = None) -> None:
        """Prepare the splits that a stage needs, and log before training what they hold."""
        super().setup(stage)
        if stage in (None, "fit"):
            logger.info("%s: %s", type(self).__name__, self.report())

    def skipped(self) -> Counter[str]:
        """How many clips were left out so far, by the reason."""
        return Counter()

    def report(self) -> str:
        """How many clips each split takes, and how many were left out and why."""
        splits = ("train", "val") if self.test_split == "val" else ("train", "val", self.test_split)
        taken = ", ".join(f"{len(self.source(split))} in {split}" for split in splits)
        skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped().items()))
        return f"clips: {taken}; left out: {skipped or 'none'}"
