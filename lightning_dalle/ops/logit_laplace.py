"""The logit-Laplace density of pixel values and the map of pixels into its support (DALL-E paper, appendix A.3)."""

import math

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

EPSILON = 0.1
"""Share of the unit interval kept free at either end, so that black and white stay away from the poles of the logit."""


def map_pixels(images: Float[Tensor, "..."] | UInt8[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Map pixels affinely into `[EPSILON, 1 - EPSILON]`, the paper's phi.

    Args:
        images: Either `uint8` in 0..255 or floating point in `[0, 1]`.
    """
    if images.dtype == torch.uint8:
        images = images.float() / 255
    return (1 - 2 * EPSILON) * images + EPSILON


def unmap_pixels(mapped: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Invert `map_pixels` and clamp to `[0, 1]`."""
    return ((mapped - EPSILON) / (1 - 2 * EPSILON)).clamp(0, 1)


def logit_laplace_log_density(
    mapped: Float[Tensor, "..."], mu: Float[Tensor, "..."], log_scale: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return ln f(x | mu, b) of the density on (0, 1), in nats (appendix A.3, equation 2).

    Args:
        mapped: Values strictly inside (0, 1), as `map_pixels` gives them.
        mu: Location, in logit units.
        log_scale: ln b.
    """
    log_x, log_one_minus_x = mapped.log(), torch.log1p(-mapped)
    deviation = (log_x - log_one_minus_x - mu).abs()
    return -deviation * torch.exp(-log_scale) - log_scale - math.log(2) - log_x - log_one_minus_x


def dequantise(mapped: Float[Tensor, "..."], generator: torch.Generator | None = None) -> Float[Tensor, "..."]:
    """Spread 8-bit pixels uniformly over the grey level they were rounded to, so that their density is bounded.

    Args:
        mapped: From `map_pixels`; the result stays inside (0, 1).
        generator: On the device of `mapped`.
    """
    noise = torch.empty_like(mapped).uniform_(-0.5, 0.5, generator=generator)
    return mapped + noise * ((1 - 2 * EPSILON) / 255)
