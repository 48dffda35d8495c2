"""What a diffusion model asks of the autoencoder that its latents come from, and the one that leaves pixels alone."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


@runtime_checkable
class VideoAutoencoder(Protocol):
    """A frozen pair of encoder and decoder; one of them may run on clips of any size that `latent_grid` takes."""

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        ...

    def latent_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the sizes (t, h, w) of the latents of a clip.

        Raises:
            ValueError: If the compression does not take clips of that size; the message names the nearest that it does.
        """
        ...

    # The command line compares annotations with those of the class it is given: shapes are never equal, Any always is.
    def encode(self, video: Any) -> Any:
        """Return the latents of clips, without chance and without gradients.

        Args:
            video: uint8 [batch, 3, frames, height, width].

        Returns:
            Floating point [batch, latent_channels, t, h, w], of about unit variance over a set.
        """
        ...

    def decode(self, latents: Any) -> Any:
        """Return the clips of latents, the inverse of `encode` as far as the compression allows.

        Args:
            latents: Floating point [batch, latent_channels, t, h, w].

        Returns:
            uint8 [batch, 3, frames, height, width].
        """
        ...


class PixelAutoencoder:
    """The identity on pixels, mapped to [-1, 1]: for small clips, whose pixels are few enough.

    Example:
        >>> autoencoder = PixelAutoencoder()
        >>> video = torch.arange(240, dtype=torch.uint8).reshape(1, 3, 5, 4, 4)
        >>> torch.equal(autoencoder.decode(autoencoder.encode(video)), video)
        True
        >>> autoencoder.latent_grid(5, 4, 4)
        (5, 4, 4)
    """

    latent_channels = 3

    def latent_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the sizes as they are.

        Raises:
            ValueError: If one of them is below 1.
        """
        if min(frames, height, width) < 1:
            raise ValueError(f"frames ({frames}), height ({height}) and width ({width}) must each be at least 1")
        return frames, height, width

    def encode(
        self, video: UInt8[Tensor, "batch 3 frames height width"]
    ) -> Float[Tensor, "batch 3 frames height width"]:
        """Return the pixels in [-1, 1]."""
        return video.float() / 127.5 - 1

    def decode(
        self, latents: Float[Tensor, "batch 3 frames height width"]
    ) -> UInt8[Tensor, "batch 3 frames height width"]:
        """Return the nearest 8-bit pixels; what lies outside of [-1, 1] is clamped."""
        return ((latents.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
