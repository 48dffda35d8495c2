"""Grids as sequences of patches, and back."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.ops.patchify import patchify, token_grid, unpatchify
from lightning_dalle.ops.rope import grid_coordinates

sides = st.tuples(*[st.integers(1, 3)] * 3)


@settings(max_examples=30, deadline=None)
@given(grid=sides, patch_size=sides, channels=st.integers(1, 3))
def test_patches_hold_what_lies_at_their_coordinates(
    grid: tuple[int, int, int], patch_size: tuple[int, int, int], channels: int
) -> None:
    size = [length * patch for length, patch in zip(grid, patch_size, strict=True)]
    video = torch.arange(2 * channels * size[0] * size[1] * size[2], dtype=torch.float64).view(2, channels, *size)
    patches = patchify(video, patch_size)
    assert token_grid((size[0], size[1], size[2]), patch_size) == grid
    for place, corner in enumerate(grid_coordinates(grid) * torch.tensor(patch_size)):
        time, row, column = (slice(start, start + side) for start, side in zip(corner, patch_size, strict=True))
        assert torch.equal(patches[:, place], video[:, :, time, row, column].flatten(1))
    assert torch.equal(unpatchify(patches, grid, patch_size), video)


def test_patches_that_do_not_cover_the_grid_are_refused() -> None:
    with pytest.raises(ValueError, match=r"height \(5\) must be a positive multiple of the patch's 2; crop or pad"):
        patchify(torch.zeros(1, 1, 4, 5, 4), (2, 2, 2))
    with pytest.raises(ValueError, match=r"time \(0\) must be a positive multiple"):
        token_grid((0, 2, 2), (1, 2, 2))
