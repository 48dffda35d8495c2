"""Flow matching along straight lines, with t = 1 for noise and t = 0 for data (Lipman et al. 2023; Liu et al. 2023)."""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

TimestepDensity = Literal["uniform", "logit_normal"]
LEAST_TIME = 0.05
"""Least time that a velocity in training is divided by, where it is told by the data that it leads to."""


def interpolate(
    data: Float[Tensor, "batch *shape"], noise: Float[Tensor, "batch *shape"], times: Float[Tensor, " batch"]
) -> Float[Tensor, "batch *shape"]:
    """Return the point of each sample's line at its time: (1 - t) data + t noise."""
    times = times.to(data.dtype).view(-1, *[1] * (data.ndim - 1))
    return torch.lerp(data, noise, times)


def velocity_target(
    data: Float[Tensor, "batch *shape"], noise: Float[Tensor, "batch *shape"]
) -> Float[Tensor, "batch *shape"]:
    """Return the line's derivative by t, which the network learns: noise - data, at every t."""
    return noise - data


def velocity_towards(
    points: Float[Tensor, "batch *shape"],
    data: Float[Tensor, "batch *shape"],
    times: Float[Tensor, " batch"],
    least_time: float = LEAST_TIME,
) -> Float[Tensor, "batch *shape"]:
    """Return the velocity of lines that lead from points at their times to data at 0: (points - data) / t.

    With the best guess of the data given each point it is the best guess of `velocity_target` (Li & He 2025, arXiv
    2511.13720, section 4).

    Args:
        least_time: Times below it count as that much: in training errors are not magnified further. A sampler needs the
            velocity itself, or it would stop short of the data.
    """
    times = times.to(points.dtype).clamp(min=least_time).view(-1, *[1] * (points.ndim - 1))
    return (points - data) / times


def shift_times(times: Float[Tensor, "*shape"], shift: float | Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """Times moved towards noise, s t / (1 + (s - 1) t), as larger clips need it (Esser et al. 2024, section 5.3.2)."""
    return shift * times / (1 + (shift - 1) * times)


def resolution_shift(num_values: int, base_values: int, base_shift: float) -> float:
    """Return the shift of a clip with `num_values` values if one of `base_values` has `base_shift`.

    The root of their ratio keeps the uncertainty about the data at each time (Esser et al. 2024, section 5.3.2).
    """
    return float(base_shift * (num_values / base_values) ** 0.5)


def draw_times(uniforms: Float64[Tensor, " batch"], density: TimestepDensity = "uniform") -> Float64[Tensor, " batch"]:
    """Training times by inverting the density's distribution at `uniforms`.

    `logit_normal` is the sigmoid of a standard normal, which has most times in the middle (Esser et al. 2024).

    Raises:
        ValueError: If the density is unknown.
    """
    if density not in get_args(TimestepDensity):
        raise ValueError(f"density ({density!r}) must be one of {', '.join(get_args(TimestepDensity))}")
    return torch.special.ndtri(uniforms).sigmoid() if density == "logit_normal" else uniforms


def sampling_times(num_steps: int, shift: float = 1.0) -> Float64[Tensor, " times"]:
    """Times of a sampler's steps from 1 down to 0, equally far before the shift.

    Raises:
        ValueError: If there is no step, or the shift is not positive.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps ({num_steps}) must be at least 1")
    if not shift > 0:
        raise ValueError(f"shift ({shift}) must be positive; 1 leaves times as they are")
    return shift_times(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift)
