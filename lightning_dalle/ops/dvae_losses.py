"""Losses of the discrete VAE: Gumbel-softmax relaxation, KL to the uniform prior, logit-Laplace density."""

import math

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


def gumbel_noise(like: Float[Tensor, "..."], generator: torch.Generator | None = None) -> Float[Tensor, "..."]:
    """Draw standard Gumbel noise of the shape, type and device of `like`."""
    # Inverting uniforms takes a fifth of the time of exponential_() on a CPU.
    uniforms = torch.empty_like(like).uniform_(generator=generator).clamp_(min=torch.finfo(like.dtype).tiny)
    return uniforms.log_().neg_().log_().neg_()


def gumbel_softmax(
    logits: Float[Tensor, "batch codes height width"],
    temperature: float,
    noise: Float[Tensor, "batch codes height width"],
) -> Float[Tensor, "batch codes height width"]:
    """Relax samples of a categorical distribution, soft in the forward and the backward pass (paper, section 2.1).

    Args:
        logits: Unnormalised log-probabilities along dimension 1.
        temperature: Above 0; the samples become one-hot as it falls to 0.
        noise: From `gumbel_noise`. `(logits + noise).argmax(1)` is the exact sample that is relaxed here.
    """
    return ((logits + noise) / temperature).softmax(dim=1)


def kl_to_uniform(logits: Float[Tensor, "batch codes height width"]) -> Float[Tensor, " batch"]:
    """Return KL(q || uniform) in nats, summed over the positions of each image.

    Args:
        logits: Un-tempered logits of q along dimension 1.
    """
    log_q = logits.log_softmax(dim=1)
    return (log_q.exp() * log_q).sum(dim=(1, 2, 3)) + logits[0, 0].numel() * math.log(logits.shape[1])


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
