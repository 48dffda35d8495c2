"""A small autoencoder of clips whose convolutions look back in time only."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn.functional import pad, silu


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


@dataclass(frozen=True, kw_only=True)
class CausalVideoAutoencoderConfig:
    """Sizes of a `CausalVideoAutoencoder`.

    Attributes:
        time_compression: Frames that a latent stands for, after the first frame, which has one of its own: a power of
            2, and clips have n times as many frames and one.
        space_compression: Pixels along a side that a latent stands for, a power of 2.
        latent_channels: Channels of the latents.
        hidden_width: Channels at full resolution; they double at each halving.
        blocks_per_level: Residual blocks at each resolution.

    Raises:
        ValueError: If a size is not positive, or no power of 2 where it has to be one.
    """

    time_compression: int = 4
    space_compression: int = 4
    latent_channels: int = 8
    hidden_width: int = 32
    blocks_per_level: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that no network can be built with."""
        for name in ("latent_channels", "hidden_width", "blocks_per_level"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        for name in ("time_compression", "space_compression"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} ({value}) must be a power of 2, such as 4")

    @property
    def strides(self) -> list[tuple[int, int]]:
        """How time and space are halved from each level to the next."""
        in_time, in_space = (int(math.log2(size)) for size in (self.time_compression, self.space_compression))
        return [(1 + (level < in_time), 1 + (level < in_space)) for level in range(max(in_time, in_space))]

    @property
    def widths(self) -> list[int]:
        """Channels of each level."""
        return [self.hidden_width * 2**level for level in range(len(self.strides) + 1)]


class CausalConvolution(nn.Conv3d):
    """Kernel of 3 in time and space, padded by the frames before only: no output frame sees a later one."""

    def __init__(self, in_channels: int, out_channels: int, stride: tuple[int, int] = (1, 1)) -> None:
        super().__init__(in_channels, out_channels, 3, (stride[0], stride[1], stride[1]), padding=(0, 1, 1))

    def forward(self, x: Float[Tensor, "batch channels t h w"]) -> Float[Tensor, "batch out t2 h2 w2"]:
        """Convolve with zeros before the first frame and around each."""
        return super().forward(pad(x, (0, 0, 0, 0, 2, 0)))


def unit_mean_square(x: Float[Tensor, "batch channels t h w"]) -> Float[Tensor, "batch channels t h w"]:
    """Return vectors of channels with a mean square of 1: a norm that mixes neither times nor places."""
    return x * (x.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()


def _at_least_32_bits(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class CausalBlock(nn.Module):
    """Identity and two convolutions, each after a norm over channels and a SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = CausalConvolution(width, width)
        self.second = CausalConvolution(width, width)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Float[Tensor, "batch width t h w"]) -> Float[Tensor, "batch width t h w"]:
        """Add the residual path."""
        hidden = self.first(silu(unit_mean_square(x)))
        return x + self.second(silu(unit_mean_square(hidden)))


class CausalUpsampling(nn.Module):
    """Repeats frames and pixels; the first frame stays one, since it stands for itself alone."""

    def __init__(self, in_channels: int, out_channels: int, stride: tuple[int, int]) -> None:
        super().__init__()
        self.stride = stride
        self.convolution = CausalConvolution(in_channels, out_channels)

    def forward(self, x: Float[Tensor, "batch channels t h w"]) -> Float[Tensor, "batch out t2 h2 w2"]:
        """Repeat, then convolve."""
        in_time, in_space = self.stride
        repeated = x.repeat_interleave(in_time, dim=2)[:, :, in_time - 1 :]
        return self.convolution(repeated.repeat_interleave(in_space, dim=3).repeat_interleave(in_space, dim=4))


class CausalVideoAutoencoder(nn.Module):
    """Encoder to latents of unit mean square, and decoder; both see the present and the past only.

    A latent at time j stands for the frames 4 j - 3 to 4 j at a `time_compression` of 4, and depends on none after
    them; the first stands for the first frame alone. So an image is a clip of one frame.

    Example:
        >>> network = CausalVideoAutoencoder(CausalVideoAutoencoderConfig(hidden_width=4))
        >>> latents = network.encode(torch.zeros(2, 3, 9, 16, 24, dtype=torch.uint8))
        >>> latents.shape, network.latent_grid(9, 16, 24), network.decode(latents).shape
        (torch.Size([2, 8, 3, 4, 6]), (3, 4, 6), torch.Size([2, 3, 9, 16, 24]))
    """

    def __init__(self, config: CausalVideoAutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        widths, strides = config.widths, config.strides
        blocks = [[CausalBlock(width) for _ in range(config.blocks_per_level)] for width in widths]
        encoder: list[nn.Module] = [CausalConvolution(3, widths[0]), *blocks[0]]
        for level, stride in enumerate(strides):
            encoder += [CausalConvolution(widths[level], widths[level + 1], stride), *blocks[level + 1]]
        self.encoder = nn.Sequential(*encoder, CausalConvolution(widths[-1], config.latent_channels))
        decoder: list[nn.Module] = [CausalConvolution(config.latent_channels, widths[-1])]
        for level in reversed(range(len(widths))):
            decoder += [CausalBlock(widths[level]) for _ in range(config.blocks_per_level)]
            if level > 0:
                decoder.append(CausalUpsampling(widths[level], widths[level - 1], strides[level - 1]))
        self.decoder = nn.Sequential(*decoder, CausalConvolution(widths[0], 3))

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return self.config.latent_channels

    def latent_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the sizes (t, h, w) of the latents of a clip.

        Raises:
            ValueError: If the compression does not take clips of that size.
        """
        time, space = self.config.time_compression, self.config.space_compression
        if frames < 1 or (frames - 1) % time:
            nearest = max(0, frames - 1) // time * time + 1
            raise ValueError(
                f"frames ({frames}) must be 1 more than a multiple of time_compression ({time}), since the first frame "
                f"is kept alone; take {nearest} or {nearest + time}"
            )
        for name, value in (("height", height), ("width", width)):
            if value < 1 or value % space:
                raise ValueError(f"{name} ({value}) must be a positive multiple of space_compression ({space})")
        return 1 + (frames - 1) // time, height // space, width // space

    def encode_pixels(
        self, pixels: Float[Tensor, "batch 3 frames height width"]
    ) -> Float[Tensor, "batch channels t h w"]:
        """Return the latents of pixels in [-1, 1], with gradients."""
        self.latent_grid(*pixels.shape[2:])
        return unit_mean_square(_at_least_32_bits(self.encoder(pixels)))

    def decode_pixels(
        self, latents: Float[Tensor, "batch channels t h w"]
    ) -> Float[Tensor, "batch 3 frames height width"]:
        """Return pixels, about in [-1, 1], with gradients; latents of another mean square are scaled to 1."""
        return _at_least_32_bits(self.decoder(unit_mean_square(_at_least_32_bits(latents))))

    @torch.no_grad()
    def encode(self, video: UInt8[Tensor, "batch 3 frames height width"]) -> Float[Tensor, "batch channels t h w"]:
        """Return the latents of clips.

        Raises:
            ValueError: If the clips are of a size that `latent_grid` refuses.
        """
        return self.encode_pixels(PixelAutoencoder().encode(video))

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "batch channels t h w"]) -> UInt8[Tensor, "batch 3 frames height width"]:
        """Return the clips of latents."""
        return PixelAutoencoder().decode(self.decode_pixels(latents))
