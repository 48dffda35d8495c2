"""Small captioned clips for tests, good and bad."""

import io
from pathlib import Path

import av
import numpy as np
import webdataset
from PIL import Image


def frames(count: int = 8, size: tuple[int, int] = (16, 12), seed: int = 0) -> np.ndarray:
    """[count, height, width, 3]: even colours, far apart from frame to frame; size is (width, height)."""
    colours = np.random.default_rng(seed).permutation(count)[:, None] * 200 // max(1, count - 1) + [20, 30, 40]
    return np.broadcast_to(colours[:, None, None], (count, size[1], size[0], 3)).astype(np.uint8)


def animation(pixels: np.ndarray, milliseconds: int = 125, image_format: str = "WEBP", **more: int) -> bytes:
    """A lossless animated image; equal neighbours are one picture that is shown for longer."""
    pictures = [Image.fromarray(frame) for frame in pixels]
    buffer = io.BytesIO()
    options = {"lossless": True, **more} if image_format == "WEBP" else {}
    pictures[0].save(
        buffer, image_format, save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, **options
    )
    return buffer.getvalue()


def video(pixels: np.ndarray, frame_rate: int = 8, container: str = "mp4", **options: str) -> bytes:
    """A video file with one key frame in four."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options) as output:
        stream = output.add_stream("mpeg4" if container == "mp4" else "libvpx-vp9", rate=frame_rate)
        stream.width, stream.height, stream.pix_fmt = pixels.shape[2], pixels.shape[1], "yuv420p"
        stream.bit_rate, stream.gop_size = 2_000_000, 4
        for frame in pixels:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


def write_clip(folder: Path, name: str, caption: str | None, content: bytes | None = None) -> None:
    """A clip with its suffix in the name, and its .txt, where there is a caption."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(animation(frames()) if content is None else content)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def write_clips(folder: Path, count: int) -> Path:
    """A folder of good pairs, each clip of its own, in turns of each format."""
    for number in range(count):
        pixels = frames(seed=number)
        suffix, content = [
            (".webp", animation(pixels)),
            (".gif", animation(pixels, image_format="GIF")),
            (".mp4", video(pixels)),
        ][number % 3]
        write_clip(folder, f"{number:03}{suffix}", f"clip number {number}", content)
    return folder


def write_clip_shard(path: Path, count: int) -> Path:
    """A shard of clips."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(count):
            caption = f"clip number {number}"
            writer.write({"__key__": f"{number:09}", "webp": animation(frames(seed=number)), "txt": caption})
    return path
