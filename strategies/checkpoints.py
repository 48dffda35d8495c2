"""Checkpoints that are folders of shards: one file made of them, and whole tensors for a process that has no group."""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def consolidate_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Write the file that `load_from_checkpoint` reads on one device, from a folder that a sharded strategy wrote.

    Needs no process group, and as much memory as the file has bytes. Optimizer states are included; error-feedback
    buffers of compressed gradients, which only training on several machines has a use for, are not.

    Raises:
        FileNotFoundError: If the folder is no such checkpoint.
    """
    folder = Path(folder)
    if not (folder / "meta.pt").is_file():
        raise FileNotFoundError(f"folder ({folder}) must be a checkpoint of shards, with a file meta.pt")
    checkpoint: dict[str, Any] = _load_distributed_checkpoint(folder)
    # Lightning names them optimizer_0, optimizer_1 and so on.
    num_optimizers = sum(re.fullmatch(r"optimizer_\d+", name) is not None for name in checkpoint)
    states = [checkpoint.pop(f"optimizer_{number}") for number in range(num_optimizers)]
    torch.save({**checkpoint, "optimizer_states": states}, file)


class GatheringLauncher(_MultiProcessingLauncher):
    """Starts processes from a running one, as notebooks need it, and returns whole tensors instead of shards.

    The main process has no process group to read shards with.
    """

    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(trainer.lightning_module, options=options)
        output = super()._collect_rank_zero_results(trainer, results)
        if output is not None and output.weights_path is not None:
            # Lightning has written rank 0's shards there.
            trainer.strategy.checkpoint_io.save_checkpoint(state, output.weights_path)
        return output
