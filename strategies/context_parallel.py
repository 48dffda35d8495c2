"""Sequences cut among processes under a Trainer, for any LightningModule that says where."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, get_args

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer

from lightning_dalle.distributed.context_parallel.comm import ContextGroups, init_context_groups
from lightning_dalle.distributed.context_parallel.layout import LayoutKind
from lightning_dalle.distributed.context_parallel.plan import SequencePlan
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession
from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.strategies.cut_steps import CutStepsStrategy
from lightning_dalle.strategies.protocols import HasSequencePlan
from lightning_dalle.strategies.sharded_replicas import StartMethod

Attention = Literal["ring", "ulysses", "hybrid"]


class ContextParallelStrategy(CutStepsStrategy):
    """Each sequence is held by `context_parallel_degree` neighbouring processes, and attention is exactly that of the whole.

    The module says by `sequence_plan()` where sequences are cut. Processes of one context group get the same samples
    and draw the same random numbers, other groups different samples. Gradients are averaged over all processes, once an
    update if copies are whole. A step's result is that of one process with the whole sequence: also for lengths that
    do not divide, packed documents, and dropout.

    Logged every `log_every_n_steps` as `context/...`: what `ContextFigures` tells. CUDA runs the same code and was not
    tried.

    Args:
        context_parallel_degree: "auto" takes the processes of a machine.
        attention: `ring` sends keys and values round, `ulysses` trades positions for heads, `hybrid` does the latter
            among `head_size` neighbours and the former across.
        layout: How positions are dealt out; `zigzag` balances causal attention.
        plan: For a module that has no `sequence_plan`.
        shard_size: Processes that share one copy of the parameters (FSDP2), a multiple of `context_parallel_degree`; None keeps
            whole copies in plain tensors.
        powersgd: Compression of gradients between sharded copies.
        exclude: Names of parameters that are not compressed, or shell-style patterns.
        start_method: As all that follow, see `ShardedReplicasStrategy`.

    Raises:
        ValueError: If the sizes do not fit each other.
    """

    def __init__(
        self,
        context_parallel_degree: int | Literal["auto"] = "auto",
        attention: Attention = "ring",
        head_size: int | None = None,
        layout: LayoutKind = "zigzag",
        plan: SequencePlan | None = None,
        shard_size: int | None = None,
        powersgd: PowerSGDConfig | None = None,
        exclude: Sequence[str] = (),
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(shard_size, powersgd, exclude, start_method, process_group_backend, timeout)
        if context_parallel_degree != "auto" and context_parallel_degree < 1:
            raise ValueError(
                f"context_parallel_degree ({context_parallel_degree}) must be at least 1, or 'auto' for those of a machine"
            )
        if attention not in get_args(Attention):
            raise ValueError(f"attention ({attention!r}) must be one of {', '.join(get_args(Attention))}")
        if (attention == "hybrid") != (head_size is not None):
            raise ValueError(f"head_size ({head_size}) must be given with attention='hybrid', and with no other")
        if layout not in get_args(LayoutKind):
            raise ValueError(f"layout ({layout!r}) must be one of {', '.join(get_args(LayoutKind))}")
        self.context_parallel_degree = context_parallel_degree
        self.attention = attention
        self.head_size = head_size
        self.layout: LayoutKind = layout
        self.plan = plan
        self._groups: ContextGroups | None = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Each context group gets a part of the batch of its own."""
        size = self._context_size()
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    def setup_environment(self) -> None:
        """Join the process groups.

        Raises:
            ValueError: If the sizes do not divide the number of processes, or each other.
        """
        super().setup_environment()
        size = self._context_size()
        if self.world_size % size:
            raise ValueError(
                f"context_parallel_degree ({size}) must divide the number of processes ({self.world_size}); change it, or devices "
                "and num_nodes of the Trainer"
            )
        if not self.keeps_whole_copies and self.device_mesh["shard"].size() % size:
            raise ValueError(
                f"shard_size ({self.shard_size}) must be a multiple of context_parallel_degree ({size}), whose processes share "
                "copies too; change one of them, or leave shard_size out"
            )
        head_size = {"ring": 1, "ulysses": size}.get(self.attention, self.head_size)
        assert head_size is not None
        if head_size < 1 or size % head_size:
            raise ValueError(f"head_size ({head_size}) must divide context_parallel_degree ({size})")
        # A second run of the same Trainer keeps its groups.
        if self._groups is None:
            self._groups = init_context_groups(self.world_size, size, head_size, self.root_device.type)

    def setup(self, trainer: Trainer) -> None:
        """Cut the module's sequences, after everything else.

        Raises:
            TypeError: If nobody says where.
        """
        module = self.lightning_module
        assert module is not None
        assert self._groups is not None
        plan = self.plan
        if plan is None:
            if not isinstance(module, HasSequencePlan):
                raise TypeError(
                    f"{type(module).__name__} has no method sequence_plan, which says where its sequences are cut; "
                    "write it, or give plan to the strategy"
                )
            plan = module.sequence_plan()
        sequences = ContextParallelSession(plan, self._groups, self.layout)
        super().setup(trainer)
        self.cut_sequences(sequences)

    def _context_size(self) -> int:
        return self.num_processes if self.context_parallel_degree == "auto" else self.context_parallel_degree
