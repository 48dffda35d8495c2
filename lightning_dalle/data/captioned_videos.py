"""A user's own captioned clips, from a folder or from WebDataset shards."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.captioned_video_data_module import CaptionedVideoDataModule
from lightning_dalle.data.clip_decoding import CLIP_SUFFIXES, ClipShape, clip_seconds, decode_clip
from lightning_dalle.data.file_scan import FileScan, check_broken_share, existing_path
from lightning_dalle.data.files_source import BrokenFiles, CaptionedFile, FilesSource
from lightning_dalle.data.name_split_data_module import NameSplitDataModule
from lightning_dalle.data.sample_files import Part


class ClipFilesSource(FilesSource):
    """Clips in files."""

    kind = "clip"

    def __init__(self, files: list[CaptionedFile], broken: BrokenFiles, clip_shape: ClipShape) -> None:
        super().__init__(files, broken)
        self.clip_shape = clip_shape

    def clip(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """Clip and caption of one file.

        Raises:
            SampleError: too many files are broken.
        """
        return self.first_whole(index, lambda part: decode_clip(part.read(), self.clip_shape, generator))


class CaptionedVideos(NameSplitDataModule, CaptionedVideoDataModule):
    """Clips (.mp4, .webm, .mov, .mkv, .webp, .gif) with captions in .txt or in the entry `caption` of .json files.

    A clip and its caption have the same name. What cannot be used (a broken clip, no caption or an empty one, the rest
    of a damaged shard) is skipped, counted and logged with its name; clips that are too short are counted. Captions
    and lengths are checked at the start, which reads animated images whole, and pictures when they are decoded. Of
    each picture the middle is taken; clips are never mirrored, since captions speak of left and right.

    Args:
        path: A folder of such files, subfolders included, or of .tar shards; or one shard.
        frame_rate: Frames per second that are taken; a clip must last for `frames` of them.
        val_share: Share of the samples kept for validation, chosen by a hash of the name.
        max_broken_share: An unusable share above this is an error. A damaged shard counts as one sample.
        settings: See `CaptionedVideoDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
        FileNotFoundError: there is nothing at `path`.
        ModuleNotFoundError: from `setup` on, if there are video files and the extra `video` is not installed.
        SampleError: from `setup` on, if there are no samples, or too many are unusable.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        frame_rate: float = 8.0,
        val_share: float = 0.05,
        max_broken_share: float = 0.05,
        **settings: Any,
    ) -> None:
        super().__init__(val_share=val_share, **settings)
        self.path = existing_path(path, "clip")
        if frame_rate <= 0:
            raise ValueError(f"frame_rate ({frame_rate}) must be above 0, such as 8 frames a second")
        self.clip_shape = ClipShape(self.frames, self.height, self.width, frame_rate)
        self.max_broken_share = check_broken_share(max_broken_share)
        self._scan: FileScan | None = None

    def skipped(self) -> Counter[str]:
        """How many clips were left out so far, by the reason; those that are found broken later are added."""
        if self._scan is None:
            return Counter()
        unusable = len(self._scan.broken.problems)
        return self._scan.filtered + Counter({"unusable": unusable})

    def _load(self) -> dict[str, ClipFilesSource]:
        self._scan = FileScan(self.path, "clip", CLIP_SUFFIXES, self._rejects, self.max_broken_share)
        return self._scan.splits(
            lambda files, broken: ClipFilesSource(list(files), broken, self.clip_shape), self.val_share
        )

    def _rejects(self, part: Part, caption: str) -> str | None:
        """Why a clip is left out, if it is. Raises OSError if it is broken."""
        return "too short" if clip_seconds(part.read()) <= self.clip_shape.seconds else None
