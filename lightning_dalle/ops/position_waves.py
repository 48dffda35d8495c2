"""Waves over the whole of a grid of time, height and width, which tell a token where it stands (Tancik et al. 2020)."""

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from lightning_dalle.ops.patchify import Grid
from lightning_dalle.ops.rotary_embedding import grid_coordinates
from lightning_dalle.ops.rotary_grid import RotaryGridConfig
from lightning_dalle.ops.rotary_scaling import ExtrapolationPolicy, rotary_frequencies


def wave_frequencies(trained_grid: Grid, num_waves: int) -> Float64[Tensor, "waves 3"]:
    """Radians that each wave turns from one token to the next along time, height and width.

    Each has its own slant: a sum of waves along single axes could not tell "early and on the left" without learning the
    product. From half a turn over the trained axis to half a turn over two tokens, evenly spread in the logarithm by a
    Sobol sequence, so that every program draws the same.
    """
    # The first two points are a corner and the middle, which would not turn at all.
    points = torch.quasirandom.SobolEngine(3).draw(num_waves + 2, dtype=torch.float64)[2:]
    signed = 2 * points - 1
    highest = math.pi / 2
    lowest = torch.tensor([min(math.pi / length, highest) for length in trained_grid], dtype=torch.float64)
    return signed.sign() * lowest * (highest / lowest) ** signed.abs()


@lru_cache(maxsize=64)
def position_waves(
    config: RotaryGridConfig,
    head_dim: int,
    grid: Grid,
    policies: tuple[ExtrapolationPolicy, ExtrapolationPolicy, ExtrapolationPolicy],
    num_waves: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "tokens features"]:
    """Cosines of each wave at the tokens of a clip in raster order, then sines.

    Policies move them as they move the highest frequency of their axis, which tells neighbours apart: positions are
    interpolated here where all frequencies are, and as they are elsewhere.
    """
    axes = zip(config.split(head_dim), config.base, config.trained_grid, grid, policies, strict=True)
    # A table first built while sampling in inference mode is still used in training later; and the sequence behind the
    # waves is drawn on the CPU, whatever the default device.
    with torch.inference_mode(mode=False), torch.device("cpu"):
        paces = torch.stack(
            [
                policy.frequencies(dim, base, trained, target)[0] / rotary_frequencies(dim, base)[0]
                for dim, base, trained, target, policy in axes
            ]
        )
        angles = grid_coordinates(grid).double() @ (paces * wave_frequencies(config.trained_grid, num_waves)).T
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device, dtype)
