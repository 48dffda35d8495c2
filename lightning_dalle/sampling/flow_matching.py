"""Sampling of clips with a video diffusion transformer."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_dalle.models.video_dit import VideoDiT
from lightning_dalle.ops.flow_matching import sampling_times
from lightning_dalle.ops.random import keyed_generator
from lightning_dalle.ops.rope import Policies

Solver = Literal["euler", "heun"]
# dx/dt at a point of each sample, for one time that all share.
Velocity = Callable[[Tensor, float], Tensor]

# A sampler divides by no smaller time than its last step, and by none that is 0.
_LEAST_SAMPLED_TIME = 1e-6


def keyed_noise(
    seed: int, samples: Sequence[tuple[int, ...]], shape: tuple[int, ...], step: int = 0
) -> Float[Tensor, "samples *shape"]:
    """Standard normal noise of each sample, a function of seed, the sample's own key and the step alone.

    It is that of the whole sample, drawn on the CPU: a process that holds a shard takes it from there, and gets the
    same on any rank and device.
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
    predicts_data: bool = False,
    on_step: Callable[[], None] | None = None,
) -> Float[Tensor, "samples *shape"]:
    """Return the data that the flow carries the noise to.

    Args:
        solver: `heun` looks at the velocity twice a step, and is exact to second order.
        predicts_data: The velocity leads towards data that a network predicts, and has no value at them: the last step
            of `heun` is then Euler's, which ends at the prediction.
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
        if solver == "heun" and not (predicts_data and after == 0):
            slope = (slope + velocity(points + (after - now) * slope, after)) / 2
        points = points + (after - now) * slope
        if on_step is not None:
            on_step()
    if not points.isfinite().all():
        raise RuntimeError(
            "the velocities are not finite: the network's weights have diverged; load an earlier checkpoint"
        )
    return points


def candidate_keys(captions: Sequence[str], num_candidates: int) -> list[tuple[int, ...]]:
    """Return what tells samples apart, captions outermost: caption, how often it came before, candidate's number.

    So a sample's noise does not depend on the other captions, nor on how many candidates there are.
    """
    seen: Counter[str] = Counter()
    keys = []
    for caption in captions:
        text = tuple(caption.encode("utf-8", "surrogatepass"))
        keys += [(*text, seen[caption], candidate) for candidate in range(num_candidates)]
        seen[caption] += 1
    return keys


def sample_latents(
    network: VideoDiT,
    text: Float[Tensor, "samples text text_width"],
    noise: Float[Tensor, "samples channels frames height width"],
    *,
    num_steps: int,
    solver: Solver = "euler",
    shift: float = 1.0,
    guidance_scale: float = 1.0,
    policies: Policies | None = None,
    first: Float[Tensor, "samples channels 1 height width"] | None = None,
    on_step: Callable[[], None] | None = None,
) -> Float[Tensor, "samples channels frames height width"]:
    """Latents of clips, from their noise and the features of their captions.

    Args:
        guidance_scale: Anything but 1 also runs each sample without its caption.
        policies: For positions beyond the trained grid.
        first: The first frames of latents, which stay as they are.
        on_step: Called after each step.

    Raises:
        ValueError: If an argument is out of range.
        RuntimeError: If the network gives velocities that are not finite.
    """
    known = None
    if first is not None:
        noise = torch.cat([first, noise[:, :, 1:]], dim=2)
        known = torch.ones(len(noise), dtype=torch.bool, device=noise.device)

    def evaluate(points: Tensor, time: float, features: Tensor) -> Tensor:
        times = torch.full((len(points),), time, dtype=points.dtype, device=points.device)
        given = None if known is None else known.repeat(len(points) // len(known))
        velocities = network(
            points, times, features, known_first=given, policies=policies, least_time=_LEAST_SAMPLED_TIME
        )
        assert isinstance(velocities, Tensor)
        return velocities.to(points.dtype)

    def velocity(points: Tensor, time: float) -> Tensor:
        if guidance_scale == 1:
            velocities = evaluate(points, time, text)
        else:
            both = evaluate(torch.cat([points, points]), time, torch.cat([text, torch.zeros_like(text)]))
            conditional, unconditional = both.chunk(2)
            velocities = guide(conditional, unconditional, guidance_scale)
        return velocities if first is None else torch.cat([torch.zeros_like(first), velocities[:, :, 1:]], dim=2)

    # Not inference mode, in which autocast would cast every weight again at every step.
    with torch.no_grad():
        return integrate(
            velocity,
            noise,
            num_steps=num_steps,
            solver=solver,
            shift=shift,
            predicts_data=network.config.prediction == "clean",
            on_step=on_step,
        )
