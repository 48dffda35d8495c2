"""Hybrid sharding (HSDP) with FSDP2: blocks sharded within a machine, replicated between machines."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor


@torch.no_grad()
def share_first_weights(module: nn.Module, device: torch.device) -> None:
    """Give all processes the parameters and buffers of the first; all of them must call it.

    Tensors become contiguous, as messages and matrices of gradients need them. Those that are yet to be materialised
    are left alone.

    Args:
        device: Where messages travel, one that the world's backend serves.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            continue
        tensor.data = tensor.data.contiguous()
        weights = tensor.detach().to(device)
        distributed.broadcast(weights, 0)
        tensor.copy_(weights)


def is_sharded(module: nn.Module) -> bool:
    """Whether a part of the module's parameters is distributed already."""
    return any(isinstance(part, FSDPModule) for part in module.modules()) or any(
        isinstance(parameter, DTensor) for parameter in module.parameters()
    )


def shard_blocks(module: nn.Module, mesh: DeviceMesh, methods: tuple[str, ...] = ()) -> None:
    """Shard the parameters, in place, over a mesh of one dimension.

    A block is a member of an outermost `ModuleList`. Its parameters are gathered while it runs, those of the others
    while the whole module does. A block that shares a parameter with something outside of it counts to the rest.
    Parameters in another memory format, such as channels last, become contiguous, as FSDP2 needs them.

    Args:
        methods: Those beside `forward` through which the whole module is run.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    uses = _uses(module)
    for block in [block for block in _blocks(module) if _can_stand_alone(block, uses)]:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for method in methods:
        if hasattr(module, method):
            register_fsdp_forward_method(module, method)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _blocks(child)


def _can_stand_alone(block: nn.Module, uses: Counter[nn.Parameter]) -> bool:
    """Whether the block can be run, and no parameter of it is used elsewhere."""
    inside = _uses(block)
    runs = not isinstance(block, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    return runs and bool(inside) and all(uses[parameter] == count for parameter, count in inside.items())


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places each parameter stands."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
