"""What may be asked of the generation of clips."""

import warnings
from collections.abc import Sequence

from jaxtyping import UInt8
from torch import Tensor

from lightning_dalle.lightning_modules.video_dit_training import VideoDiTTraining
from lightning_dalle.ops.patchify import Grid


def check_request(
    captions: Sequence[str], num_candidates: int, max_batch: int, guidance_scale: float, training: VideoDiTTraining
) -> None:
    """Refuses what cannot be drawn; warns of guidance that training did not prepare.

    Raises:
        TypeError: If `captions` is one string.
        ValueError: If there is nothing to draw, or no room.
    """
    if isinstance(captions, str):
        raise TypeError(f"captions ({captions!r}) must be a sequence of strings; put one caption into a list")
    for name, value in (("captions", len(captions)), ("num_candidates", num_candidates), ("max_batch", max_batch)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    if guidance_scale != 1 and training.caption_dropout == 0:
        warnings.warn(
            f"guidance_scale ({guidance_scale}) has no trained empty caption to move away from, "
            "since caption_dropout was 0 in training",
            stacklevel=3,
        )


def check_first_frame(
    pictures: UInt8[Tensor, "pictures 3 height width"],
    num_captions: int,
    size: tuple[int, int],
    patch_size: Grid,
    training: VideoDiTTraining,
) -> None:
    """Refuses first frames that do not fit; warns if training showed none.

    Raises:
        ValueError: If there is not one for each caption, of the clips' size, or tokens hold several frames.
    """
    if (len(pictures), *pictures.shape[2:]) != (num_captions, *size):
        raise ValueError(
            f"first_frame has shape {tuple(pictures.shape)}; give one picture for each of {num_captions} captions, "
            f"of the clips' height and width {size}"
        )
    if patch_size[0] != 1:
        raise ValueError(f"first_frame needs tokens of one frame, but patch_size is {patch_size}")
    if training.first_frame_share == 0:
        warnings.warn(
            "first_frame was never shown in training, since first_frame_share was 0; clips may not go on from it",
            stacklevel=4,
        )
