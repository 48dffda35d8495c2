"""The paper's two augmentations of training images (listings 1 and 2), and what stands in for none.

All take an RGB image of any size and give a square one. The generator is the only source of chance.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
from jaxtyping import UInt8

Image = UInt8[np.ndarray, "3 height width"]
Augmentation = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def _coverage(source: int, target: int) -> np.ndarray:
    """Weights [target, source]: how much each source pixel lies within each target pixel, rows summing to 1."""
    edges = np.arange(target + 1) * (source / target)
    low, high = edges[:-1, None], edges[1:, None]
    pixels = np.arange(source)
    overlap = np.minimum(high, pixels + 1) - np.maximum(low, pixels)
    return (np.clip(overlap, 0, None) * (target / source)).astype(np.float32)


def area_resize(image: UInt8[np.ndarray, "3 height width"], size: int) -> UInt8[np.ndarray, "3 size size"]:
    """Resize so that each new pixel is the mean of the area it covers, fractions of pixels included.

    Enlarging by it repeats pixels, as TensorFlow's area resize does. The listings also align corners, which moves edges
    by less than a pixel and is left out.
    """
    return _area_resize(image, (size, size))


def _area_resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if image.shape[1:] == size:
        return image
    rows, columns = (_coverage(*lengths) for lengths in zip(image.shape[1:], size, strict=True))
    resized = rows @ image.astype(np.float32) @ columns.T
    return np.rint(np.clip(resized, 0, 255)).astype(np.uint8)


def _crop(image: np.ndarray, top: int, left: int, size: int) -> np.ndarray:
    return image[:, top : top + size, left : left + size]


def middle_window(
    image: UInt8[np.ndarray, "3 height width"], size: tuple[int, int]
) -> UInt8[np.ndarray, "3 new_height new_width"]:
    """Return the largest window in the middle that has the proportions of (height, width), resized to it."""
    scale = min(length / wanted for length, wanted in zip(image.shape[1:], size, strict=True))
    cropped = [round(scale * wanted) for wanted in size]
    top, left = ((length - kept) // 2 for length, kept in zip(image.shape[1:], cropped, strict=True))
    return np.ascontiguousarray(_area_resize(image[:, top : top + cropped[0], left : left + cropped[1]], size))


def _random_crop(image: np.ndarray, size: int, generator: np.random.Generator) -> np.ndarray:
    top = int(generator.integers(image.shape[1] - size + 1))
    left = int(generator.integers(image.shape[2] - size + 1))
    return _crop(image, top, left, size)


def _resize_and_crop(
    image: np.ndarray, bounds: tuple[int, int], target_size: int, generator: np.random.Generator
) -> np.ndarray:
    """Resize a square image to a random size within the bounds, never below the target, and crop the target from it."""
    low, high = (max(bound, target_size) for bound in bounds)
    size = int(generator.integers(low, high + 1))
    return _random_crop(area_resize(image, size), target_size, generator)


def discrete_vae_augmentation(
    image: Image, target_size: int, generator: np.random.Generator, flip: bool = True
) -> UInt8[np.ndarray, "3 target_size target_size"]:
    """Listing 1: random square, resized to between 9/8 and 12/8 of the target if it is as large, random crop, flip.

    Args:
        flip: Mirror half of the images; the sources leave open whether the paper's run did.
    """
    side = min(image.shape[1:])
    image = _random_crop(image, side, generator)
    bounds = min(side, round(9 / 8 * target_size)), min(side, round(12 / 8 * target_size))
    image = _resize_and_crop(image, bounds, target_size, generator)
    if flip and generator.random() < 0.5:
        image = image[:, :, ::-1]
    return np.ascontiguousarray(image)


def text_to_image_augmentation(
    image: Image, target_size: int, generator: np.random.Generator
) -> UInt8[np.ndarray, "3 target_size target_size"]:
    """Listing 2: a square from the middle quarter of its range, resized to at most 9/8 of the target, random crop.

    Never mirrored, since captions speak of left and right.
    """
    side = min(image.shape[1:])
    top, left = (_middle_offset(length - side, generator) for length in image.shape[1:])
    image = _crop(image, top, left, side)
    bounds = target_size, min(side, round(9 / 8 * target_size))
    return np.ascontiguousarray(_resize_and_crop(image, bounds, target_size, generator))


def _middle_offset(slack: int, generator: np.random.Generator) -> int:
    """Uniform in [3/8, 5/8) of the slack."""
    low = 3 * slack // 8
    return int(generator.integers(low, max(low + 1, 5 * slack // 8)))


def middle_square(image: Image, target_size: int) -> UInt8[np.ndarray, "3 target_size target_size"]:
    """Return the square in the middle, resized to the target: what validation sees."""
    return middle_window(image, (target_size, target_size))


AugmentationName = Literal["none", "discrete_vae", "text_to_image"]
AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "discrete_vae": discrete_vae_augmentation,
    "text_to_image": text_to_image_augmentation,
}


def augmentation_named(name: str) -> Augmentation | None:
    """Return the augmentation of that name, None for `none`.

    Raises:
        ValueError: there is none.
    """
    if name not in AUGMENTATIONS:
        raise ValueError(f"augmentation ({name!r}) must be one of {', '.join(AUGMENTATIONS)}")
    return AUGMENTATIONS[name]
