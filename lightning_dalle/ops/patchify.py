"""Grids of pixels or latents as sequences of patches."""

from jaxtyping import Float
from torch import Tensor

Grid = tuple[int, int, int]


def token_grid(size: Grid, patch_size: Grid) -> Grid:
    """Patches along time, height and width.

    Raises:
        ValueError: If the patches do not cover an axis exactly.
    """
    for axis, length, patch in zip(("time", "height", "width"), size, patch_size, strict=True):
        if length < patch or length % patch:
            raise ValueError(
                f"{axis} ({length}) must be a positive multiple of the patch's {patch}; crop or pad the clip, "
                "or choose another patch_size"
            )
    time, height, width = (length // patch for length, patch in zip(size, patch_size, strict=True))
    return time, height, width


def patchify(
    video: Float[Tensor, "batch channels time height width"], patch_size: Grid
) -> Float[Tensor, "batch tokens features"]:
    """Patches in raster order, time outermost; within one, features are ordered as channel, time, row, column.

    Raises:
        ValueError: As `token_grid`.
    """
    batch, channels, *size = video.shape
    time, height, width = token_grid((size[0], size[1], size[2]), patch_size)
    split = video.view(batch, channels, time, patch_size[0], height, patch_size[1], width, patch_size[2])
    return split.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def unpatchify(
    patches: Float[Tensor, "batch tokens features"], grid: Grid, patch_size: Grid
) -> Float[Tensor, "batch channels time height width"]:
    """Return the inverse of `patchify`, for a sequence of `grid` tokens."""
    split = patches.unflatten(-1, (-1, *patch_size)).unflatten(1, grid)  # [batch, t, h, w, channels, pt, ph, pw]
    return split.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3)
