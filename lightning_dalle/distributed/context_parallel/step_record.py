"""What happened in one step: by which a tensor is known as a shard of one of its sequences, or as whole."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout


@dataclass
class StepRecord:
    """Record of one step, which its backward pass looks up when it recomputes parts of the forward pass.

    It grows, but what it says of a length never changes: so it does not matter in which order things are recomputed.
    Tensors carry no mark of the sequence that they belong to, and are known by their number of positions.

    Attributes:
        layouts: By the lengths of the sequences that were sharded.
        whole_lengths: Lengths of sequences that unsharded submodules have seen.
        masks: Document ids and padding mask of the batch, as arguments of a mask.
        redirected_calls: Calls of attention and dropout so far.
        has_shards_behind: Whether processes went on with different positions after something was gathered.
    """

    rank: int
    num_ranks: int
    layout_kind: LayoutKind
    masks: dict[str, Tensor] = field(default_factory=dict)
    layouts: dict[int, SequenceLayout] = field(default_factory=dict)
    whole_lengths: set[int] = field(default_factory=set)
    redirected_calls: int = 0
    has_attended: bool = False
    has_mean: bool = False
    has_gathered: bool = False
    has_shards_behind: bool = False

    def layout(self, length: int) -> SequenceLayout:
        """Return the layout of a sequence, whether it was sharded or not."""
        return SequenceLayout(length, self.num_ranks, self.layout_kind)

    def add(self, length: int) -> SequenceLayout:
        """Return the layout of a sequence that is sharded now."""
        return self.layouts.setdefault(length, self.layout(length))

    def note_local_work(self) -> None:
        """Remember that processes go on with different positions, which concerns the gradients of what was gathered."""
        self.has_shards_behind = self.has_shards_behind or self.has_gathered

    def is_shard_of_any(self, length: int) -> bool:
        """Return whether any process holds a shard of so many positions; all find the same, and refuse together."""
        return any(layout.local_length(rank) == length for layout in self.layouts.values() for rank in self._ranks)

    def was_whole(self, length: int) -> bool:
        """Return whether so many positions are an unsharded submodule's, which recomputation does not run whole.

        Raises:
            ValueError: If a shard that is recomputed has as many.
        """
        if length not in self.whole_lengths:
            return False
        is_ambiguous = self.is_shard_of_any(length)
        is_recomputed = torch._C._current_graph_task_id() != -1
        if is_ambiguous and is_recomputed:
            raise ValueError(
                f"{length} positions are recomputed, which may be a whole sequence or a shard: the step has both; pad "
                "one of them, or do not recompute the unsharded submodule"
            )
        return not is_ambiguous

    def layout_of_shard(self, length: int, what: str) -> SequenceLayout:
        """Return the layout of which this process holds a shard of so many positions.

        Args:
            what: Begins the message of an error.

        Raises:
            RuntimeError: If nothing was sharded.
            ValueError: If there is no such layout, or another one has a shard of the same length on any process.
        """
        if not self.layouts:
            raise RuntimeError(
                "attention or an output of the plan came before anything was sharded; name in batch or inputs what is"
            )
        local_lengths = {whole: layout.local_length(self.rank) for whole, layout in self.layouts.items()}
        found = [layout for whole, layout in self.layouts.items() if local_lengths[whole] == length]
        if not found:
            raise ValueError(
                f"{what}, but of the sharded sequences this rank holds {local_lengths} (by length); name a submodule "
                "that sees whole sequences in the plan's unsharded, or call it within sharded_sequences(None)"
            )
        alike = [layout.length for layout in self.layouts.values() if self._are_alike(layout, found[0])]
        if len(alike) > 1:
            raise ValueError(
                f"{what}, and sequences of lengths {alike} have shards of one length, so that they cannot be told "
                "apart; pad one of them"
            )
        return found[0]

    def _are_alike(self, first: SequenceLayout, second: SequenceLayout) -> bool:
        """Return whether any process cannot tell the shards of two sequences apart."""
        return any(first.local_length(rank) == second.local_length(rank) for rank in self._ranks)

    @property
    def _ranks(self) -> range:
        return range(self.num_ranks)
