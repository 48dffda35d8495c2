"""Peak signal-to-noise ratio of 8-bit images."""

from jaxtyping import UInt8
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio


def psnr(
    reconstructions: UInt8[Tensor, "images 3 height width"], images: UInt8[Tensor, "images 3 height width"]
) -> float:
    """Return the ratio in dB that belongs to the mean squared error over all images; infinite where they are equal."""
    return peak_signal_noise_ratio(reconstructions.double(), images.double(), data_range=255.0).item()
