"""A plan attached to a module by hooks, and what processes must have in common before they share a sequence."""

import hashlib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_dalle.distributed.context_parallel.session import ContextParallelSession


def attach_plan(module: nn.Module, session: ContextParallelSession) -> list[RemovableHandle]:
    """Register hooks that shard the plan's inputs and gather its outputs while sequences are sharded, and do nothing otherwise.

    Raises:
        ValueError: If the plan names a submodule or an argument that does not exist.
    """
    handles = []
    for name, dims in session.plan.inputs.items():
        part = _submodule(module, name)
        signature = inspect.signature(part.forward)
        unknown = sorted(set(dims) - set(signature.parameters))
        if unknown:
            raise ValueError(f"{name} takes no argument {unknown}, which the plan shards; it takes {signature}")
        hook = partial(_shard_arguments, session, signature, dims)
        handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
    for name, dim in session.plan.outputs.items():
        handles.append(_submodule(module, name).register_forward_hook(partial(_gather_output, session, dim)))
    return handles


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{name!r} is no submodule of {type(module).__name__}, but the plan names it") from None


def _shard_arguments(
    session: ContextParallelSession,
    signature: inspect.Signature,
    dims: Mapping[str, int],
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not session.is_active:
        return None
    bound = signature.bind(*args, **kwargs)
    given = {name: bound.arguments[name] for name in dims if bound.arguments.get(name) is not None}
    bound.arguments.update(session.shard(given, dims))
    return bound.args, bound.kwargs


def _gather_output(session: ContextParallelSession, dim: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if not session.is_active:
        return None
    if isinstance(output, Tensor):
        return session.gather(output, dim)
    first, *others = output
    return session.gather(first, dim), *others


def validate_batches_agree(batch: Any, group: ProcessGroup, device: torch.device) -> None:
    """Refuse batches that differ within the group; all processes of the world must call it.

    Raises:
        ValueError: On all processes, if they differ in any group.
    """
    digest = torch.tensor([_digest(batch)], dtype=torch.int64, device=device)
    extremes = torch.cat([digest, -digest])
    distributed.all_reduce(extremes, op=distributed.ReduceOp.MAX, group=group)
    differs = (extremes[0] != -extremes[1]).to(torch.int64)
    distributed.all_reduce(differs, op=distributed.ReduceOp.MAX)
    if differs:
        raise ValueError(
            "the processes of a context group got different batches, but share one sequence; draw augmentations by "
            "sample instead of by rank or worker, and samplers by trainer.distributed_sampler_kwargs"
        )


def align_generators(group: ProcessGroup, device: torch.device) -> None:
    """Give torch's generators of all processes of the group the state of its first."""
    seed = torch.tensor([torch.initial_seed() >> 1], dtype=torch.int64, device=device)
    state = torch.get_rng_state().to(device)
    for tensor in (seed, state):
        distributed.broadcast(tensor, group=group, group_src=0)
    if device.type == "cuda":
        # Its own state has another form; a fresh one of the same seed serves as well.
        torch.cuda.manual_seed(int(seed))
    torch.set_rng_state(state.cpu())


def _digest(batch: Any) -> int:
    """Hash all tensors, numbers and texts."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            digest.update(repr(tuple(leaf.shape)).encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, bool | int | float | str | bytes):
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest(), "big") >> 1
