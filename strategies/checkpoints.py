"""Checkpoints of replicated and of sharded parameters, and the one file that is made of shards."""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

from lightning_dalle.distributed.checkpoint import load_file, load_module, load_optimizer


class FileCheckpoints:
    """One file, as Lightning's strategies for unsharded parameters write and read it.

    Attributes:
        kind: Lightning's strategy whose checkpoints these are; its methods run on the strategy that holds this object.
        restored_by_lightning: Whether Lightning loads the states of what `load` returns.
    """

    kind: type[ParallelStrategy] = ParallelStrategy  # type: ignore[type-abstract]
    restored_by_lightning = True

    def __init__(self, strategy: ModelParallelStrategy) -> None:
        self._strategy = strategy

    def module_state(self) -> dict[str, Any]:
        """Return the module's state, of this process's shards where it is sharded."""
        return self.kind.lightning_module_state_dict(self._strategy)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, of this process's shards where it is sharded."""
        return self.kind.optimizer_state(self._strategy, optimizer)

    def save(self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None) -> None:
        """Write a checkpoint; all processes must call it."""
        self.kind.save_checkpoint(self._strategy, checkpoint, path, storage_options)

    def load(self, module: LightningModule, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint; all processes must call it."""
        return self.kind.load_checkpoint(self._strategy, path, weights_only)


class ShardedCheckpoints(FileCheckpoints):
    """Folder of shards, which is loaded into the module and its optimizers on any later mesh; a file is too."""

    kind = ModelParallelStrategy
    restored_by_lightning = False

    def load(self, module: LightningModule, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint, and return what is left of it; all processes must call it."""
        optimizers = self._strategy.optimizers
        if not path.is_dir():
            return load_file(module, optimizers, path, module.strict_loading, weights_only)
        load_module(module, path, "state_dict", module.strict_loading)
        for number, optimizer in enumerate(optimizers):
            load_optimizer(module, optimizer, path, f"optimizer_{number}")
        remainder: dict[str, Any] = torch.load(path / "meta.pt", weights_only=weights_only)
        return remainder


def consolidate_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Write the file that `load_from_checkpoint` reads on one device, from a folder that a sharded strategy wrote.

    Needs no process group, and as much memory as the file has bytes. Optimizer states are included; error-feedback
    buffers, which only training on several replicas uses, are not.

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
    """Starts processes from a running one, as notebooks need it, and returns gathered tensors instead of shards.

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
