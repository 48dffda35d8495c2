"""What all captioned image sets share."""

from abc import abstractmethod
from typing import Any, Literal

from lightning_dalle.data.augmentation import augmentation_named
from lightning_dalle.data.captioned_data_module import CaptionedDataModule
from lightning_dalle.data.captioned_image_dataset import CaptionedImageDataset, ImageSource

AugmentationName = Literal["none", "discrete_vae", "text_to_image"]


class CaptionedImageDataModule(CaptionedDataModule):
    """Batches `{"image": uint8 [B, 3, S, S], "caption": list of B strings, "text_tokens": int64 [B, T]}`.

    Args:
        image_size: Side of the images in pixels.
        augmentation: Of training images; `discrete_vae` and `text_to_image` are the paper's listings 1 and 2.
        settings: See `CaptionedDataModule`.

    Raises:
        ValueError: a setting is out of its range; the message names it.
    """

    def __init__(self, *, image_size: int, augmentation: AugmentationName = "none", **settings: Any) -> None:
        super().__init__(**settings)
        if image_size < 1:
            raise ValueError(f"image_size ({image_size}) must be at least 1")
        self.image_size = image_size
        self.augmentation = augmentation_named(augmentation)

    @abstractmethod
    def source(self, split: str) -> ImageSource:
        """Images and captions of a split, `train` or `val` at least; made once, then the same object."""

    def dataset(self, split: str, *, training: bool = False) -> CaptionedImageDataset:
        """Images of a split, augmented in training only."""
        return CaptionedImageDataset(
            self.source(split),
            self.image_size,
            augmentation=self.augmentation if training else None,
            **self._caption_settings(training),
        )
