"""Strategies of the suite; imported as ``lightning_dalle.strategies``, which makes their short names known."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dalle.strategies.checkpoints import consolidate_checkpoint
from lightning_dalle.strategies.context_parallel import ContextParallelStrategy
from lightning_dalle.strategies.mesh import MeshStrategy
from lightning_dalle.strategies.sharded_powersgd import ShardedPowerSGDStrategy

__all__ = ["ContextParallelStrategy", "MeshStrategy", "ShardedPowerSGDStrategy", "consolidate_checkpoint"]

StrategyRegistry.register(
    "context_parallel",
    ContextParallelStrategy,
    description="Sequences sharded among processes, with exact attention",
    override=True,
)
StrategyRegistry.register(
    "sharded_powersgd",
    ShardedPowerSGDStrategy,
    description="FSDP2 inside a machine, PowerSGD between machines",
    override=True,
)
