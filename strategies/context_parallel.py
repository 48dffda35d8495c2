"""Sequences sharded among processes, with exact attention."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_dalle.distributed.context_parallel.layout import LayoutKind
from lightning_dalle.distributed.context_parallel.plan import AttentionKind, ContextParallelConfig, SequencePlan
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.strategies.mesh import MeshStrategy, StartMethod


class ContextParallelStrategy(MeshStrategy):
    """`MeshStrategy` in which each sequence is sharded over `context_parallel_degree` neighbouring processes.

    The module says by `sequence_plan()` where its sequences are sharded. Processes of one context group get the same
    samples and draw the same random numbers, other groups different samples. Gradients are averaged over all processes.
    The result of a step is that of one process with the unsharded sequence: also for lengths that do not divide, packed
    documents, and dropout. `ContextParallelMonitor` logs what it costs.

    Args:
        context_parallel_degree: As the four that follow, see `ContextParallelConfig`.
        shard_size: As all that follow, see `MeshStrategy`.
    """

    def __init__(
        self,
        context_parallel_degree: int | Literal["auto"] = "auto",
        attention: AttentionKind = "ring",
        ulysses_degree: int | None = None,
        layout: LayoutKind = "zigzag",
        plan: SequencePlan | None = None,
        shard_size: int | Literal["auto"] | None = None,
        powersgd: PowerSGDConfig | None = None,
        exclude: Sequence[str] = (),
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        context_parallel = ContextParallelConfig(
            degree=context_parallel_degree,
            attention=attention,
            ulysses_degree=ulysses_degree,
            layout=layout,
            plan=plan,
        )
        super().__init__(shard_size, powersgd, exclude, context_parallel, start_method, process_group_backend, timeout)
