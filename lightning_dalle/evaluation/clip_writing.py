"""Clips as files: .mp4 by PyAV, .gif and lossless .webp by Pillow."""

import io
from fractions import Fraction
from pathlib import Path

from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from lightning_dalle.optional import require

CLIP_SUFFIXES = (".mp4", ".gif", ".webp")


def write_clip(path: Path, clip: UInt8[Tensor, "3 frames height width"], frame_rate: float = 8.0) -> Path:
    """Write one clip in the format that the path's suffix names, make its folder, and return the path.

    Players of .mp4 want even sides: an odd one repeats its last row or column.

    Raises:
        ValueError: If the suffix is another, or the frame rate is not above 0.
        ModuleNotFoundError: If PyAV is needed and the extra `video` is not installed.
    """
    if path.suffix not in CLIP_SUFFIXES:
        raise ValueError(f"path ({path.name}) must end with one of {', '.join(CLIP_SUFFIXES)}")
    if frame_rate <= 0:
        raise ValueError(f"frame_rate ({frame_rate}) must be above 0, such as 8 frames a second")
    content = _video(clip, frame_rate) if path.suffix == ".mp4" else encode_animation(clip, frame_rate, path.suffix[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def encode_animation(
    clip: UInt8[Tensor, "3 frames height width"], frame_rate: float = 8.0, image_format: str = "webp"
) -> bytes:
    """The bytes of an animation that loops, a lossless `webp` or a `gif`."""
    pictures = [Image.fromarray(frame) for frame in clip.cpu().permute(1, 2, 3, 0).contiguous().numpy()]
    options = {"lossless": True} if image_format == "webp" else {}
    buffer = io.BytesIO()
    pictures[0].save(
        buffer,
        image_format,
        save_all=True,
        append_images=pictures[1:],
        duration=round(1000 / frame_rate),
        loop=0,
        **options,
    )
    return buffer.getvalue()


def _video(clip: Tensor, frame_rate: float) -> bytes:
    av = require("av", "video")
    odd = [length % 2 for length in clip.shape[2:]]
    even = pad(clip.cpu().float(), (0, odd[1], 0, odd[0]), mode="replicate").byte()
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=Fraction(frame_rate).limit_denominator(1000), options={"crf": "12"}
        )
        stream.height, stream.width, stream.pix_fmt = even.shape[2], even.shape[3], "yuv420p"
        for frame in even.permute(1, 2, 3, 0).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
