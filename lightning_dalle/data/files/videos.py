"""A user's own captioned clips, from a folder or from WebDataset shards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.base import CaptionedDataModule, ClipBatches, check_clip_size
from lightning_dalle.data.datasets import CaptionedDataset, ClipTransform
from lightning_dalle.data.files.bucketing import MixedSizes, Size, TokenBuckets
from lightning_dalle.data.files.decoding import CLIP_SUFFIXES, ClipShape, clip_extent, decode_clip
from lightning_dalle.data.files.samples import Part
from lightning_dalle.data.files.scan import (
    BrokenFiles,
    CaptionedFile,
    FileScan,
    FilesSource,
    check_broken_share,
    existing_path,
)
from lightning_dalle.data.splits import check_val_share


class ClipFilesSource(FilesSource):
    """Clips in files.

    Args:
        clip_shape: What each is brought to.
        sizes: Sizes of the clips that are brought to another.
    """

    kind = "clip"

    def __init__(
        self,
        files: list[CaptionedFile],
        broken: BrokenFiles,
        clip_shape: ClipShape,
        sizes: Mapping[Part, Size] = MappingProxyType({}),
    ) -> None:
        super().__init__(files, broken)
        self.clip_shape = clip_shape
        self._sizes = sizes

    def size(self, index: int) -> Size:
        """Frames, height and width that a clip is brought to."""
        return self._size(self.files[index].content)

    def clip(
        self, index: int, generator: np.random.Generator | None
    ) -> tuple[UInt8[np.ndarray, "3 frames height width"], str]:
        """Clip and caption of one file.

        Raises:
            SampleError: too many files are broken.
        """
        frames, height, width = self.size(index)

        def decode(part: Part) -> np.ndarray:
            # What comes in place of a broken clip takes its size, and stands still at its end where it is shorter.
            own = min(frames, self._size(part)[0])
            shape = replace(self.clip_shape, frames=own, height=height, width=width)
            clip = decode_clip(part.read(), shape, generator)
            return np.pad(clip, ((0, 0), (0, frames - own), (0, 0), (0, 0)), mode="edge")

        return self.first_whole(index, decode)

    def _size(self, part: Part) -> Size:
        return self._sizes.get(part, self.clip_shape.size)


class CaptionedVideosDataModule(CaptionedDataModule):
    """Clips (.mp4, .webm, .mov, .mkv, .webp, .gif) with captions in .txt or in the entry `caption` of .json files.

    A clip and its caption have the same name. What cannot be used (a broken clip, no caption or an empty one, the rest
    of a damaged shard) is skipped, counted and logged with its name; clips that are too short are counted. Captions,
    lengths and sizes are checked at the start, which reads animated images whole, and pictures when they are decoded.
    Of each picture the middle is taken; clips are never mirrored, since captions speak of left and right.

    With `max_tokens` clips stay of several sizes: `frames`, `height` and `width` are then the largest, to which larger
    ones are made smaller in their own proportions and longer ones cropped; none is made larger. Clips are cropped to
    whole tokens, and a `video` is a list of clips, [3, T, H, W] each, that `VideoDiTModule` packs into one sequence.
    With `buckets` it is a tensor of clips of one bucket instead, the smallest that holds them, padded by their last
    frames, rows and columns, which are learned as well: for what cannot pack. Either way every clip that fits comes
    once in an epoch, on some rank; batches that do not divide among the ranks are left out, others in each epoch.

    Args:
        path: A folder of such files, subfolders included, or of .tar shards; or one shard.
        frames: Frames of every clip; height and width in pixels.
        frame_rate: Frames per second that are taken; a clip must last for `frames` of them, without `max_tokens`.
        max_tokens: Tokens of a batch at most, in place of `batch_size`; a clip with more is left out. None makes all
            clips one size.
        token_size: Frames, rows and columns that make a token: the network's `patch_size`, times the compression of an
            autoencoder.
        buckets: Sizes [frames, height, width] that clips are padded to.
        first_frame_alone: Pack clips of a frame more than whole tokens, as causal autoencoders take them.
        val_share: Share of the samples kept for validation, chosen by a hash of the name.
        max_broken_share: An unusable share above this is an error. A damaged shard counts as one sample.
        batch_size: As all that follow, see `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
        FileNotFoundError: there is nothing at `path`.
        ModuleNotFoundError: from `setup` on, if there are video files and the extra `video` is not installed.
        SampleError: from `setup` on, if there are no samples, or too many are unusable.
    """

    sample_name = "clips"

    def __init__(
        self,
        *,
        path: str | Path,
        frames: int = 8,
        height: int = 32,
        width: int = 32,
        frame_rate: float = 8.0,
        val_share: float = 0.05,
        max_broken_share: float = 0.05,
        max_tokens: int | None = None,
        token_size: Size = (1, 1, 1),
        buckets: Sequence[Size] | None = None,
        first_frame_alone: bool = False,
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            ClipTransform(),
            batch_size=batch_size,
            tokenizer=tokenizer,
            text_tokens=text_tokens,
            bpe_dropout=bpe_dropout,
            num_workers=num_workers,
            seed=seed,
        )
        self.frames, self.height, self.width = check_clip_size(frames, height, width)
        self.val_share = check_val_share(val_share)
        self.path = existing_path(path, "clip")
        if frame_rate <= 0:
            raise ValueError(f"frame_rate ({frame_rate}) must be above 0, such as 8 frames a second")
        self.clip_shape = ClipShape(self.frames, self.height, self.width, frame_rate)
        self.max_broken_share = check_broken_share(max_broken_share)
        if max_tokens is None and (buckets is not None or first_frame_alone or tuple(token_size) != (1, 1, 1)):
            raise ValueError(
                f"buckets ({buckets}), token_size {tuple(token_size)} and first_frame_alone ({first_frame_alone}) need "
                "max_tokens, which makes batches of clips of several sizes"
            )
        self._mixed = None
        if max_tokens is not None:
            self._mixed = MixedSizes(self.clip_shape, max_tokens, token_size, buckets, first_frame_alone)
        self._sizes: dict[Part, Size] = {}
        self._buckets: dict[tuple[str, bool], TokenBuckets] = {}
        self._scan: FileScan | None = None

    def skipped(self) -> Counter[str]:
        """Return how many clips were left out so far, by the reason; those that are found broken later are added."""
        return Counter() if self._scan is None else self._scan.skipped()

    def report(self) -> str:
        """Return how many clips each split takes, how many were left out and why; of several sizes, how many of each.

        Raises:
            ValueError: of several sizes, no batch is left of a split.
        """
        if self._mixed is None:
            return super().report()
        batches = {split: self._token_buckets(split, training=split == "train") for split in ("train", "val")}
        lines = [f"{split}, {line}" for split, each in batches.items() for line in each.report().splitlines()]
        return "\n".join([super().report(), *lines])

    def load_sources(self, split: str) -> dict[str, ClipFilesSource]:
        """Find the clips of both splits."""
        self._scan = FileScan(self.path, "clip", CLIP_SUFFIXES, self._rejects, self.max_broken_share)
        return self._scan.splits(
            lambda files, broken: ClipFilesSource(list(files), broken, self.clip_shape, self._sizes), self.val_share
        )

    def _samples(self, split: str, training: bool = False) -> tuple[CaptionedDataset[Any] | ClipBatches, int | None]:
        if self._mixed is None:
            return super()._samples(split, training)
        return ClipBatches(self.dataset(split, training=training), self._token_buckets(split, training)), None

    def _token_buckets(self, split: str, training: bool) -> TokenBuckets:
        # Made once for the report and the loader.
        if (split, training) not in self._buckets:
            assert self._mixed is not None
            source: ClipFilesSource = self.source(split)
            sizes = [source.size(index) for index in range(len(source))]
            self._buckets[split, training] = self._mixed.batches(sizes, self.seed, shuffle=training)
        return self._buckets[split, training]

    def _rejects(self, part: Part, caption: str) -> str | None:
        """Return why a clip is left out, if it is. Raises OSError if it is broken."""
        extent = clip_extent(part.read())
        if self._mixed is None:
            return "too short" if extent.seconds <= self.clip_shape.seconds else None
        size = self._mixed.size_of(extent)
        if size is None:
            return "less than a token"
        self._sizes[part] = size
        return None
