"""The flow-matching loss of clips of one size, or of several that are packed."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_dalle.models.video_dit import VideoDiT
from lightning_dalle.ops.flow_matching import interpolate, velocity_target


def flow_matching_loss(
    network: VideoDiT,
    latents: Float[Tensor, "clips channels frames height width"]
    | Sequence[Float[Tensor, "channels _frames _height _width"]],
    text: Float[Tensor, "clips text text_width"],
    times: Float[Tensor, " clips"],
    known_first: Bool[Tensor, " clips"] | None,
    generator: torch.Generator,
) -> Float[Tensor, ""]:
    """Mean squared error of the network's velocities, over all values that it is not shown already.

    Args:
        known_first: Clips whose first frame is shown.
        generator: Of the noise, on the clips' device.
    """
    batches = [latents] if isinstance(latents, Tensor) else [clip.unsqueeze(0) for clip in latents]
    # Latents kept in 16 bits are widened.
    wide = torch.promote_types(batches[0].dtype, torch.float32)
    batches, times = [batch.to(wide) for batch in batches], times.to(wide)
    sizes = [len(batch) for batch in batches]
    noise = [torch.randn(batch.shape, generator=generator, dtype=wide, device=batch.device) for batch in batches]
    points = [interpolate(*part) for part in zip(batches, noise, times.split(sizes), strict=True)]
    learned = torch.ones_like(times) if known_first is None else 1 - known_first.to(times)
    # 0 where a first frame is known, [clips, 1, 1, 1, 1]
    masks = learned.view(-1, 1, 1, 1, 1).split(sizes)
    for point, batch, mask in zip(points, batches, masks, strict=True):
        point[:, :, :1] = torch.lerp(batch[:, :, :1], point[:, :, :1], mask)
    shown = points[0] if isinstance(latents, Tensor) else [point.squeeze(0) for point in points]
    outputs = network(shown, times, text, known_first=known_first)
    velocities = [outputs] if isinstance(outputs, Tensor) else [output.unsqueeze(0) for output in outputs]
    total, count = times.new_zeros(()), times.new_zeros(())
    for velocity, batch, fresh, mask in zip(velocities, batches, noise, masks, strict=True):
        squares = (velocity.to(wide) - velocity_target(batch, fresh)).square()
        total = total + squares[:, :, 1:].sum() + (mask * squares[:, :, :1]).sum()
        count = count + squares[:, :, 1:].numel() + mask.sum() * squares[0, :, :1].numel()
    return total / count.clamp(min=1)
