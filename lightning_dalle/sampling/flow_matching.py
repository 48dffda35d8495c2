"""Samplers of the ordinary differential equation that flow matching learns, from noise at t = 1 to data at t = 0."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_dalle.ops.flow_matching import sampling_times
from lightning_dalle.ops.keyed_generator import keyed_generator

Solver = Literal["euler", "heun"]
# dx/dt at a point of each sample, for one time that all share.
Velocity = Callable[[Tensor, float], Tensor]


def keyed_noise(
    seed: int, samples: Sequence[tuple[int, ...]], shape: tuple[int, ...], step: int = 0
) -> Float[Tensor, "samples *shape"]:
    """Standard normal noise of each sample, a function of seed, the sample's own key and the step alone.

    It is that of the whole sample, drawn on the CPU: whoever holds a part of one cuts it from there, and gets the same
    on any rank and device.
    """
    keys = [(seed, *sample, step) for sample in samples]
    return torch.stack([torch.randn(shape, generator=keyed_generator(key)) for key in keys])


def guide(
    conditional: Float[Tensor, "samples *shape"], unconditional: Float[Tensor, "samples *shape"], scale: float
) -> Float[Tensor, "samples *shape"]:
    """Classifier-free guidance (Ho & Salimans 2022): from the velocity without caption (0) to that of it (1) and on.

    Raises:
        ValueError: If the scale is negative or not finite.
    """
    if not (scale >= 0 and math.isfinite(scale)):
        raise ValueError(f"guidance_scale ({scale}) must be finite and at least 0; 1 samples without guidance")
    return torch.lerp(unconditional, conditional, scale)


def integrate(
    velocity: Velocity,
    noise: Float[Tensor, "samples *shape"],
    *,
    num_steps: int,
    solver: Solver = "euler",
    shift: float = 1.0,
    on_step: Callable[[], None] | None = None,
) -> Float[Tensor, "samples *shape"]:
    """Data that the flow carries the noise to.

    Args:
        solver: `heun` looks at the velocity twice a step, and is exact to second order.
        on_step: Called after each step.

    Raises:
        ValueError: If the solver is unknown, or a number out of range.
        RuntimeError: If the velocity is not finite.
    """
    if solver not in get_args(Solver):
        raise ValueError(f"solver ({solver!r}) must be one of {', '.join(get_args(Solver))}")
    points, times = noise, sampling_times(num_steps, shift).tolist()
    for now, after in pairwise(times):
        slope = velocity(points, now)
        if solver == "heun":
            slope = (slope + velocity(points + (after - now) * slope, after)) / 2
        points = points + (after - now) * slope
        if on_step is not None:
            on_step()
    if not points.isfinite().all():
        raise RuntimeError(
            "the velocities are not finite: the network's weights have diverged; load an earlier checkpoint"
        )
    return points
