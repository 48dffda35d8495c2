"""OpenMoji: some 1,900 drawings with their Unicode names as captions, the embedded default of real captioned images."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from lightning_dalle.data.captioned_image_data_module import CaptionedImageDataModule
from lightning_dalle.data.name_split_data_module import NameSplitDataModule
from lightning_dalle.data.open_moji_pictures import load_open_moji
from lightning_dalle.data.split_by_name import split_indices


class ArraySource:
    """Images held in memory."""

    def __init__(self, images: UInt8[np.ndarray, "images 3 height width"], captions: list[str]) -> None:
        self.images = images
        self.captions = captions

    def __len__(self) -> int:
        return len(self.captions)

    def caption(self, index: int) -> str:
        """The caption of one image."""
        return self.captions[index]

    def sample(self, index: int) -> tuple[UInt8[np.ndarray, "3 height width"], str]:
        """One image and its caption."""
        return self.images[index], self.captions[index]


class OpenMoji(NameSplitDataModule, CaptionedImageDataModule):
    """Emoji without skin tones, on white. By OpenMoji, CC BY-SA 4.0: show `open_moji_pictures.ATTRIBUTION` with them.

    Splits are `train`, `val`, and `all`, both together in the order of code points.

    Args:
        render_size: Side at which they are drawn; `image_size` if None. A larger one gives augmentation room to crop.
        val_share: Share of the emoji kept for validation, chosen by a hash of the name.
        cache: Folder for the drawn pictures; `LIGHTNING_DALLE_CACHE` or the user's cache folder if None.
        settings: See `CaptionedImageDataModule`.

    Raises:
        ModuleNotFoundError: the extra `quickstart` is not installed.
        ValueError: a setting is out of its range; the message names it.
    """

    def __init__(
        self,
        *,
        image_size: int = 64,
        render_size: int | None = None,
        val_share: float = 0.05,
        cache: str | Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(image_size=image_size, val_share=val_share, **settings)
        self.render_size = render_size or image_size
        self.cache = cache

    def prepare_data(self) -> None:
        """Draw them once per machine."""
        load_open_moji(self.render_size, self.cache)

    def _load(self) -> dict[str, ArraySource]:
        images, captions = load_open_moji(self.render_size, self.cache)
        return {
            split: ArraySource(images[indices], [captions[index] for index in indices])
            for split, indices in split_indices(captions, self.val_share).items()
        }
