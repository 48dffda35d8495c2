"""A user's own captioned images, from a folder or from WebDataset shards."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.base import CaptionedImageDataModule, NameSplitDataModule
from lightning_dalle.data.files.decoding import IMAGE_SUFFIXES, decode_image, image_size
from lightning_dalle.data.files.samples import Part, rejects_caption, rejects_size
from lightning_dalle.data.files.scan import FileScan, FilesSource, check_broken_share, existing_path

# Headers are read from this many bytes, so that scanning shards does not read all of them.
_HEADER_BYTES = 1 << 16


class ImageFilesSource(FilesSource):
    """Images in files."""

    kind = "image"

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 height width"], str]:
        """Image and caption of one file.

        Raises:
            SampleError: too many files are broken.
        """
        return self.first_whole(index, lambda part: decode_image(part.read()))


class CaptionedImagesDataModule(NameSplitDataModule, CaptionedImageDataModule):
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
        self.path = existing_path(path, "image")
        if max_aspect_ratio is not None and max_aspect_ratio < 1:
            raise ValueError(f"max_aspect_ratio ({max_aspect_ratio}) must be at least 1; the paper's is 2")
        self.max_broken_share = check_broken_share(max_broken_share)
        self.filter_captions = filter_captions
        self.max_aspect_ratio = max_aspect_ratio
        self.num_filtered: Counter[str] = Counter()

    def _load(self) -> dict[str, ImageFilesSource]:
        scan = FileScan(self.path, "image", IMAGE_SUFFIXES, self._rejects, self.max_broken_share)
        self.num_filtered = scan.filtered
        return scan.splits(ImageFilesSource, self.val_share)

    def _rejects(self, part: Part, caption: str) -> str | None:
        """Why a sample is filtered out, if it is. Raises OSError if the image is broken."""
        size = _header_size(part)
        if self.max_aspect_ratio is not None and rejects_size(size, self.max_aspect_ratio):
            return "aspect ratio"
        return rejects_caption(caption) if self.filter_captions else None


def _header_size(part: Part) -> tuple[int, int]:
    try:
        return image_size(part.read_start(_HEADER_BYTES))
    except OSError:
        return image_size(part.read())
