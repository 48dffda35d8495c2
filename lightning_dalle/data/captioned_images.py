"""A user's own captioned images, from a folder or from WebDataset shards."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_dalle.data.caption_filters import rejects_caption, rejects_size
from lightning_dalle.data.captioned_image_data_module import CaptionedImageDataModule
from lightning_dalle.data.files_source import BrokenFiles, CaptionedFile, FilesSource
from lightning_dalle.data.image_decoding import image_size
from lightning_dalle.data.name_split_data_module import NameSplitDataModule
from lightning_dalle.data.sample_files import Part, Sample, SampleError, folder_samples, shard_samples
from lightning_dalle.data.split_by_name import validation_mask

# Headers are read from this many bytes, so that scanning shards does not read all of them.
_HEADER_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class CaptionedImages(NameSplitDataModule, CaptionedImageDataModule):
    """Images (.jpg, .png, .webp) with captions in .txt or in the entry `caption` of .json files of the same name.

    What cannot be used (a broken image, no caption or an empty one, the rest of a damaged shard) is skipped, counted
    and logged with its name. Headers and captions are checked at the start, pixels when they are decoded.

    Args:
        path: A folder of such files, subfolders included, or of .tar shards as img2dataset writes them; or one shard.
        val_share: Share of the samples kept for validation, chosen by a hash of the name.
        max_broken_share: An unusable share above this is an error. A damaged shard counts as one sample.
        filter_captions: Leave out short, foreign and boilerplate captions, as the paper does.
        max_aspect_ratio: Leave out images whose longer side exceeds the shorter by more; the paper's is 2.
        settings: See `CaptionedImageDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
        FileNotFoundError: there is nothing at `path`.
        SampleError: from `setup` on, if there are no samples, or too many are unusable.
    """

    def __init__(
        self,
        *,
        path: str | Path,
        image_size: int = 256,
        val_share: float = 0.05,
        max_broken_share: float = 0.05,
        filter_captions: bool = False,
        max_aspect_ratio: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(image_size=image_size, val_share=val_share, **settings)
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"path ({str(path)!r}) does not exist; give a folder of images or a .tar shard")
        if not 0 <= max_broken_share <= 1:
            raise ValueError(f"max_broken_share ({max_broken_share}) must be between 0 and 1")
        if max_aspect_ratio is not None and max_aspect_ratio < 1:
            raise ValueError(f"max_aspect_ratio ({max_aspect_ratio}) must be at least 1; the paper's is 2")
        self.max_broken_share = max_broken_share
        self.filter_captions = filter_captions
        self.max_aspect_ratio = max_aspect_ratio
        self.num_filtered: Counter[str] = Counter()

    def _load(self) -> dict[str, FilesSource]:
        broken = BrokenFiles(self.path, self.max_broken_share)
        files = list(self._usable(broken))
        num_skipped = len(broken.problems)
        broken.check(total=len(files) + num_skipped)
        if len(files) < 2:
            raise SampleError(
                f"path ({str(self.path)!r}) holds {len(files)} usable captioned images, at least 2 are needed "
                f"({num_skipped} unusable, {self.num_filtered.total()} filtered out); each image needs a .txt or .json "
                "of the same name beside it"
            )
        logger.info(
            "%s: %d images, %d skipped, filtered %s", self.path, len(files), num_skipped, dict(self.num_filtered)
        )
        validation = validation_mask([file.name for file in files], self.val_share)
        return {
            split: FilesSource([files[index] for index in np.flatnonzero(chosen)], broken)
            for split, chosen in (("train", ~validation), ("val", validation))
        }

    def _samples(self, broken: BrokenFiles) -> Iterator[Sample]:
        shards = [self.path] if self.path.is_file() else sorted(self.path.glob("*.tar"))
        for shard in shards:
            yield from shard_samples(shard, broken.add)
        if not shards:
            yield from folder_samples(self.path)

    def _usable(self, broken: BrokenFiles) -> Iterator[CaptionedFile]:
        """What can be used; what cannot is added to `broken`, what is filtered out counted."""
        for sample in self._samples(broken):
            try:
                reason, file = self._check(sample)
            except SampleError as error:
                broken.add(str(error))
                continue
            if reason is None:
                yield file
            else:
                self.num_filtered[reason] += 1

    def _check(self, sample: Sample) -> tuple[str | None, CaptionedFile]:
        """Why a sample is filtered out, if it is, and the sample. Raises SampleError if it is unusable."""
        part = sample.image
        assert part is not None
        caption = sample.read_caption()
        try:
            size = _header_size(part)
        except OSError as error:
            raise SampleError(f"{sample.name}: the image cannot be read ({error})") from error
        reason = rejects_caption(caption) if self.filter_captions else None
        if self.max_aspect_ratio is not None and rejects_size(size, self.max_aspect_ratio):
            reason = "aspect ratio"
        return reason, CaptionedFile(sample.name, part, caption)


def _header_size(part: Part) -> tuple[int, int]:
    try:
        return image_size(part.read_start(_HEADER_BYTES))
    except OSError:
        return image_size(part.read())
