"""Optimizer state from a checkpoint of shards, where some parameters never had any."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def load_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, key: str) -> None:
    """Read the state that stands under `key`; all processes must call it.

    A parameter that got no gradient before the save has no state, there or afterwards; torch alone would refuse the
    checkpoint.
    """
    state = get_optimizer_state_dict(module, optimizer)
    distributed_checkpoint.load({key: state}, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, parameter in module.named_parameters():
        if not any(entry.startswith(f"{key}.state.{name}.") for entry in stored):
            optimizer.state.pop(parameter, None)
