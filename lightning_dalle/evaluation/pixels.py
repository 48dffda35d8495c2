"""Pictures as 8-bit pixels."""

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor


def as_uint8(images: Shaped[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Return images as uint8; floating-point ones are taken as values in [0, 1], clamped and rounded.

    A plain conversion would truncate decimals and wrap what lies outside (1.004 becomes 0).

    Raises:
        TypeError: If the images are integers of another kind.

    Example:
        >>> as_uint8(torch.tensor([-0.1, 0.5, 1.004]))
        tensor([  0, 128, 255], dtype=torch.uint8)
    """
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise TypeError(f"images ({images.dtype}) must be uint8, or floating-point values in [0, 1]")
    return images.float().clamp(0, 1).mul(255).round().to(torch.uint8)
