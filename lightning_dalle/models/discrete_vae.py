"""The discrete VAE of the DALL-E paper (appendix A): images to a grid of codes and back."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from lightning_dalle.models.patch_codebook import PatchDecoder, PatchEncoder, fit_patch_codebook
from lightning_dalle.ops.dvae_losses import map_pixels, unmap_pixels

KernelSizes = tuple[int, int, int, int]


class Convolution(nn.Module):
    """Convolution that keeps the resolution, with the parameter names and initialisation of the released model.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Odd.
        full_precision: Compute in the parameters' own type under autocast, as the paper does next to the codes.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, *, full_precision: bool = False) -> None:
        super().__init__()
        weight = torch.empty(out_channels, in_channels, kernel_size, kernel_size)
        self.w = nn.Parameter(weight.normal_(std=(in_channels * kernel_size**2) ** -0.5))
        self.b = nn.Parameter(torch.zeros(out_channels))
        self.full_precision = full_precision

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch out height width"]:
        """Convolve with zero padding."""
        padding = self.w.shape[-1] // 2
        if not self.full_precision:
            return functional.conv2d(x, self.w, self.b, padding=padding)
        with torch.autocast(x.device.type, enabled=False):
            return functional.conv2d(x.to(self.w.dtype), self.w, self.b, padding=padding)


