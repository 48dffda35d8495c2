"""Copies of a model that are sharded, or whole and in plain tensors."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer

from lightning_dalle.distributed.hsdp import is_sharded
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.sharded import average_plain_gradients
from lightning_dalle.strategies.sharded_powersgd import ShardedPowerSGDStrategy
from lightning_dalle.strategies.sharded_replicas import ShardedReplicasStrategy, StartMethod


class WholeOrShardedStrategy(ShardedPowerSGDStrategy):
    """`ShardedPowerSGDStrategy`, or whole copies whose gradients are averaged over all processes once an update.

    Checkpoints of whole copies are ordinary files, those of sharded ones folders.

    Args:
        shard_size: Processes that share one copy of the parameters by FSDP2; None keeps whole copies.
        powersgd: How gradients between sharded copies are compressed; None sends them whole.
        exclude: As all that follow, see `ShardedPowerSGDStrategy`.

    Raises:
        ValueError: If whole copies are to be compressed.
    """

    def __init__(
        self,
        shard_size: int | Literal["auto"] | None,
        powersgd: PowerSGDConfig | None,
        exclude: Sequence[str],
        start_method: StartMethod,
        process_group_backend: str | None,
        timeout: timedelta | None,
    ) -> None:
        if shard_size is None and powersgd is not None:
            raise ValueError("powersgd compresses gradients of sharded copies, but shard_size is None; give shard_size")
        super().__init__(
            # The mesh of whole copies has shards of one process.
            shard_size=1 if shard_size is None else shard_size,
            exclude=("*",) if powersgd is None else exclude,
            start_method=start_method,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.keeps_whole_copies = shard_size is None
        self.config = powersgd or self.config

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether optimizers are in the file that Lightning reads."""
        return self.keeps_whole_copies

    def setup(self, trainer: Trainer) -> None:
        """Distribute the module, then make optimizers."""
        if self.keeps_whole_copies:
            ShardedReplicasStrategy.setup(self, trainer)
        else:
            super().setup(trainer)

    def distribute(self, module: LightningModule) -> None:
        """Start from the same weights, and shard them or not.

        Raises:
            ValueError: If the module sharded itself where copies are to be whole.
        """
        if self.keeps_whole_copies and is_sharded(module):
            raise ValueError(f"{type(module).__name__} shards its parameters, but shard_size is None; give shard_size")
        super().distribute(module)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make optimizers, and take charge of sharded gradients."""
        if self.keeps_whole_copies:
            ShardedReplicasStrategy.setup_optimizers(self, trainer)
        else:
            super().setup_optimizers(trainer)

    def synchronise(self) -> None:
        """Average the gradients of an update."""
        if not self.keeps_whole_copies:
            super().synchronise()
            return
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        average_plain_gradients([part for group in groups for part in group if part.requires_grad])

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state."""
        if self.keeps_whole_copies:
            return ParallelStrategy.lightning_module_state_dict(self)
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state."""
        if self.keeps_whole_copies:
            return ParallelStrategy.optimizer_state(self, optimizer)
        return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file, or a folder of shards."""
        if self.keeps_whole_copies:
            ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what was written at any number of processes."""
        if self.keeps_whole_copies:
            return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the module's state from a file; that of a folder is there already."""
        if self.keeps_whole_copies:
            ParallelStrategy.load_model_state_dict(self, checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the optimizers' states from a file; those of a folder are there already."""
        if self.keeps_whole_copies:
            ParallelStrategy.load_optimizer_state_dict(self, checkpoint)
