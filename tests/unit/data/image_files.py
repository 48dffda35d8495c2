"""Small captioned image files for tests, good and bad."""

import io
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image


def encoded(size: tuple[int, int] = (20, 16), seed: int = 0, image_format: str = "PNG", mode: str = "RGB") -> bytes:
    """A random image file of (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, image_format)
    return buffer.getvalue()


def write_pair(folder: Path, name: str, caption: str | None, image: bytes | None = None) -> None:
    """An image and its .txt, where there is a caption."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".png").write_bytes(encoded() if image is None else image)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def write_folder(folder: Path, count: int) -> Path:
    """A folder of good pairs, each image of its own."""
    for number in range(count):
        write_pair(folder, f"{number:03}", f"picture number {number}", encoded(seed=number))
    return folder


def write_shard(path: Path, count: int, start: int = 0) -> Path:
    """A shard of good samples as img2dataset writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(start, start + count):
            caption = f"picture number {number}"
            image = encoded(seed=number, image_format="JPEG")
            writer.write({"__key__": f"{number:09}", "jpg": image, "txt": caption, "json": {"caption": caption}})
    return path
