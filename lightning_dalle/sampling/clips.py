"""Sampling of clips with a video diffusion transformer."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_dalle.models.video_dit import VideoDiT
from lightning_dalle.ops.rotary_grid import Policies
from lightning_dalle.sampling.flow_matching import Solver, guide, integrate


def candidate_keys(captions: Sequence[str], num_candidates: int) -> list[tuple[int, ...]]:
    """What tells samples apart, captions outermost: the caption, how often it came before, the candidate's number.

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
        velocities = network(points, times, features, known_first=given, policies=policies)
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
        return integrate(velocity, noise, num_steps=num_steps, solver=solver, shift=shift, on_step=on_step)
