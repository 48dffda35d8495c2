"""A user's own captioned images, from a folder or from WebDataset shards."""

from collections import Counter
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.augmentation import AugmentationName
from lightning_dalle.data.base import CaptionedDataModule
from lightning_dalle.data.datasets import ImageTransform
from lightning_dalle.data.files.decoding import IMAGE_SUFFIXES, decode_image, image_size
from lightning_dalle.data.files.samples import Part, rejects_caption, rejects_size
from lightning_dalle.data.files.scan import FileScan, FilesSource, check_broken_share, existing_path
from lightning_dalle.data.splits import check_val_share

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


class CaptionedImagesDataModule(CaptionedDataModule):
    """Images (.jpg, .png, .webp) with captions in .txt or in the entry `caption` of .json files of the same name.

    What cannot be used (a broken image, no caption or an empty one, the rest of a damaged shard) is skipped, counted
    and logged with its name. Headers and captions are checked at the start, pixels when they are decoded.

    Args:
        path: A folder of such files, subfolders included, or of .tar shards as img2dataset writes them; or one shard.
        image_size: Side of the images in pixels.
        val_share: Share of the samples kept for validation, chosen by a hash of the name.
        max_broken_share: An unusable share above this is an error. A damaged shard counts as one sample.
        filter_captions: Leave out short, foreign and boilerplate captions, as the paper does.
        max_aspect_ratio: Leave out images whose longer side exceeds the shorter by more; the paper's is 2.
        augmentation: Augmentation of training images; see `ImageTransform`.
        batch_size: As all that follow, see `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
        FileNotFoundError: there is nothing at `path`.
        SampleError: from `setup` on, if there are no samples, or too many are unusable.
    """

    sample_name = "images"

    def __init__(
        self,
        *,
        path: str | Path,
        image_size: int = 256,
        val_share: float = 0.05,
        max_broken_share: float = 0.05,
        filter_captions: bool = False,
        max_aspect_ratio: float | None = None,
        augmentation: AugmentationName = "none",
        batch_size: int = 64,
        tokenizer: str | Path | None = None,
        text_tokens: int = 256,
        bpe_dropout: float = 0.1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            ImageTransform(image_size, augmentation),
            batch_size=batch_size,
            tokenizer=tokenizer,
            text_tokens=text_tokens,
            bpe_dropout=bpe_dropout,
            num_workers=num_workers,
            seed=seed,
        )
        self.image_size = image_size
        self.val_share = check_val_share(val_share)
        self.path = existing_path(path, "image")
        if max_aspect_ratio is not None and max_aspect_ratio < 1:
            raise ValueError(f"max_aspect_ratio ({max_aspect_ratio}) must be at least 1; the paper's is 2")
        self.max_broken_share = check_broken_share(max_broken_share)
        self.filter_captions = filter_captions
        self.max_aspect_ratio = max_aspect_ratio
        self._scan: FileScan | None = None

    def skipped(self) -> Counter[str]:
        """Return how many images were left out so far, by the reason; those that are found broken later are added."""
        return Counter() if self._scan is None else self._scan.skipped()

    def load_sources(self, split: str) -> dict[str, ImageFilesSource]:
        """Find the images of both splits."""
        self._scan = FileScan(self.path, "image", IMAGE_SUFFIXES, self._rejects, self.max_broken_share)
        return self._scan.splits(ImageFilesSource, self.val_share)

    def _rejects(self, part: Part, caption: str) -> str | None:
        """Return why a sample is filtered out, if it is. Raises OSError if the image is broken."""
        size = _header_size(part)
        if self.max_aspect_ratio is not None and rejects_size(size, self.max_aspect_ratio):
            return "aspect ratio"
        return rejects_caption(caption) if self.filter_captions else None


def _header_size(part: Part) -> tuple[int, int]:
    try:
        return image_size(part.read_start(_HEADER_BYTES))
    except OSError:
        return image_size(part.read())
