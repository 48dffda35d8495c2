"""Pictures to whichever experiment logger can take them."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxtyping import UInt8
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image


def log_image(
    loggers: Iterable[Any], name: str, image: UInt8[Tensor, "3 height width"], step: int, caption: str = ""
) -> None:
    """Log one picture to each logger: W&B, TensorBoard, or as a file beside the figures of one that takes no pictures.

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
