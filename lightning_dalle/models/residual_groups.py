"""Convolutions and bottleneck blocks of the discrete VAE (appendix A.2 of the DALL-E paper)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

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
        kernel_sizes: Of the four convolutions of a block.
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
