"""Cuts and joins at the borders of submodules, as a plan names them."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dalle.distributed.context_parallel.session import ContextParallelSession


def attach_plan(module: nn.Module, sequences: ContextParallelSession) -> list[RemovableHandle]:
    """Hooks that cut the plan's inputs and join its outputs while sequences are cut, and do nothing otherwise.

    Raises:
        ValueError: If the plan names a submodule or an argument that does not exist.
    """
    handles = []
    for name, dims in sequences.plan.inputs.items():
        part = _submodule(module, name)
        signature = inspect.signature(part.forward)
        unknown = sorted(set(dims) - set(signature.parameters))
        if unknown:
            raise ValueError(f"{name} takes no argument {unknown}, which the plan cuts; it takes {signature}")
        hook = partial(_cut_arguments, sequences, signature, dims)
        handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
    for name, dim in sequences.plan.outputs.items():
        handles.append(_submodule(module, name).register_forward_hook(partial(_join_output, sequences, dim)))
    return handles


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise ValueError(f"{name!r} is no submodule of {type(module).__name__}, but the plan names it") from None


def _cut_arguments(
    sequences: ContextParallelSession,
    signature: inspect.Signature,
    dims: Mapping[str, int],
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not sequences.is_active:
        return None
    bound = signature.bind(*args, **kwargs)
    given = {name: bound.arguments[name] for name in dims if bound.arguments.get(name) is not None}
    bound.arguments.update(sequences.cut(given, dims))
    return bound.args, bound.kwargs


def _join_output(sequences: ContextParallelSession, dim: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if not sequences.is_active:
        return None
    if isinstance(output, Tensor):
        return sequences.join(output, dim)
    first, *others = output
    return sequences.join(first, dim), *others
