"""Tables of four published networks, through the matching settings."""

import warnings
from typing import Any

import pytest
import torch

from lightning_dalle.ops.rope import RotaryGridConfig, grid_angles, grid_coordinates, grid_rotation
from lightning_dalle.ops.rope_scaling import Default, PositionInterpolation
from tests.rounding import assert_only_rounded

with warnings.catch_warnings():
    # What diffusers imports warns of its own age.
    warnings.simplefilter("ignore")
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed


def _assert_same(config: RotaryGridConfig, head_dim: int, grid: tuple[int, int, int], theirs: Any) -> None:
    ours = grid_rotation(config, head_dim, grid)
    angles = grid_angles(grid_coordinates(grid), config, head_dim, grid)[0]
    # They round angles to 32 bits: what that costs is seen in ours.
    plain = angles.float().cos(), angles.float().sin()
    for mine, rounded, their in zip(ours[:2], plain, theirs, strict=True):
        # Each of their cosines stands twice, once for each feature of a pair.
        exact, single = (table.repeat_interleave(2, dim=-1) for table in (mine[0], rounded))
        assert_only_rounded(their, single, exact)


@pytest.mark.parametrize("trained_width", [30, 45])
def test_cog_video_x_linspace_is_interpolation_by_ratio(trained_width: int) -> None:
    grid = (13, 60, 2 * trained_width)
    theirs = get_3d_rotary_pos_embed(64, ((0, 0), (30, trained_width)), grid[1:], 13)
    ratio = PositionInterpolation("ratio")
    config = RotaryGridConfig(
        original_max_position_embeddings=(13, 30, trained_width), policies=(Default(), ratio, ratio)
    )
    _assert_same(config, 64, grid, theirs)
    last_row = grid_angles(grid_coordinates(grid), config, 64, grid)[0][-1, 8]
    assert float(last_row) == pytest.approx(29.5, abs=1e-12)


def test_cog_video_x_slice_is_direct() -> None:
    theirs = get_3d_rotary_pos_embed(64, None, (6, 8), 5, grid_type="slice", max_size=(10, 12))
    _assert_same(RotaryGridConfig(original_max_position_embeddings=(13, 10, 12)), 64, (5, 6, 8), theirs)


def test_hunyuan_video() -> None:
    theirs = HunyuanVideoRotaryPosEmbed(2, 1, [16, 56, 56])(torch.empty(1, 4, 5, 12, 16))
    config = RotaryGridConfig(original_max_position_embeddings=(33, 6, 8), axis_dims=(16, 56, 56), base=(256, 256, 256))
    _assert_same(config, 128, (5, 6, 8), theirs)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_wan(head_dim: int) -> None:
    cos, sin = WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)(torch.empty(1, 4, 5, 12, 16))
    side = 2 * (head_dim // 6)
    config = RotaryGridConfig(original_max_position_embeddings=(21, 6, 8), axis_dims=(head_dim - 2 * side, side, side))
    _assert_same(config, head_dim, (5, 6, 8), (cos[0, :, 0], sin[0, :, 0]))
