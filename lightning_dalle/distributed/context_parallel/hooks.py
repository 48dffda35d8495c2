"""A plan attached to a module by hooks, and generators that draw alike on all processes of a context group."""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from lightning_dalle.distributed.context_parallel.session import ContextParallelSession


def attach_plan(module: nn.Module, session: ContextParallelSession) -> list[RemovableHandle]:
    """Register hooks that carry out the plan while sequences are sharded, and do nothing otherwise.

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
    for name in session.plan.unsharded:
        handles += _run_unsharded(_submodule(module, name), session)
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


def _run_unsharded(submodule: nn.Module, session: ContextParallelSession) -> list[RemovableHandle]:
    """Make sequences whole during the forward pass of a submodule, which may call itself."""
    entered: list[ExitStack] = []

    def enter(_: nn.Module, args: Any) -> None:
        entered.append(ExitStack())
        if session.is_active:
            entered[-1].enter_context(session.unsharded())

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        entered.pop().close()

    return [submodule.register_forward_pre_hook(enter), submodule.register_forward_hook(leave, always_call=True)]


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
