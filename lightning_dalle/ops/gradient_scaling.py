"""Scaling of gradients at the borders of a residual block (Ramesh et al. 2021, appendix D).

Three identities whose backward passes are none. The scale is a function, read in the backward pass, so that all three
of a block agree whenever their graph was built.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Scale = Callable[[], float]


class _UnscaledInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: Scale) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0] / ctx.scale()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), None


class _ScaledOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: Scale) -> Tensor:
        ctx.scale, ctx.dtype = scale, tensor.dtype
        # A copy also of what is wide already: a view could not be added to in place.
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0] * ctx.scale()).to(ctx.dtype), None


class _UnscaledParameter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, scale: Scale) -> Tensor:
        ctx.scale = scale
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.scale(), None


def unscale_input(tensor: Float[Tensor, "..."], scale: Scale) -> Float[Tensor, "..."]:
    """Return what enters a block: its gradient is divided by the scale, and becomes 0 where it is not finite.

    So a gradient that overflows in one block does not reach the blocks before it.
    """
    return _UnscaledInput.apply(tensor, scale)


def scale_output(tensor: Float[Tensor, "..."], scale: Scale) -> Float[Tensor, "..."]:
    """Return what leaves a block, in 32 bits: its gradient is multiplied by the scale, then rounded to the type."""
    return _ScaledOutput.apply(tensor, scale)


def unscale_parameter(parameter: Float[Tensor, "..."], scale: Scale) -> Float[Tensor, "..."]:
    """Return a parameter for use in a block: its gradient is divided by the scale, and stays non-finite where it is."""
    return _UnscaledParameter.apply(parameter, scale)
