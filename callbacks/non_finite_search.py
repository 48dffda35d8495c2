"""A training step that can be run once more, as it was."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite value of a training step.

    Attributes:
        module: Name of the module whose output, output's gradient or parameter's gradient it is; empty if it is the
            batch or the loss itself.
        direction: Where it was met.
        dtype: Dtype of the tensor it is in.
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


class StepReplay:
    """Batch and random state of a training step, which a second run of it needs."""

    def __init__(self, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch, self.batch_idx = batch, batch_idx
        self._random_state = torch.get_rng_state()
        self._device = pl_module.device
        self._device_state = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def find_first_non_finite(
        self, trainer: Trainer, pl_module: LightningModule, loss_factor: float
    ) -> NonFinite | None:
        """Run the step under the Trainer's precision; nothing is logged, and global random states are put back."""
        with _silent(pl_module), isolate_rng(), trainer.precision_plugin.train_step_context():
            torch.set_rng_state(self._random_state)
            if self._device_state is not None:
                torch.cuda.set_rng_state(self._device_state, self._device)
            return find_first_non_finite(pl_module, self.batch, lambda: self._loss(pl_module), loss_factor)

    def _loss(self, pl_module: LightningModule) -> Tensor:
        takes_index = "batch_idx" in inspect.signature(pl_module.training_step).parameters
        arguments = (self.batch, self.batch_idx) if takes_index else (self.batch,)
        output = pl_module.training_step(*arguments)
        loss = output["loss"] if isinstance(output, Mapping) else output
        assert isinstance(loss, Tensor)
        return loss


@contextmanager
def _silent(pl_module: LightningModule) -> Iterator[None]:
    """Leave out what a second run of a training step logs: it would count twice, or be refused in the hook."""
    nothing: Any = lambda *args, **kwargs: None  # noqa: E731
    pl_module.log = pl_module.log_dict = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pl_module.log, pl_module.log_dict
