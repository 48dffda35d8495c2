"""Clips to whichever experiment logger can take them."""

import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor
from torchvision.utils import make_grid

from lightning_dalle.evaluation.clip_writing import write_clip


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
        suffix: Of the file; W&B refuses `.webp`, and gets a `.gif` then.
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
