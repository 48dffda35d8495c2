"""Steps of a module that was written for whole sequences, on shards of them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.collectives import gather_positions, sum_over_context
from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics, ContextGroups
from lightning_dalle.distributed.context_parallel.dispatch import redirected
from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.distributed.context_parallel.mask import SequenceMask
from lightning_dalle.distributed.context_parallel.plan import BatchEntry, SequencePlan
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.random import dropout_factors
from lightning_dalle.ops.sharded_sequence import current_shard, sharded_sequences

Batch = TypeVar("Batch")


class ContextParallelSession:
    """Shards, attends, reduces and draws at random such that a step gives what it would give for the whole sequence.

    All processes of the group run each step with the same batch and the same state of torch's generator. Gradients must
    be averaged over them: each process has those of its shard, times the number of processes.

    A step

    1. reads document ids and the padding mask of the batch, and shards the batch's entries that the plan names;
    2. runs the module while attention and dropout are redirected; hooks shard inputs and gather outputs of submodules;
    3. makes sure that something attended, and, in training, that the loss is a mean over the whole sequence;
    4. runs the backward pass within `active`, so that what it recomputes is sharded alike.

    Args:
        kind: Which positions each process holds.

    Attributes:
        communication: Bytes and seconds of all attention and of gathered outputs.

    Raises:
        ValueError: If the plan's length or number of heads does not fit the groups.

    Example:
        A process alone holds all of a sequence.

        >>> session = ContextParallelSession(SequencePlan(batch={"tokens": 1}), ContextGroups())
        >>> with session.step({"tokens": torch.arange(8).view(1, 8)}) as local:
        ...     query = local["tokens"].float().view(1, 1, 8, 1)
        ...     output = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        >>> output.shape
        torch.Size([1, 1, 8, 1])
    """

    def __init__(self, plan: SequencePlan, groups: ContextGroups, kind: LayoutKind = "zigzag") -> None:
        self.plan = plan
        self.groups = groups
        self.communication = CommunicationStatistics()
        self._kind: LayoutKind = kind
        self._layout: SequenceLayout | None = None
        self._narrowing: dict[str, Tensor] = {}
        self._attentions: dict[Any, ContextAttention] = {}
        self._used: set[str] = set()
        self._is_timed = False
        if plan.length is not None:
            self._layout_of(plan.length)
        if plan.num_heads is not None and plan.num_heads % groups.ulysses_degree:
            raise ValueError(
                f"num_heads ({plan.num_heads}) must be divisible by the {groups.ulysses_degree} processes that trade heads; "
                "use attention='usp' with a smaller ulysses_degree, or attention='ring', which divides positions alone"
            )

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Batch]:
        """Shard sequences within, and yield the local shard of the batch.

        Raises:
            RuntimeError: At the end, if sequences were sharded that nothing attended over.
        """
        self._used.clear()
        self._layout = None
        self._read_masks(batch)
        local = self._shard_batch(batch)
        with self.active():
            yield local
        if "shard" in self._used and "attend" not in self._used:
            raise RuntimeError(
                "sequences were sharded, but neither attend nor scaled_dot_product_attention was called, and so no "
                "position could see those of other processes; call one of them, or leave the sequence whole"
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Shard as within the last step, for its backward pass, which may recompute parts of it."""
        with self._timed(), sharded_sequences(self), redirected(self):
            yield

    @contextmanager
    def _timed(self) -> Iterator[None]:
        if self._is_timed:
            # A step within a step, whose time is counted already.
            yield
            return
        self._is_timed, start = True, time.perf_counter()
        try:
            yield
        finally:
            self.communication.step_seconds += time.perf_counter() - start
            self._is_timed = False

    @property
    def is_active(self) -> bool:
        """Whether sequences are sharded at the moment."""
        return current_shard() is self

    def validate_mean_was_taken(self, step: str) -> None:
        """Refuse a loss that is one of the local shard alone.

        Raises:
            RuntimeError: If nothing is gathered, and no `sequence_mean` was taken in the last step.
        """
        if not self.plan.outputs and "mean" not in self._used:
            raise RuntimeError(
                f"{step} returned a loss of local positions alone; divide its sum by sequence_mean(total, "
                "count), which also weighs processes with few labels rightly, or name outputs where the plan gathers them"
            )

    def shard(self, tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the local shards of tensors of one sequence."""
        lengths = {name: tensor.shape[dims[name]] for name, tensor in tensors.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"tensors that are sharded together have different numbers of positions: {lengths}")
        for length in set(lengths.values()):
            self._layout = self._layout_of(length)
        if self._layout is None:
            return {}
        self._used.add("shard")
        return {name: self._layout.shard(tensor, self.groups.rank, dims[name]) for name, tensor in tensors.items()}

    def positions(self, length: int, device: torch.device | str) -> Tensor:
        """Return the local positions of a sequence."""
        return self._layout_of(length).positions(self.groups.rank, device)

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather the whole of a tensor of the sequence that was sharded last."""
        if self.groups.context is None:
            return tensor
        return gather_positions(tensor, self._current_layout(), dim, self.groups.context, self.communication)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: AttentionPattern | PackedSegments,
        dropout: float,
        dropout_seed: int,
    ) -> Tensor:
        """Attend under a pattern of text and image, within packed sequences, or to a context that is not sharded."""
        layout = self._layout_of(pattern.length)
        if isinstance(pattern, PackedSegments) and pattern.of_context:
            local = pattern.of_queries(layout.positions(self.groups.rank))
            with sharded_sequences(None):
                return local.attend(query, key, value)
        attention = self._attention(layout, pattern)
        return attention(query, key, value, dropout=dropout, dropout_seed=dropout_seed)

    def attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float) -> Tensor:
        """Attend to all positions of the sequence, or to those before."""
        attention = self._attention(self._current_layout(), "causal" if is_causal else "bidirectional")
        seed = int(torch.randint(2**63 - 1, ())) if dropout > 0 else 0
        return attention(query, key, value, dropout=dropout, dropout_seed=seed)

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """Return the sum of all processes' totals over that of their counts."""
        self._used.add("mean")
        if self.groups.context is not None:
            total, count = (sum_over_context(value, self.groups.context) for value in (total, count.to(total)))
        return total / count.clamp(min=1)

    def dropout_factors(self, hidden: Tensor, probability: float) -> Tensor:
        """Return the factors of hidden states: of a position the same, whoever holds it."""
        seed = int(torch.randint(2**63 - 1, ()))
        dim = min(self.plan.sequence_dim, hidden.dim() - 1)
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
                # Packed lengths hardly come again.
                self._attentions = {
                    key: kept for key, kept in self._attentions.items() if type(key[1]) is not type(rule)
                }
                mask = SequenceMask("bidirectional", document_ids=rule.document_ids()[0])
            else:
                prefix_length = self.plan.prefix_length if rule == "causal" else 0
                mask = SequenceMask(rule, prefix_length, **self._narrowing)
            groups = {"ring_group": self.groups.ring, "ulysses_group": self.groups.ulysses}
            self._attentions[layout, rule] = ContextAttention(layout, mask, **groups, statistics=self.communication)
        return self._attentions[layout, rule]

    def _read_masks(self, batch: Any) -> None:
        entries = {"document_ids": self.plan.document_ids, "key_padding_mask": self.plan.key_padding_mask}
        narrowing = {name: batch[entry] for name, entry in entries.items() if entry is not None}
        if narrowing:
            # Of this batch alone.
            self._attentions.clear()
            self._narrowing = {
                name: tensor.bool() if name == "key_padding_mask" else tensor for name, tensor in narrowing.items()
            }

    def _shard_batch(self, batch: Any) -> Any:
        if not self.plan.batch:
            return batch
        missing = [entry for entry in self.plan.batch if not _has(batch, entry)]
        if missing:
            raise ValueError(f"the plan shards {missing} of each batch, which this batch does not have")
        local = self.shard(
            {str(entry): batch[entry] for entry in self.plan.batch},
            {str(entry): dim for entry, dim in self.plan.batch.items()},
        )
        shards = {entry: local[str(entry)] for entry in self.plan.batch}
        if isinstance(batch, Mapping):
            return {**batch, **shards}
        return type(batch)(shards.get(index, entry) for index, entry in enumerate(batch))

    def _layout_of(self, length: int) -> SequenceLayout:
        return SequenceLayout(length, self.groups.size, self._kind)

    def _current_layout(self) -> SequenceLayout:
        if self._layout is None:
            raise RuntimeError(
                "attention or an output of the plan came before anything was sharded; name in batch or inputs what is"
            )
        return self._layout


def _has(batch: Any, entry: BatchEntry) -> bool:
    if isinstance(batch, Mapping):
        return entry in batch
    return isinstance(batch, Sequence) and isinstance(entry, int) and entry < len(batch)
