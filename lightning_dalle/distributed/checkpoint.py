"""Module and optimizer states from a folder of shards or from a file, into sharded or unsharded tensors."""

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def load_module(module: nn.Module, folder: Path, key: str, strict: bool) -> None:
    """Load the module's state that is stored under `key`; all processes must call it."""
    state = get_model_state_dict(module)
    distributed_checkpoint.load({key: state}, checkpoint_id=folder)
    module.load_state_dict(state, strict=strict)


def load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, key: str) -> None:
    """Load the optimizer's state that is stored under `key`; all processes must call it.

    A parameter that got no gradient before the save has no state, there or afterwards; torch alone would refuse the
    checkpoint.
    """
    state = get_optimizer_state_dict(module, optimizer)
    distributed_checkpoint.load({key: state}, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    prefix = f"{key}.state."
    _forget_states(module, optimizer, {entry.removeprefix(prefix).rpartition(".")[0] for entry in stored})


def load_file(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], file: Path, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load an ordinary or consolidated checkpoint, and return the rest of it; all processes must call it."""
    checkpoint: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=weights_only)
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(module, checkpoint.pop("state_dict"), options=options)
    for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", ()), strict=False):
        named = _by_name(module, optimizer, state)
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_optimizer_state_dict(module, optimizer, optim_state_dict=named, options=options)
        _forget_states(module, optimizer, set(named["state"]))
    return checkpoint


def _by_name(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by names of parameters, whether it was written by names or by numbers."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]

    def name_of(key: str | int) -> str:
        return order[key] if isinstance(key, int) else key

    groups = [{**group, "params": [name_of(key) for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {name_of(key): value for key, value in state["state"].items()}, "param_groups": groups}


def _forget_states(module: nn.Module, optimizer: torch.optim.Optimizer, stored: Container[str]) -> None:
    """Remove the states that torch makes up where none were stored."""
    for name, parameter in module.named_parameters():
        if name not in stored:
            optimizer.state.pop(parameter, None)
