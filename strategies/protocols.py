"""Optional protocols that the strategies look for in a LightningModule and in a precision plugin."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from lightning_dalle.distributed.context_parallel.plan import SequencePlan


@runtime_checkable
class NamesUncompressed(Protocol):
    """Module that names parameters whose gradients compression would hurt, such as those of unembeddings."""

    def uncompressed_parameters(self) -> Sequence[str]:
        """Return names of parameters, or shell-style patterns of names."""
        ...


@runtime_checkable
class HasSequencePlan(Protocol):
    """Module whose sequences can be sharded."""

    def sequence_plan(self) -> SequencePlan:
        """Return which tensors are sharded along which dimension."""
        ...


@runtime_checkable
class SkipsUpdates(Protocol):
    """Precision plugin that looks for gradients that are not finite, on all ranks, and skips the step itself."""

    @property
    def update_is_skipped(self) -> bool:
        """Whether the last step was skipped."""
        ...
