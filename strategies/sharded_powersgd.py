"""Parameters sharded inside a machine, low-rank gradients between machines (Ramesh et al. 2021, section 2.5)."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.strategies.mesh import MeshStrategy, StartMethod


class ShardedPowerSGDStrategy(MeshStrategy):
    """`MeshStrategy` with FSDP2 over the devices of a machine and PowerSGD between machines.

    With `shard_size=1` this is data parallelism with PowerSGD, in plain tensors; with one replica it is FSDP2.
    `PowerSGDMonitor` logs what compression does.

    Args:
        shard_size: Devices that share one replica of the parameters; "auto" takes those of a machine.
        powersgd: What is compressed, and how.
        exclude: As all that follow, see `MeshStrategy`.

    Example:
        >>> from lightning_dalle import PowerSGDConfig
        >>> strategy = ShardedPowerSGDStrategy(shard_size=8, powersgd=PowerSGDConfig(matrix_approximation_rank=112))
        >>> strategy.powersgd.matrix_approximation_rank
        112
    """

    def __init__(
        self,
        shard_size: int | Literal["auto"] = "auto",
        powersgd: PowerSGDConfig = PowerSGDConfig(),
        exclude: Sequence[str] = (),
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(shard_size, powersgd, exclude, None, start_method, process_group_backend, timeout)
