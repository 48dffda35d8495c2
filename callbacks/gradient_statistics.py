"""Statistics of gradients, updates and activations of each block."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_dalle.callbacks.loss_scale_sources import LossScaleSource
from lightning_dalle.ops.finite import to_local

OUTSIDE = "outside"
# Elements of a parameter that are looked at for its update: a second copy of all parameters would be a lot.
_SAMPLE = 2**16

Groups = dict[str, list[nn.Parameter]]


def parameters_by_block(module: nn.Module, blocks: Mapping[str, Sequence[nn.Module]]) -> Groups:
    """Return the trained parameters of each block, and those outside of all of them; no group is empty."""
    groups: Groups = {
        name: [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
        for name, parts in blocks.items()
    }
    inside = {parameter for parameters in groups.values() for parameter in parameters}
    groups[OUTSIDE] = [item for item in module.parameters() if item.requires_grad and item not in inside]
    return {name: parameters for name, parameters in groups.items() if parameters}


def gradient_figures(groups: Groups) -> dict[str, dict[str, float]]:
    """Return norm, largest absolute value and share of zeros of each group's gradient; of shards this rank's part."""
    rows = {}
    for name, parameters in groups.items():
        gradients = [to_local(item.grad) for item in parameters if item.grad is not None and item.grad.numel()]
        if gradients:
            norm = torch.stack([value.double() for value in torch._foreach_norm(gradients)]).norm()
            largest = torch.stack([value.double() for value in torch._foreach_norm(gradients, float("inf"))]).max()
            filled = torch.stack([gradient.count_nonzero() for gradient in gradients]).sum()
            size = sum(gradient.numel() for gradient in gradients)
            rows[name] = torch.stack([norm, largest, 1 - filled.double() / size])
    # One wait for the device.
    values = torch.stack(list(rows.values())).tolist() if rows else []
    names = ("gradient_norm", "largest_gradient", "zero_gradients")
    return {group: dict(zip(names, row, strict=True)) for group, row in zip(rows, values, strict=True)}


def samples(groups: Groups) -> dict[str, Tensor]:
    """Return some elements of each group, copied: evenly spread ones of each parameter."""
    picked = {}
    for name, parameters in groups.items():
        flat = [to_local(parameter.detach()).reshape(-1) for parameter in parameters]
        picked[name] = torch.cat([part[:: max(1, part.numel() // _SAMPLE)].double() for part in flat])
    return picked


def update_ratios(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """Return |change| / |value| of each group's samples."""
    ratios = {name: (after[name] - value).norm() / value.norm() for name, value in before.items()}
    return dict(zip(ratios, torch.stack(list(ratios.values())).tolist(), strict=True)) if ratios else {}


@contextmanager
def largest_activations(blocks: Mapping[str, Sequence[nn.Module]]) -> Iterator[dict[str, Tensor]]:
    """Collect the largest absolute output of each block while this lasts."""
    largest: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, parts in blocks.items():
            stack.callback(parts[-1].register_forward_hook(partial(_note_largest, largest, name)).remove)
        yield largest


def _note_largest(largest: dict[str, Tensor], name: str, part: nn.Module, args: Any, output: Any) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            value = tensor.detach().abs().amax().float()
            largest[name] = torch.maximum(largest.get(name, value), value)


class UpdateFigures:
    """Looks at one update, from before its first forward pass until after it."""

    def __init__(self, pl_module: LightningModule, source: LossScaleSource) -> None:
        blocks = source.blocks()
        self._groups = parameters_by_block(pl_module, blocks)
        self._stack = ExitStack()
        self._activations = self._stack.enter_context(largest_activations(blocks))
        self._gradients: dict[str, dict[str, float]] = {}
        self._before: dict[str, Tensor] = {}

    def before_step(self) -> None:
        """Look at the gradients, and keep what the parameters are."""
        self._stack.close()
        self._gradients = gradient_figures(self._groups)
        self._before = samples(self._groups)

    def after_step(self) -> dict[str, dict[str, float]]:
        """Return the metrics, each by block."""
        by_metric: dict[str, dict[str, float]] = {}
        for block, metrics in self._gradients.items():
            for metric, value in metrics.items():
                by_metric.setdefault(metric, {})[block] = value
        by_metric["update_ratio"] = update_ratios(self._before, samples(self._groups))
        by_metric["largest_activation"] = {name: value.item() for name, value in self._activations.items()}
        return by_metric
