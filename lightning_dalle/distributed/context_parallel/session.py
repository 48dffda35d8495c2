"""The steps of a module that was written for whole sequences, on the parts of a context group."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.collectives import join_positions, sum_over_context
from lightning_dalle.distributed.context_parallel.comm import ContextGroups, ContextTraffic
from lightning_dalle.distributed.context_parallel.dispatch import RedirectedFunctions
from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.distributed.context_parallel.mask import SequenceMask
from lightning_dalle.distributed.context_parallel.plan import BatchEntry, SequencePlan
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.random import dropout_factors
from lightning_dalle.ops.sharded_sequence import current_shard, sharded_sequences

Batch = TypeVar("Batch")


class ContextParallelSession:
    """Cuts, attends, reduces and draws at random such that a step gives what it would give for the whole sequence.

    All processes of the group run each step with the same batch and the same state of torch's generator. Gradients must
    be averaged over them: each process's are those of its part, times the number of processes.

    Args:
        kind: How positions are dealt out.

    Attributes:
        traffic: Of all attention and of joined outputs.

    Raises:
        ValueError: If the plan's length or number of heads does not fit the groups.

    Example:
        A process alone holds all of a sequence.

        >>> sequences = ContextParallelSession(SequencePlan(batch={"tokens": 1}), ContextGroups())
        >>> with sequences.step({"tokens": torch.arange(8).view(1, 8)}) as own:
        ...     query = own["tokens"].float().view(1, 1, 8, 1)
        ...     output = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        >>> output.shape
        torch.Size([1, 1, 8, 1])
    """

    def __init__(self, plan: SequencePlan, groups: ContextGroups, kind: LayoutKind = "zigzag") -> None:
        self.plan = plan
        self.groups = groups
        self.traffic = ContextTraffic()
        self._kind: LayoutKind = kind
        self._layout: SequenceLayout | None = None
        self._narrowing: dict[str, Tensor] = {}
        self._attentions: dict[Any, ContextAttention] = {}
        self._used: set[str] = set()
        self._functions = RedirectedFunctions(self)
        if plan.length is not None:
            self._layout_of(plan.length)
        if plan.num_heads is not None and plan.num_heads % groups.head_size:
            raise ValueError(
                f"num_heads ({plan.num_heads}) must be divisible by the {groups.head_size} processes that trade heads; "
                "use attention='hybrid' with a smaller head_size, or attention='ring', which divides positions alone"
            )

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Batch]:
        """Sequences are cut within; gives this process's part of the batch.

        Raises:
            RuntimeError: At the end, if sequences were cut that nothing attended over.
        """
        self._used.clear()
        self._layout = None
        self._read_masks(batch)
        own = self._cut_batch(batch)
        with self.active():
            yield own
        if "cut" in self._used and "attend" not in self._used:
            raise RuntimeError(
                "sequences were cut, but neither attend nor scaled_dot_product_attention was called, and so no "
                "position could see those of other processes; call one of them, or leave the sequence whole"
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """As within the last step, for its backward pass, which may compute parts of it again."""
        with sharded_sequences(self), self._functions.replaced():
            yield

    @property
    def is_active(self) -> bool:
        """Whether sequences are cut at the moment."""
        return current_shard() is self

    def check_mean_was_taken(self, step: str) -> None:
        """Refuses a loss that is of this process's part alone.

        Raises:
            RuntimeError: If nothing is joined, and no `sequence_mean` was taken in the last step.
        """
        if not self.plan.outputs and "mean" not in self._used:
            raise RuntimeError(
                f"{step} returned a loss of this process's positions alone; divide its sum by sequence_mean(total, "
                "count), which also weighs processes with few labels rightly, or name outputs where the plan joins them"
            )

    def cut(self, tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """This process's parts of tensors of one sequence."""
        lengths = {name: tensor.shape[dims[name]] for name, tensor in tensors.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"tensors that are cut together have different numbers of positions: {lengths}")
        for length in set(lengths.values()):
            self._layout = self._layout_of(length)
        if self._layout is None:
            return {}
        self._used.add("cut")
        return {name: self._layout.shard(tensor, self.groups.rank, dims[name]) for name, tensor in tensors.items()}

    def positions(self, length: int, device: torch.device | str) -> Tensor:
        """This process's positions of a sequence."""
        return self._layout_of(length).positions(self.groups.rank, device)

    def join(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole of a tensor of the sequence that was cut last."""
        if self.groups.context is None:
            return tensor
        return join_positions(tensor, self._current_layout(), dim, self.groups.context, self.traffic)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: AttentionPattern | PackedSegments,
        dropout: float,
        dropout_seed: int,
    ) -> Tensor:
        """Attention under a pattern of text and image, within packed parts, or to a context that is not cut."""
        layout = self._layout_of(pattern.length)
        if isinstance(pattern, PackedSegments) and pattern.of_context:
            own = pattern.of_queries(layout.positions(self.groups.rank))
            with sharded_sequences(None):
                return own.attend(query, key, value)
        attention = self._attention(layout, pattern)
        return attention(query, key, value, dropout=dropout, dropout_seed=dropout_seed)

    def attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float) -> Tensor:
        """Attention to all positions, or those before."""
        attention = self._attention(self._current_layout(), "causal" if is_causal else "bidirectional")
        seed = int(torch.randint(2**63 - 1, ())) if dropout > 0 else 0
        return attention(query, key, value, dropout=dropout, dropout_seed=seed)

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The sum of all processes' totals over that of their counts."""
        self._used.add("mean")
        if self.groups.context is not None:
            total, count = (sum_over_context(value, self.groups.context) for value in (total, count.to(total)))
        return total / count.clamp(min=1)

    def dropout_factors(self, hidden: Tensor, probability: float) -> Tensor:
        """What hidden states are multiplied with; of a position the same, whoever holds it."""
        seed = int(torch.randint(2**63 - 1, ()))
        dim = min(self.plan.hidden_dim, hidden.dim() - 1)
        moved = hidden.movedim(dim, 0)
        positions = torch.arange(len(moved), device=hidden.device)
        if self._layout is not None and len(moved) == self._layout.local_length(self.groups.rank):
            positions = self._layout.positions(self.groups.rank, hidden.device)
        others = torch.arange(moved[0].numel(), device=hidden.device)
        factors = dropout_factors(
            probability, seed, torch.zeros_like(others), positions.unsqueeze(1), others, hidden.dtype
        )
        return factors.view(moved.shape).movedim(0, dim)

    def _attention(self, layout: SequenceLayout, rule: Any) -> ContextAttention:
        self._used.add("attend")
        if (layout, rule) not in self._attentions:
            if isinstance(rule, PackedSegments):
                # Lengths that are packed hardly come again.
                self._attentions = {
                    key: kept for key, kept in self._attentions.items() if type(key[1]) is not type(rule)
                }
                mask = SequenceMask("bidirectional", documents=rule.documents()[0])
            else:
                prefix_length = self.plan.prefix_length if rule == "causal" else 0
                mask = SequenceMask(rule, prefix_length, **self._narrowing)
            groups = {"ring_group": self.groups.ring, "head_group": self.groups.heads}
            self._attentions[layout, rule] = ContextAttention(layout, mask, **groups, traffic=self.traffic)
        return self._attentions[layout, rule]

    def _read_masks(self, batch: Any) -> None:
        entries = {"documents": self.plan.documents, "key_padding_mask": self.plan.key_padding_mask}
        narrowing = {name: batch[entry] for name, entry in entries.items() if entry is not None}
        if narrowing:
            # Of this batch alone.
            self._attentions.clear()
            self._narrowing = {
                name: tensor.bool() if name == "key_padding_mask" else tensor for name, tensor in narrowing.items()
            }

    def _cut_batch(self, batch: Any) -> Any:
        if not self.plan.batch:
            return batch
        missing = [entry for entry in self.plan.batch if not _has(batch, entry)]
        if missing:
            raise ValueError(f"the plan cuts {missing} of each batch, which this batch does not have")
        own = self.cut(
            {str(entry): batch[entry] for entry in self.plan.batch},
            {str(entry): dim for entry, dim in self.plan.batch.items()},
        )
        parts = {entry: own[str(entry)] for entry in self.plan.batch}
        if isinstance(batch, Mapping):
            return {**batch, **parts}
        return type(batch)(parts.get(place, entry) for place, entry in enumerate(batch))

    def _layout_of(self, length: int) -> SequenceLayout:
        return SequenceLayout(length, self.groups.size, self._kind)

    def _current_layout(self) -> SequenceLayout:
        if self._layout is None:
            raise RuntimeError(
                "attention or an output of the plan came before anything was cut; name in batch or inputs what is"
            )
        return self._layout


def _has(batch: Any, entry: BatchEntry) -> bool:
    if isinstance(batch, Mapping):
        return entry in batch
    return isinstance(batch, Sequence) and isinstance(entry, int) and entry < len(batch)
