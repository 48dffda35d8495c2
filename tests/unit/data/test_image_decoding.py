import io

import numpy as np
import pytest
from PIL import Image

from lightning_dalle.data.files.decoding import decode_image, image_size
from tests.unit.data.image_files import encoded


def saved(image: Image.Image, image_format: str = "PNG", **settings: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **settings)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    decoded = decode_image(encoded(mode=mode))
    assert decoded.shape == (3, 16, 20)
    assert decoded.dtype == np.uint8


def test_print_colours_become_rgb() -> None:
    assert decode_image(encoded(image_format="JPEG", mode="CMYK")).shape == (3, 16, 20)


def test_transparent_parts_are_white() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert decode_image(saved(image))[:, 0].T.tolist() == [[10, 20, 30], [255, 255, 255]]


def test_a_palette_s_transparent_entry_is_white() -> None:
    image = Image.new("P", (1, 1), 0)
    image.putpalette([10, 20, 30])
    assert decode_image(saved(image, transparency=0)).flatten().tolist() == [255, 255, 255]


def test_sixteen_bits_keep_their_range() -> None:
    image = Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16))
    assert decode_image(saved(image))[0].tolist() == [[0, 1, 255]]


def test_a_photograph_taken_sideways_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = saved(Image.new("RGB", (20, 10)), "JPEG", exif=exif)
    assert decode_image(content).shape == (3, 20, 10)


def test_the_first_frame_of_an_animation_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    content = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert decode_image(content)[:, 0, 0].tolist() == [255, 0, 0]


def test_the_size_is_read_from_the_header() -> None:
    assert image_size(encoded((31, 17))[:60]) == (31, 17)


@pytest.mark.parametrize("content", [b"", b"no image", encoded()[:60], encoded(image_format="JPEG")[:300]])
def test_a_broken_image_is_one_kind_of_error(content: bytes) -> None:
    with pytest.raises(OSError, match="."):
        decode_image(content)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(OSError, match="DecompressionBombError"):
        decode_image(encoded())