class ResidualBlock(nn.Module):
    """Bottleneck block: identity path + `gain` * four convolutions, each after a ReLU (appendix A.2)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_sizes: KernelSizes, gain: float):
        super().__init__()
        widths = [in_channels, *[out_channels // 4] * 3, out_channels]
        self.id_path = Convolution(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()
        self.res_path = nn.Sequential()
        for i, kernel_size in enumerate(kernel_sizes, start=1):
            # The first ReLU must leave the block's input to the identity path.
            self.res_path.add_module(f"relu_{i}", nn.ReLU(inplace=i > 1))
            self.res_path.add_module(f"conv_{i}", Convolution(widths[i - 1], widths[i], kernel_size))
        self.gain = gain

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch out height width"]:
        """Add the residual path."""
        return self.id_path(x) + self.gain * self.res_path(x)


def residual_groups(
    in_channels: int,
    widths: Sequence[int],
    blocks_per_group: int,
    kernel_sizes: KernelSizes,
    **resample: Callable[[], nn.Module],
) -> OrderedDict[str, nn.Module]:
    """Build the groups of blocks, one for each width, with a resampling layer after each but the last.

    Args:
        in_channels: Channels that enter the first group.
        widths: Channels that leave each group.
        blocks_per_group: Blocks of a group.
        kernel_sizes: Kernel sizes of the four convolutions of a block.
        **resample: Builders of the resampling layer, by its name in the group.
    """
    gain = (len(widths) * blocks_per_group) ** -2
    groups: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width in enumerate(widths, start=1):
        group = nn.Sequential()
        for block in range(1, blocks_per_group + 1):
            group.add_module(f"block_{block}", ResidualBlock(in_channels, width, kernel_sizes, gain))
            in_channels = width
        if number < len(widths):
            for name, build in resample.items():
                group.add_module(name, build())
        groups[f"group_{number}"] = group
    return groups


class Stack(nn.Sequential):
    """Layers in a row, some of them reached by name."""

    def convolution(self, name: str) -> Convolution:
        """Return a convolution by its dotted name."""
        return cast(Convolution, self.get_submodule(name))


def output_layers(in_channels: int, out_channels: int, *, full_precision: bool) -> nn.Sequential:
    """Build the ReLU and the 1x1 convolution that end a stack."""
    convolution = Convolution(in_channels, out_channels, 1, full_precision=full_precision)
    return nn.Sequential(OrderedDict(relu=nn.ReLU(), conv=convolution))


@dataclass(frozen=True, kw_only=True)
class DiscreteVAEConfig:
    """Sizes of a `DiscreteVAE`; the defaults are those of the released model.

    Attributes:
        image_size: Height and width in pixels, a multiple of `stride`.
        codebook_size: K, the number of codes.
        hidden_width: Channels at full resolution, a multiple of 4; they double at each halving of the resolution.
        num_groups: Groups of blocks; the resolution is halved between them.
        blocks_per_group: Residual blocks of a group.
        decoder_input_width: Channels of the code embedding that the decoder starts from.
        min_log_scale: Smooth floor of ln b. Not in the paper (`None`): on flat image areas its density is unbounded,
            and a small network spends itself there.
        patch_codebook: Add an affine map from patch to logits and a table from code to patch, so that k-means can
            initialise the code (`DiscreteVAE.initialise_patch_codebook`). Not in the paper.

    Raises:
        ValueError: If a size is not positive, or not a multiple where it has to be.
    """

    image_size: int = 256
    codebook_size: int = 8192
    hidden_width: int = 256
    num_groups: int = 4
    blocks_per_group: int = 2
    decoder_input_width: int = 128
    min_log_scale: float | None = None
    patch_codebook: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that no network can be built with."""
        for name in ("codebook_size", "hidden_width", "num_groups", "blocks_per_group", "decoder_input_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.hidden_width % 4:
            raise ValueError(
                f"hidden_width ({self.hidden_width}) must be a multiple of 4, since blocks narrow it to a quarter; "
                f"take {4 * (self.hidden_width // 4 + 1)}"
            )
        if self.image_size < 1 or self.image_size % self.stride:
            raise ValueError(
                f"image_size ({self.image_size}) must be a positive multiple of the stride {self.stride} = "
                f"2**(num_groups - 1); resize the images or change num_groups ({self.num_groups})"
            )

    @property
    def stride(self) -> int:
        """Pixels per code along a side."""
        return 2 ** (self.num_groups - 1)

    @property
    def grid_size(self) -> int:
        """Codes along a side."""
        return self.image_size // self.stride

    @property
    def image_tokens(self) -> int:
        """Codes of an image."""
        return self.grid_size**2


class Encoder(nn.Module):
    """Mapped pixels to logits over the codes; the layout of the released `dall_e.Encoder`."""

    def __init__(self, config: DiscreteVAEConfig) -> None:
        super().__init__()
        widths = [config.hidden_width * 2**i for i in range(config.num_groups)]
        groups = residual_groups(
            config.hidden_width, widths, config.blocks_per_group, (3, 3, 3, 1), pool=lambda: nn.MaxPool2d(2)
        )
        self.blocks = Stack(
            OrderedDict(
                input=Convolution(3, config.hidden_width, 7),
                **groups,
                output=output_layers(widths[-1], config.codebook_size, full_precision=True),
            )
        )
        self.patch = PatchEncoder(config.codebook_size, config.stride) if config.patch_codebook else None

    def forward(
        self, mapped: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch codes grid_height grid_width"]:
        """Return logits over the codes at each grid position, in 32 bits under autocast."""
        logits = self.blocks(mapped)
        return logits if self.patch is None else logits + self.patch(mapped)


class Decoder(nn.Module):
    """Codes to the parameters of the pixels' density; the layout of the released `dall_e.Decoder`."""

    def __init__(self, config: DiscreteVAEConfig) -> None:
        super().__init__()
        widths = [config.hidden_width * 2**i for i in reversed(range(config.num_groups))]
        groups = residual_groups(
            config.decoder_input_width,
            widths,
            config.blocks_per_group,
            (1, 3, 3, 3),
            upsample=lambda: nn.Upsample(scale_factor=2, mode="nearest"),
        )
        self.blocks = Stack(
            OrderedDict(
                input=Convolution(config.codebook_size, config.decoder_input_width, 1, full_precision=True),
                **groups,
                output=output_layers(widths[-1], 6, full_precision=False),
            )
        )
        self.patch = PatchDecoder(config.codebook_size, config.stride) if config.patch_codebook else None

    def forward(
        self, codes: Float[Tensor, "batch codes grid_height grid_width"] | Int[Tensor, "batch grid_height grid_width"]
    ) -> Float[Tensor, "batch 6 height width"]:
        """Return the maps (mu, ln b) of three channels each.

        Args:
            codes: Weights that sum to 1 over dimension 1, or hard codes, which are looked up instead of multiplied.
        """
        maps = self.blocks[1:](self._embed(codes)).float()
        if self.patch is None:
            return maps
        mu, log_scale = maps.chunk(2, dim=1)
        return torch.cat([mu + self.patch(codes), log_scale], dim=1)

    def _embed(self, codes: Tensor) -> Float[Tensor, "batch channels grid_height grid_width"]:
        convolution = self.blocks.convolution("input")
        if codes.is_floating_point():
            return convolution(codes)
        embedded = functional.embedding(codes, convolution.w[:, :, 0, 0].t()) + convolution.b
        return embedded.permute(0, 3, 1, 2).contiguous()


class DiscreteVAE(nn.Module):
    """Encoder and decoder with a codebook between them.

    Fully convolutional, except that `decode` takes its grid from `config.image_size`.

    Example:
        >>> network = DiscreteVAE(DiscreteVAEConfig(image_size=16, codebook_size=8, hidden_width=8, num_groups=3))
        >>> ids = network.encode(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
        >>> ids.shape, network.decode(ids).shape
        (torch.Size([2, 16]), torch.Size([2, 3, 16, 16]))
    """

    def __init__(self, config: DiscreteVAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def encode_logits(
        self, mapped: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch codes grid_height grid_width"]:
        """Return the logits of the codes of images that `map_pixels` has mapped."""
        return self.encoder(mapped)

    def decode_maps(
        self, codes: Float[Tensor, "batch codes grid_height grid_width"] | Int[Tensor, "batch grid_height grid_width"]
    ) -> tuple[Float[Tensor, "batch 3 height width"], Float[Tensor, "batch 3 height width"]]:
        """Return mu and ln b of the logit-Laplace density, in logit units, from relaxed or hard codes."""
        mu, log_scale = self.decoder(codes).chunk(2, dim=1)
        floor = self.config.min_log_scale
        # Softplus and not a clamp: below a clamp the scale would get no gradient to rise again.
        return mu, log_scale if floor is None else floor + functional.softplus(log_scale - floor)

    def _before_floor(self, log_scale: float) -> float:
        """Return the decoder's output that `decode_maps` turns into `log_scale`, or almost into the floor."""
        floor = self.config.min_log_scale
        return log_scale if floor is None else floor + math.log(math.expm1(max(log_scale - floor, 0.05)))

    @torch.no_grad()
    def encode(
        self, images: UInt8[Tensor, "batch 3 height width"] | Float[Tensor, "batch 3 height width"]
    ) -> Int[Tensor, "batch tokens"]:
        """Return the most probable codes in raster order, without noise.

        Args:
            images: `uint8` in 0..255, or floating point in `[0, 1]`.

        Raises:
            ValueError: If the images are not of `config.image_size`.
        """
        size = self.config.image_size
        if tuple(images.shape[1:]) != (3, size, size):
            raise ValueError(
                f"images {tuple(images.shape)} must have shape (batch, 3, {size}, {size}) of image_size ({size}); "
                "resize them or build the network for their size"
            )
        return self.encode_logits(map_pixels(images)).argmax(dim=1).flatten(1)

    @torch.no_grad()
    def decode(self, ids: Int[Tensor, "batch tokens"]) -> UInt8[Tensor, "batch 3 height width"]:
        """Return the images at the density's mode in logit space, ignoring ln b (appendix A.3).

        Raises:
            ValueError: If the number of codes is not that of `config.image_size`.
        """
        grid = self.config.grid_size
        if ids.ndim != 2 or ids.shape[1] != grid**2:
            raise ValueError(
                f"ids {tuple(ids.shape)} must have shape (batch, {grid**2}), the {grid} x {grid} grid of "
                f"image_size ({self.config.image_size})"
            )
        mu, _ = self.decode_maps(ids.unflatten(1, (grid, grid)))
        return unmap_pixels(mu.sigmoid()).mul(255).round().to(torch.uint8)

    @torch.no_grad()
    def initialise_patch_codebook(
        self,
        images: UInt8[Tensor, "batch 3 height width"] | Float[Tensor, "batch 3 height width"],
        *,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Set the patch codebook by k-means over `images` and silence the convolutions' outputs at the start.

        Args:
            images: Training images, a few hundred or more.
            temperature: Divides the codebook's logits; see `lightning_dalle.models.patch_codebook`.
            seed: The result is a function of the images and the seed.

        Raises:
            ValueError: If the network has no patch codebook, or the images have fewer distinct patches than codes.
        """
        if self.encoder.patch is None or self.decoder.patch is None:
            raise ValueError("patch_codebook (False) must be True in the network's config to be initialised")
        config = self.config
        mapped = map_pixels(images).to(self.encoder.patch.w.device)
        fitted = fit_patch_codebook(mapped, config.codebook_size, config.stride, temperature=temperature, seed=seed)
        self.encoder.patch.w.copy_(fitted.encoder_weight)
        self.encoder.patch.b.copy_(fitted.encoder_bias)
        self.decoder.patch.w.copy_(fitted.decoder_weight)
        outputs = [part.blocks.convolution("output.conv") for part in (self.encoder, self.decoder)]
        for convolution in outputs:
            convolution.w.zero_()
            convolution.b.zero_()
        outputs[1].b[3:] = self._before_floor(fitted.log_scale)

    @property
    def needs_patch_codebook(self) -> bool:
        """Whether the patch codebook is still at the zeros of its construction."""
        return self.decoder.patch is not None and not bool(self.decoder.patch.w.any())
