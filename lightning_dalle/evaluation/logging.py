"""Images and clips written to loggers and files."""

import io
import tempfile
import warnings
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms.v2.functional import to_pil_image
from torchvision.utils import make_grid

from lightning_dalle.optional import require


def log_image(
    loggers: Iterable[Any], name: str, image: UInt8[Tensor, "3 height width"], step: int, caption: str = ""
) -> None:
    """Log one picture to each logger: W&B, TensorBoard, or as a file beside the metrics of one that takes no pictures.

    The file is `images/NAME-STEP.png` in the logger's folder, with the caption in a .txt beside it. A logger without a
    folder is warned about. Call it on rank 0.

    Args:
        loggers: Lightning loggers, as `trainer.loggers` holds them.
        name: Key of the picture.
        image: RGB.
        step: Optimizer updates so far.
        caption: What the picture shows.
    """
    image = image.cpu()
    for logger in loggers:
        if hasattr(logger, "log_image"):
            texts = {"caption": [caption]} if caption else {}
            logger.log_image(key=name, images=[image.permute(1, 2, 0).numpy()], step=step, **texts)
        elif hasattr(getattr(logger, "experiment", None), "add_image"):
            logger.experiment.add_image(name, image, global_step=step)
            if caption:
                logger.experiment.add_text(name, caption, global_step=step)
        elif getattr(logger, "log_dir", None):
            _write_files(Path(logger.log_dir) / "images" / f"{name.replace('/', '-')}-{step}.png", image, caption)
        else:
            warnings.warn(
                f"{type(logger).__name__} takes no pictures and has no folder: {name} is left out", stacklevel=2
            )


def _write_files(path: Path, image: Tensor, caption: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    to_pil_image(image).save(path)
    if caption:
        path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")


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
    """Return the bytes of an animation that loops, a lossless `webp` or a `gif`."""
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


def clip_grid(clips: UInt8[Tensor, "clips 3 frames height width"], columns: int) -> UInt8[Tensor, "3 frames h w"]:
    """Return clips side by side as one."""
    return torch.stack([make_grid(frame, nrow=columns) for frame in clips.unbind(2)], dim=1)


def log_clip(
    loggers: Iterable[Any],
    name: str,
    clip: UInt8[Tensor, "3 frames height width"],
    step: int,
    caption: str = "",
    frame_rate: float = 8.0,
    suffix: str = ".mp4",
) -> None:
    """Log one clip to each logger: an encoded file to W&B, else a file in the logger's folder (TensorBoard, CSV).

    The file is `videos/NAME-STEP.mp4`, with the caption in a .txt beside it. A logger without a folder is warned about.
    Call it on rank 0.

    Args:
        loggers: Lightning loggers, as `trainer.loggers` holds them.
        name: Key of the clip.
        clip: RGB.
        step: Optimizer updates so far.
        caption: What the clip shows.
        suffix: Suffix of the file; W&B refuses `.webp`, and gets a `.gif` then.
    """
    for logger in loggers:
        if hasattr(logger, "log_video"):
            accepted = ".gif" if suffix == ".webp" else suffix
            with tempfile.TemporaryDirectory() as folder:
                path = write_clip(Path(folder, f"clip{accepted}"), clip, frame_rate)
                texts = {"caption": [caption]} if caption else {}
                logger.log_video(key=name, videos=[str(path)], step=step, format=[accepted[1:]], **texts)
        elif getattr(logger, "log_dir", None):
            path = Path(logger.log_dir) / "videos" / f"{name.replace('/', '-')}-{step}{suffix}"
            write_clip(path, clip, frame_rate)
            if caption:
                path.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
        else:
            warnings.warn(f"{type(logger).__name__} takes no clips and has no folder: {name} is left out", stacklevel=2)
