"""Steps of a module that was written for whole sequences, on shards of them."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.collectives import (
    gather_positions,
    is_replicated,
    sum_over_context,
    validate_batches_agree,
)
from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics, ContextGroups
from lightning_dalle.distributed.context_parallel.dispatch import redirected
from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.distributed.context_parallel.plan import SequencePlan
from lightning_dalle.distributed.context_parallel.step_record import StepRecord
from lightning_dalle.ops.attention.mask import SequenceMask
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.random import dropout_factors
from lightning_dalle.ops.sharded_sequence import current_shard, sharded_sequences

Batch = TypeVar("Batch")
Rule = Literal["causal", "bidirectional"] | AttentionPattern | PackedSegments


class ContextParallelSession:
    """Shards, attends, reduces and draws at random such that a step gives what it would give for the whole sequence.

    All processes of the group run each step with the same batch and the same state of torch's generator. Gradients must
    be averaged over them: each process has those of its shard, times the number of processes.

    A step

    1. makes sure that the processes got the same batch;
    2. reads document ids and the padding mask of the batch, and shards the batch's entries that the plan names;
    3. runs the module while attention and dropout are redirected; hooks shard inputs and gather outputs of submodules;
    4. makes sure that something attended, and, in training, that the loss is a mean over the whole sequence;
    5. runs the backward pass within `active`, so that what it recomputes is sharded alike.

    A redirected call knows its sequence by its number of positions, in the forward pass and in recomputation. A
    whole tensor that happens to have the same number would be taken for a shard. So each call is checked when a step
    comes to it for the first time: tensors that are the same on all processes are refused.

    Args:
        layout_kind: Which positions each process holds.

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

    def __init__(self, plan: SequencePlan, groups: ContextGroups, layout_kind: LayoutKind = "zigzag") -> None:
        self.plan = plan
        self.groups = groups
        self.communication = CommunicationStatistics()
        self._layout_kind: LayoutKind = layout_kind
        self._step = self._new_record({})
        self._attentions: dict[tuple[SequenceLayout, Rule], ContextAttention] = {}
        self._checked_calls = 0
        self._is_timed = False
        self._is_unsharded = False
        if plan.length is not None:
            self._step.layout(plan.length)
        if plan.num_heads is not None and plan.num_heads % groups.ulysses_degree:
            raise ValueError(
                f"num_heads ({plan.num_heads}) must be divisible by the {groups.ulysses_degree} processes that trade "
                "heads; use attention='usp' with a smaller ulysses_degree, or 'ring', which divides positions alone"
            )

    # Steps

    @contextmanager
    def step(self, batch: Batch) -> Iterator[Batch]:
        """Shard sequences within, and yield the local shard of the batch.

        Raises:
            ValueError: If processes of the group have different batches, or the batch lacks what the plan shards.
            RuntimeError: At the end, if sequences were sharded that nothing attended over.
        """
        if self.groups.context is not None:
            validate_batches_agree(batch, self.groups.context, self.groups.device, everywhere=False)
        self._step = self._new_record(self.plan.masks(batch))
        if self._step.masks:
            # Attention keeps the masks that it was made with, which are those of one batch.
            self._attentions.clear()
        local = self._shard_batch(batch)
        with self.active():
            yield local
        if self._step.layouts and not self._step.has_attended:
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
    def unsharded(self) -> Iterator[None]:
        """Keep sequences whole within, and remember their lengths for what the backward pass recomputes of it."""
        before, self._is_unsharded = self._is_unsharded, True
        try:
            with sharded_sequences(None):
                yield
        finally:
            self._is_unsharded = before

    @property
    def is_active(self) -> bool:
        """Whether sequences are sharded at the moment."""
        return current_shard() is self

    def validate_mean_was_taken(self, step: str) -> None:
        """Refuse a loss that is one of the local shard alone.

        Raises:
            RuntimeError: If nothing is gathered, and no `sequence_mean` was taken in the last step.
        """
        if not self.plan.outputs and not self._step.has_mean:
            raise RuntimeError(
                f"{step} returned a loss of local positions alone; divide its sum by sequence_mean(total, count), "
                "which also weighs processes with few labels rightly, or name outputs where the plan gathers them"
            )

    def gather_predictions(self, predictions: Any) -> Any:
        """Return what `predict_step` returned, with its tensors gathered where the plan says so.

        Raises:
            RuntimeError: If the step attended over shards, and the plan does not say what became of them.
        """
        dim = self.plan.predictions
        if isinstance(dim, int):
            return tree_map(lambda part: self.gather(part, dim) if isinstance(part, Tensor) else part, predictions)
        if dim is None and self._step.layouts and not self.plan.outputs:
            raise RuntimeError(
                "predict_step ran on shards, and the plan gathers nothing; let its predictions name the dimension of "
                "positions, or 'whole' if the predictions have none"
            )
        return predictions

    # Shards

    def shard(self, tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the local shards of tensors of one sequence.

        Raises:
            ValueError: If they have different numbers of positions.
        """
        lengths = {name: tensor.shape[dims[name]] for name, tensor in tensors.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"tensors that are sharded together have different numbers of positions: {lengths}")
        self._step.note_local_work()
        shards = {}
        for name, tensor in tensors.items():
            layout = self._step.add(lengths[name])
            shards[name] = layout.shard(tensor, self.groups.rank, dims[name])
        return shards

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Gather the whole of a tensor whose positions along `dim` are a shard of the last step.

        Raises:
            ValueError: If no sequence of the step has a shard of that length, or several have.
        """
        what = f"a tensor to gather has {tensor.shape[dim]} positions along dim {dim}"
        layout = self._step.layout_of_shard(tensor.shape[dim], what)
        if self.groups.context is None:
            return tensor
        step = self._step
        step.has_gathered = True
        return gather_positions(
            tensor, layout, dim, self.groups.context, self.communication, lambda: step.has_shards_behind
        )

    def positions(self, length: int, device: torch.device | str) -> Tensor:
        """Return the local positions of a sequence."""
        self._step.note_local_work()
        return self._step.layout(length).positions(self.groups.rank, device)

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """Return the sum of all processes' totals over that of their counts."""
        self._step.has_mean = True
        self._step.note_local_work()
        if self.groups.context is not None:
            total, count = (sum_over_context(value, self.groups.context) for value in (total, count.to(total)))
        return total / count.clamp(min=1)

    # Redirected calls

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
        self._step.note_local_work()
        layout = self._step.layout(pattern.length)
        if isinstance(pattern, PackedSegments) and pattern.of_context:
            local = pattern.of_queries(layout.positions(self.groups.rank))
            with sharded_sequences(None):
                return local.attend(query, key, value)
        return self._attend(layout, pattern, query, key, value, dropout, dropout_seed)

    def is_whole(self, query: Tensor) -> bool:
        """Return whether a query needs no other process: in unsharded code, and where that is recomputed.

        Raises:
            ValueError: If what is recomputed may be either.
        """
        return self._was_whole(query.shape[-2])

    def attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, dropout: float) -> Tensor:
        """Attend to all positions of the sequence, or to those before.

        Raises:
            ValueError: If query or key are no shards of one sequence of the step.
        """
        self._refuse_replicated({"query": (query, -2), "key": (key, -2)})
        layout = self._step.layout_of_shard(query.shape[-2], f"query has {query.shape[-2]} positions")
        seed = int(torch.randint(2**63 - 1, ())) if dropout > 0 else 0
        return self._attend(layout, "causal" if is_causal else "bidirectional", query, key, value, dropout, seed)

    def dropout_factors(self, hidden: Tensor, probability: float) -> Tensor:
        """Return the factors of hidden states: of a position the same, whoever holds it.

        Raises:
            ValueError: If it cannot be told whether `hidden` is a shard.
        """
        seed = int(torch.randint(2**63 - 1, ()))
        dim = min(self.plan.sequence_dim, hidden.dim() - 1)
        moved = hidden.movedim(dim, 0)
        layout = self._layout_of_hidden(hidden)
        positions = torch.arange(len(moved)) if layout is None else layout.positions(self.groups.rank)
        others = torch.arange(moved[0].numel(), device=hidden.device)
        queries = positions.to(hidden.device).unsqueeze(1)
        factors = dropout_factors(probability, seed, torch.zeros_like(others), queries, others, hidden.dtype)
        return factors.view(moved.shape).movedim(0, dim)

    # Which sequence a tensor is a shard of

    def _was_whole(self, length: int) -> bool:
        if self.is_active:
            return self._step.was_whole(length)
        if self._is_unsharded:
            self._step.whole_lengths.add(length)
        return True

    def _layout_of_hidden(self, hidden: Tensor) -> SequenceLayout | None:
        """Return the layout of hidden states, None if they have no positions or are no shard."""
        dim = self.plan.sequence_dim
        if hidden.dim() <= dim or self._was_whole(hidden.shape[dim]):
            return None
        if not self._step.is_shard_of_any(hidden.shape[dim]):
            return None
        if hidden.dim() == dim + 1:
            if self.groups.context is None:
                return None
            raise ValueError(
                f"dropout got a tensor of shape {tuple(hidden.shape)}, whose last dimension may be features or a shard "
                "of positions; name the submodule in the plan's unsharded, or add a dimension of features"
            )
        self._refuse_replicated({"hidden states of dropout": (hidden, dim)})
        return self._step.layout_of_shard(hidden.shape[dim], f"dropout got {hidden.shape[dim]} positions")

    def _refuse_replicated(self, tensors: Mapping[str, tuple[Tensor, int]]) -> None:
        """Refuse whole tensors that look like shards, at each call that no step before came to."""
        self._step.redirected_calls += 1
        if self.groups.context is None or self._step.redirected_calls <= self._checked_calls:
            return
        self._checked_calls = self._step.redirected_calls
        for name, (tensor, dim) in tensors.items():
            if is_replicated(tensor.detach(), dim, self.groups.context):
                raise ValueError(
                    f"{name} of shape {tuple(tensor.shape)} is the same on all processes, and so is no shard; name the "
                    "submodule that sees it in the plan's unsharded, or call it within sharded_sequences(None)"
                )

    # Parts of a step

    def _new_record(self, masks: dict[str, Tensor]) -> StepRecord:
        return StepRecord(self.groups.rank, self.groups.size, self._layout_kind, masks)

    def _attend(
        self, layout: SequenceLayout, rule: Rule, query: Tensor, key: Tensor, value: Tensor, dropout: float, seed: int
    ) -> Tensor:
        self._step.has_attended = True
        attention = self._attention(layout, rule)
        # Its blocks may be computed by the kernels that are refused elsewhere.
        with sharded_sequences(None):
            return attention(query, key, value, dropout=dropout, dropout_seed=seed)

    def _attention(self, layout: SequenceLayout, rule: Rule) -> ContextAttention:
        """Return the attention of a layout under a rule, which keeps its schedule of blocks as long as masks allow."""
        if (layout, rule) not in self._attentions:
            self._attentions[layout, rule] = ContextAttention(
                layout,
                self._mask(rule),
                ring_group=self.groups.ring,
                ulysses_group=self.groups.ulysses,
                statistics=self.communication,
            )
        return self._attentions[layout, rule]

    def _mask(self, rule: Rule) -> SequenceMask:
        if isinstance(rule, PackedSegments):
            # Packed lengths hardly come again, so only the last ones are kept.
            packed = [key for key in self._attentions if isinstance(key[1], PackedSegments)]
            for key in packed:
                del self._attentions[key]
            return SequenceMask("bidirectional", document_ids=rule.document_ids()[0])
        return SequenceMask(rule, self.plan.prefix_length if rule == "causal" else 0, **self._step.masks)

    def _shard_batch(self, batch: Any) -> Any:
        if not self.plan.batch:
            return batch
        self.plan.validate_batch(batch)
        dims = {str(entry): dim for entry, dim in self.plan.batch.items()}
        shards = self.shard({str(entry): batch[entry] for entry in self.plan.batch}, dims)
        local = {entry: shards[str(entry)] for entry in self.plan.batch}
        if isinstance(batch, Mapping):
            return {**batch, **local}
        return type(batch)(local.get(index, entry) for index, entry in enumerate(batch))

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
