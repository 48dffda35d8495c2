"""Where a training step first turns non-finite, found by running it once more under a magnifying glass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value of a training step.

    Attributes:
        module: Name of the module whose output, output's gradient or parameter's gradient it is; empty if it is the
            batch or the loss itself.
        direction: Where it was met.
        dtype: Of the tensor it is in.
    """

    module: str
    direction: Literal["batch", "forward", "loss", "backward"]
    dtype: torch.dtype

    def __str__(self) -> str:
        """In words."""
        place = f"the {self.direction} pass of {self.module}" if self.module else f"the {self.direction}"
        return f"{place} in {str(self.dtype).removeprefix('torch.')}"


def find_first_non_finite(
    module: LightningModule, batch: Any, compute_loss: Callable[[], Tensor], loss_factor: float
) -> NonFinite | None:
    """Compute a loss and its gradients, and return the first non-finite value on the way, or None.

    No gradient is accumulated. Buffers are put back; what else the loss changes is changed twice.

    Args:
        loss_factor: Multiplies the loss before the backward pass.
    """
    for tensor in tree_leaves(batch):
        if _is_bad(tensor):
            return NonFinite("", "batch", tensor.dtype)
    found: list[NonFinite] = []
    with _watched(module, found), _same_buffers(module), torch.enable_grad():
        loss = compute_loss()
        if not found and _is_bad(loss):
            found.append(NonFinite("", "loss", loss.dtype))
        if not found:
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss * loss_factor, parameters, allow_unused=True)
    return found[0] if found else None


def _is_bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all())


@contextmanager
def _watched(module: nn.Module, found: list[NonFinite]) -> Iterator[None]:
    """Look at the output of every submodule, and later at the gradients of those and of parameters."""
    with ExitStack() as stack:
        for name, part in module.named_modules():
            stack.callback(part.register_forward_hook(partial(_look_at_output, name, found)).remove)
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(partial(_look_at_gradient, name, found)).remove)
        yield


def _look_at_output(name: str, found: list[NonFinite], part: nn.Module, args: Any, output: Any) -> None:
    for tensor in tree_leaves(output):
        if _is_bad(tensor):
            found.append(NonFinite(name, "forward", tensor.dtype))
        elif isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_look_at_gradient, name, found))


def _look_at_gradient(name: str, found: list[NonFinite], gradient: Tensor) -> None:
    if _is_bad(gradient):
        found.append(NonFinite(name, "backward", gradient.dtype))


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
