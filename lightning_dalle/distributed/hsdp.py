"""Fully sharded (FSDP2) and hybrid sharded (HSDP) parameters: sharded within a replica, equal between replicas."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor


@torch.no_grad()
def sync_module_states(module: nn.Module, device: torch.device) -> None:
    """Broadcast the parameters and buffers of rank 0; all processes must call it.

    Tensors become contiguous, as messages and matrices of gradients need them. Those on the meta device are left alone.

    Args:
        device: Device of the messages, one that the world's backend serves.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            continue
        tensor.data = tensor.data.contiguous()
        message = tensor.detach().to(device)
        distributed.broadcast(message, 0)
        tensor.copy_(message)


def is_sharded(module: nn.Module) -> bool:
    """Return whether any parameter of the module is distributed already."""
    return any(isinstance(part, FSDPModule) for part in module.modules()) or any(
        isinstance(parameter, DTensor) for parameter in module.parameters()
    )


def validate_shards(parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Refuse parameters that are not sharded, or over something else than this mesh of one dimension.

    Raises:
        ValueError: If there is one.
    """
    ranks = mesh.mesh.tolist()
    for name, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is not sharded, though other parameters are; create it in the module's __init__ or "
                "configure_model, and leave it out of ignored_params"
            )
        if parameter.device_mesh is not mesh and parameter.device_mesh.mesh.tolist() != ranks:
            raise ValueError(
                f"{name} is sharded over {parameter.device_mesh}, which must be the strategy's shard_mesh: "
                "fully_shard(block, mesh=self.trainer.strategy.shard_mesh)"
            )


@torch.no_grad()
def validate_gradients_agree(parameters: Mapping[str, nn.Parameter], shard_group: ProcessGroup) -> None:
    """Refuse a step in which processes of a replica used different parameters; all of them must call it.

    FSDP2 packs the gradients that each process has, one after another, and so adds those of different parameters.

    Raises:
        RuntimeError: If there is a gradient of a parameter on some processes of the replica only.
    """
    present = torch.tensor([parameter.grad is not None for parameter in parameters.values()], dtype=torch.int32)
    # The larger one of both flags over all processes: 1 and 1 where they differ.
    flags = torch.stack([present, 1 - present]).to(next(iter(parameters.values())).device)
    distributed.all_reduce(flags, op=distributed.ReduceOp.MAX, group=shard_group)
    differing = [name for name, differs in zip(parameters, flags.all(dim=0).tolist(), strict=True) if differs]
    if differing:
        raise RuntimeError(
            f"{differing[0]} has a gradient on some processes of its replica only, which FSDP2 mixes with gradients of "
            "other parameters; use the same parameters on all processes, or shard_size=None"
        )


def shard_remainder(module: nn.Module, methods: tuple[str, ...] = ()) -> None:
    """Shard what a module that shards some of its submodules has left, over their mesh.

    Args:
        methods: Methods beside `forward` through which the whole module is run.
    """
    parameters = list(module.parameters())
    meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
    if len(meshes) == len(parameters) or isinstance(module, FSDPModule):
        return
    fully_shard(module, mesh=meshes[0])
    _register_methods(module, methods)


def shard_blocks(module: nn.Module, mesh: DeviceMesh, methods: tuple[str, ...] = ()) -> None:
    """Shard the parameters, in place, over a mesh of one dimension.

    A block is a member of an outermost `ModuleList`. Its parameters are gathered while it runs, all others while the
    whole module does. A block that shares a parameter with something outside of it is not sharded on its own.
    Parameters in another memory format, such as channels last, become contiguous, as FSDP2 needs them.

    Args:
        methods: Methods beside `forward` through which the whole module is run.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    uses = _uses(module)
    for block in [block for block in _blocks(module) if _can_stand_alone(block, uses)]:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    _register_methods(module, methods)


def _register_methods(module: nn.Module, methods: tuple[str, ...]) -> None:
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
    """Return whether the block can be run, and no parameter of it is used elsewhere."""
    inside = _uses(block)
    runs = not isinstance(block, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
    return runs and bool(inside) and all(uses[parameter] == count for parameter, count in inside.items())


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the names of each parameter."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
