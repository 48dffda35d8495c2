"""Figures of gradients, updates and activations, by block."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_dalle.ops.local_part import local_part

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
        gradients = [local_part(item.grad) for item in parameters if item.grad is not None and item.grad.numel()]
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
        flat = [local_part(parameter.detach()).reshape(-1) for parameter in parameters]
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
