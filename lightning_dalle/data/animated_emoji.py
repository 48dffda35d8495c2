"""Animated emoji with their Unicode names as captions: small, real captioned video."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.animated_emoji_archive import fetch_animated_emoji, load_animated_emoji
from lightning_dalle.data.captioned_video_data_module import CaptionedVideoDataModule
from lightning_dalle.data.name_split_data_module import NameSplitDataModule
from lightning_dalle.data.split_by_name import split_indices


class ClipArraySource:
    """Clips held in memory."""

    def __init__(self, clips: UInt8[np.ndarray, "clips 3 frames height width"], captions: list[str]) -> None:
        self.clips = clips
        self.captions = captions

    def __len__(self) -> int:
        return len(self.captions)

    def caption(self, index: int) -> str:
        """The caption of one clip."""
        return self.captions[index]

    def clip(
        self, index: int, generator: np.random.Generator | None = None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """One clip and its caption; the generator has no choice to make."""
        return self.clips[index], self.captions[index]


class AnimatedEmoji(NameSplitDataModule, CaptionedVideoDataModule):
    """Fluent emoji that move and have a name, each one turn of its loop, on white.

    By Microsoft, packaged by LobeHub, MIT: show `animated_emoji_archive.ATTRIBUTION` with them. They are fetched once
    by `lightning-dalle fetch animated-emoji` (165 MB, with npm), or by `prepare_data`.

    Splits are `train`, `val`, and `all`, both together in the order of code points.

    Args:
        val_share: Share of the emoji kept for validation, chosen by a hash of the name.
        cache: Folder of the archive and of the decoded clips; `LIGHTNING_DALLE_CACHE` or the user's cache folder if
            None.
        settings: See `CaptionedVideoDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
        FileNotFoundError: from `setup` on, if the archive was not fetched.
    """

    def __init__(self, *, val_share: float = 0.05, cache: str | Path | None = None, **settings: Any) -> None:
        super().__init__(val_share=val_share, **settings)
        if self.frames < 2:
            raise ValueError(f"frames ({self.frames}) must be at least 2: one frame does not move")
        self.cache = cache
        self._skipped: Counter[str] = Counter()

    def prepare_data(self) -> None:
        """Fetch and decode them once per machine."""
        fetch_animated_emoji(self.cache)
        load_animated_emoji(self.frames, self.height, self.width, self.cache)

    def skipped(self) -> Counter[str]:
        """How many emoji of the package were left out, by the reason."""
        return Counter(self._skipped)

    def _load(self) -> dict[str, ClipArraySource]:
        emoji = load_animated_emoji(self.frames, self.height, self.width, self.cache)
        self._skipped = emoji.skipped
        return {
            split: ClipArraySource(emoji.clips[indices], [emoji.captions[index] for index in indices])
            for split, indices in split_indices(emoji.captions, self.val_share).items()
        }
