"""Softmax attention over a sequence that is sharded among processes."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics
from lightning_dalle.distributed.context_parallel.halo import KeyExchange, WindowAttention
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.distributed.context_parallel.mask import SequenceMask
from lightning_dalle.distributed.context_parallel.online_softmax import Planned, PositionalDropout
from lightning_dalle.distributed.context_parallel.ring import Ring, RingAttention, RingPlan
from lightning_dalle.distributed.context_parallel.schedule import WindowPlan, plan_blocks, plan_columns, plan_window
from lightning_dalle.distributed.context_parallel.ulysses import HeadExchange
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind


class ContextAttention:
    """Exact attention of each process's part of a sequence to the whole of it; hidden blocks are not computed.

    With `ring_group`, keys and values travel round it (ring attention), or under a row or convolution pattern straight
    to the processes that see them; with `ulysses_group`, its processes trade positions for heads (Ulysses); with both,
    heads are traded inside and keys travel across. Rank r of the ring and h of the head group holds the positions of
    rank `r * ulysses_group.size() + h` of the layout.

    All processes must make the same calls in the same order; each backward pass communicates too. Gradients flow once.
    The plan is made once for a mask and a device, and keeps a byte for each pair in blocks that are partly hidden;
    rows, columns and convolutions have tiles instead, as on one process. Not run on CUDA.

    Args:
        layout: Of as many ranks as the groups' sizes multiplied.
        statistics: Counters to add to, where several attentions share them.

    Raises:
        ValueError: If the layout has another number of ranks, or the mask another length.

    Example:
        A process alone holds the whole sequence.

        >>> import torch
        >>> attention = ContextAttention(SequenceLayout(10, num_ranks=1), SequenceMask("causal"))
        >>> attention(*torch.randn(3, 2, 4, 10, 8)).shape
        torch.Size([2, 4, 10, 8])
    """

    def __init__(
        self,
        layout: SequenceLayout,
        mask: SequenceMask,
        *,
        ring_group: ProcessGroup | None = None,
        ulysses_group: ProcessGroup | None = None,
        statistics: CommunicationStatistics | None = None,
    ) -> None:
        self.statistics = CommunicationStatistics() if statistics is None else statistics
        self.ring = Ring(ring_group, self.statistics)
        ulysses_degree, head_rank = (1, 0) if ulysses_group is None else (ulysses_group.size(), ulysses_group.rank())
        if layout.num_ranks != self.ring.size * ulysses_degree:
            raise ValueError(
                f"layout has {layout.num_ranks} ranks, but ring_group has {self.ring.size} "
                f"and ulysses_group {ulysses_degree}"
            )
        mask.check_length(layout.length)
        self._mask = mask
        members = [range(member * ulysses_degree, (member + 1) * ulysses_degree) for member in range(self.ring.size)]
        self._runs = [_merged([run for rank in ranks for run in layout.runs(rank)]) for ranks in members]
        self._plans: dict[tuple[str, bool], RingPlan | WindowPlan] = {}
        self._window = _grid_of(mask, "row", "convolution")
        if self._window is not None:
            borders = [plan_window(self._window, runs).border for runs in self._runs]
            self._key_exchange = KeyExchange(self.ring, self._runs, borders)
        self.local_length = layout.local_length(self.ring.rank * ulysses_degree + head_rank)
        self.exchange: HeadExchange | None = None
        if ulysses_group is not None:
            own = members[self.ring.rank]
            lengths = [layout.local_length(rank) for rank in own]
            self.exchange = HeadExchange(ulysses_group, lengths, self.statistics)

    def __call__(
        self,
        query: Float[Tensor, "batch heads local head_dim"],
        key: Float[Tensor, "batch key_heads local head_dim"],
        value: Float[Tensor, "batch key_heads local head_dim"],
        *,
        dropout: float = 0.0,
        dropout_seed: int = 0,
    ) -> Float[Tensor, "batch heads local head_dim"]:
        """Attends, with scores scaled by `head_dim ** -0.5`; a query that sees no key gets 0.

        Args:
            key: May have fewer heads; query heads side by side share one (grouped-query attention).
            dropout: Probability that an attention weight is dropped after the softmax.
            dropout_seed: Decides, with sample, head and positions in the whole sequence alone, which weights are.

        Raises:
            ValueError: If lengths or heads do not fit, or `dropout` is no probability below 1.
        """
        self._check(query, key, dropout)
        random = None
        heads, first_head = query.shape[1], 0
        if self.exchange is not None:
            self.exchange.check_heads(query, key)
            query, key, value = (self.exchange.to_heads(tensor) for tensor in (query, key, value))
            first_head = self.exchange.rank * query.shape[1]
        if dropout > 0:
            random = PositionalDropout(dropout, dropout_seed, heads, first_head)
        output = self._attend(query, key, value, random)
        return output if self.exchange is None else self.exchange.to_positions(output)

    def _check(self, query: Tensor, key: Tensor, dropout: float) -> None:
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout ({dropout}) must be in [0, 1)")
        for name, tensor in (("query", query), ("key", key)):
            if tensor.shape[-2] != self.local_length:
                raise ValueError(
                    f"{name} has {tensor.shape[-2]} positions, but this rank holds {self.local_length}; shard the "
                    "sequence with layout.shard"
                )
        if query.shape[1] % key.shape[1] != 0:
            raise ValueError(f"query has {query.shape[1]} heads, which must be a multiple of the key's {key.shape[1]}")

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: PositionalDropout | None) -> Tensor:
        case = str(query.device), dropout is not None
        if case not in self._plans:
            self._plans[case] = self._plan(*case)
        plan = self._plans[case]
        output: Tensor
        if isinstance(plan, WindowPlan):
            output = WindowAttention.apply(query, key, value, self._key_exchange, plan, dropout)
        else:
            output = RingAttention.apply(query, key, value, self.ring, plan, dropout)
        return output

    def _plan(self, device: str, finely: bool) -> RingPlan | WindowPlan:
        own, mask = self._runs[self.ring.rank], self._mask
        if self._window is not None:
            return plan_window(self._window, own, device)
        columns = _grid_of(mask, "column")
        if columns is not None:
            blocks: list[Sequence[Planned]] = [plan_columns(columns, own, runs) for runs in self._runs]
        else:
            blocks = [plan_blocks(mask, own, runs, device, finely) for runs in self._runs]
        return RingPlan(blocks, [sum(map(len, runs)) for runs in self._runs])


def _grid_of(mask: SequenceMask, *kinds: PatternKind) -> AttentionPattern | None:
    """The mask's pattern if it is one of the kinds, and documents and padding hide nothing more."""
    rule, narrowed = mask.rule, mask.document_ids is not None or mask.key_padding_mask is not None
    if narrowed or not isinstance(rule, AttentionPattern) or rule.height == 0:
        return None
    return rule if rule.kind in kinds else None


def _merged(runs: list[range]) -> list[range]:
    """The same positions in the same order, in as few runs as possible."""
    merged = runs[:1]
    for run in runs[1:]:
        if run.start == merged[-1].stop:
            merged[-1] = range(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return merged
