"""Image files as RGB arrays."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def image_size(content: bytes) -> tuple[int, int]:
    """Width and height, from the header alone.

    Raises:
        OSError: the header is not that of an image.
    """
    with opened_image(content) as image:
        return image.size


def decode_image(content: bytes) -> UInt8[np.ndarray, "3 height width"]:
    """The upright image; transparent parts are white, of an animation the first frame is taken.

    Raises:
        OSError: the image is broken, truncated, or so large that it may be an attack on the memory.
    """
    with opened_image(content) as opened:
        return as_rgb(ImageOps.exif_transpose(opened))


def as_rgb(image: Image.Image) -> UInt8[np.ndarray, "3 height width"]:
    """The pixels of an opened image, transparent parts in white."""
    if "A" in image.getbands() or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    elif image.mode.startswith("I"):  # 16-bit grey, which a conversion would clip
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    return np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1))


@contextmanager
def opened_image(content: bytes) -> Iterator[Image.Image]:
    """The image, with whatever decoders stumble over in damaged files as OSError."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            yield image
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
