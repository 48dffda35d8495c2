"""Images and clips decoded from bytes."""

import bisect
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from lightning_dalle.data.augmentation import middle_window
from lightning_dalle.optional import require

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


def image_size(content: bytes) -> tuple[int, int]:
    """Width and height, from the header alone.

    Raises:
        OSError: the header is not that of an image.
    """
    with opened_image(content) as image:
        return image.size


def decode_image(content: bytes) -> UInt8[np.ndarray, "3 height width"]:
    """Return the upright image; transparent parts are white, of an animation the first frame is taken.

    Raises:
        OSError: the image is broken, truncated, or so large that it may be an attack on the memory.
    """
    with opened_image(content) as opened:
        return as_rgb(ImageOps.exif_transpose(opened))


def as_rgb(image: Image.Image) -> UInt8[np.ndarray, "3 height width"]:
    """Return the pixels of an opened image, transparent parts in white."""
    if "A" in image.getbands() or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    elif image.mode.startswith("I"):  # 16-bit grey, which a conversion would clip
        image = Image.fromarray((np.asarray(image) // 256).astype(np.uint8))
    return np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1))


@contextmanager
def opened_image(content: bytes) -> Iterator[Image.Image]:
    """Return the image, with whatever decoders stumble over in damaged files as OSError."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            yield image
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


VIDEO_SUFFIXES = (".mp4", ".webm", ".mov", ".mkv")
ANIMATION_SUFFIXES = (".webp", ".gif")
CLIP_SUFFIXES = (*VIDEO_SUFFIXES, *ANIMATION_SUFFIXES)
_DEFAULT_MILLISECONDS = 100
"""What browsers take where an animation gives no duration."""


@dataclass(frozen=True)
class ClipShape:
    """What is taken of each clip.

    Attributes:
        frame_rate: Frames per second, whatever the file's own is.
    """

    frames: int
    height: int
    width: int
    frame_rate: float

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width."""
        return self.frames, self.height, self.width

    @property
    def seconds(self) -> float:
        """From the first frame to the last."""
        return (self.frames - 1) / self.frame_rate


class ClipExtent(NamedTuple):
    """How long a clip is shown, 0 for a still, and how large it is, in pixels."""

    seconds: float
    height: int
    width: int


def clip_extent(content: bytes) -> ClipExtent:
    """Return what a clip says of itself; no picture of a video is decoded for it, but those of an animated image are.

    Raises:
        OSError: it cannot be read.
    """
    if _is_animation(content):
        parts = list(_animation(content))
        return ClipExtent(sum(duration for duration, _ in parts), parts[0][1].height, parts[0][1].width)
    with _opened_video(content) as (_, stream):
        if min(stream.height, stream.width) < 1:
            raise OSError("it does not say how large its pictures are")
        return ClipExtent(_seconds(stream), stream.height, stream.width)


def decode_clip(
    content: bytes, shape: ClipShape, generator: np.random.Generator | None = None
) -> UInt8[np.ndarray, "3 frames height width"]:
    """Frames at even times, each the middle of its picture; transparent parts are white.

    Args:
        generator: Chooses what part of a longer clip is taken; None takes its middle.

    Raises:
        OSError: the clip is broken, or too short.
    """
    place = 0.5 if generator is None else float(generator.random())
    size = (shape.height, shape.width)
    pictures = _animation_frames if _is_animation(content) else _video_frames
    chosen: list[np.ndarray] = []
    last: tuple[int, np.ndarray] | None = None
    for key, picture in pictures(content, shape, place):
        # A slow clip shows one picture at several of the times.
        if last is None or last[0] != key:
            last = key, middle_window(as_rgb(picture), size)
        chosen.append(last[1])
    if len(chosen) < shape.frames:
        raise OSError(f"it ends after {len(chosen)} of {shape.frames} frames at {shape.frame_rate} a second")
    return np.stack(chosen, axis=1)


def _times(seconds: float, shape: ClipShape, place: float) -> list[float]:
    """When to look at a clip of some length."""
    start = place * max(0.0, seconds - shape.frames / shape.frame_rate)
    return [start + frame / shape.frame_rate for frame in range(shape.frames)]


def _is_animation(content: bytes) -> bool:
    return content[:4] == b"GIF8" or (content[:4] == b"RIFF" and content[8:12] == b"WEBP")


def _animation(content: bytes) -> Iterator[tuple[float, Image.Image]]:
    """Yield how many seconds each picture is shown, 0 for a still, and the picture."""
    with opened_image(content) as image:
        num_frames = getattr(image, "n_frames", 1)
        for number in range(num_frames):
            image.seek(number)
            image.load()
            yield (image.info.get("duration") or _DEFAULT_MILLISECONDS) / 1000 * (num_frames > 1), image.copy()


def _animation_frames(content: bytes, shape: ClipShape, place: float) -> Iterator[tuple[int, Image.Image]]:
    parts = list(_animation(content))
    ends = np.cumsum([duration for duration, _ in parts]).tolist()
    for time in _times(ends[-1], shape, place):
        number = bisect.bisect_right(ends, time + 1e-6)
        if number < len(parts):
            yield number, parts[number][1]


@contextmanager
def _opened_video(content: bytes) -> Iterator[tuple[Any, Any]]:
    """Return the container and its first video stream, with whatever PyAV stumbles over as OSError."""
    av = require("av", "video")
    try:
        with av.open(io.BytesIO(content)) as container:
            if not container.streams.video:
                raise OSError("it has no video stream")
            yield container, container.streams.video[0]
    except av.FFmpegError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _seconds(stream: Any) -> float:
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    if stream.container.duration is not None:
        return float(stream.container.duration / 1e6)
    raise OSError("it does not say how long it is")


def _video_frames(content: bytes, shape: ClipShape, place: float) -> Iterator[tuple[int, Image.Image]]:
    with _opened_video(content) as (container, stream):
        times = _times(_seconds(stream), shape, place)
        first = float((stream.start_time or 0) * stream.time_base)
        # To the last picture before it that needs no other one.
        container.seek(int((first + times[0]) / stream.time_base), stream=stream)
        shown = None
        for picture in container.decode(stream):
            while shown is not None and times and picture.time - first > times[0] + 1e-6:
                times.pop(0)
                yield shown.pts, shown.to_image()
            if not times:
                return
            shown = picture
        if shown is not None:
            end = shown.time - first + 1 / float(stream.average_rate or stream.guessed_rate)
            yield from ((shown.pts, shown.to_image()) for time in times if time < end)


def decode_loop(content: bytes, frames: int, height: int, width: int) -> UInt8[np.ndarray, "3 frames height width"]:
    """Return one turn of an animated image at even times, whatever its length; a still is repeated.

    Raises:
        OSError: the image is broken.
    """
    parts = list(_animation(content))
    ends = np.cumsum([duration for duration, _ in parts]).tolist()
    times = [frame / frames * ends[-1] for frame in range(frames)]
    numbers = [min(bisect.bisect_right(ends, time + 1e-6), len(parts) - 1) for time in times]
    pictures = {number: middle_window(as_rgb(parts[number][1]), (height, width)) for number in set(numbers)}
    return np.stack([pictures[number] for number in numbers], axis=1)
