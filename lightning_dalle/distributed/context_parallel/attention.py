"""Softmax attention over a sequence that is sharded among processes."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_dalle.distributed.context_parallel.comm import CommunicationStatistics
from lightning_dalle.distributed.context_parallel.halo import HaloExchange, WindowAttention
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.distributed.context_parallel.ring import Ring, RingAttention, RingSchedule
from lightning_dalle.distributed.context_parallel.ulysses import UlyssesAllToAll
from lightning_dalle.ops.attention.mask import SequenceMask, mask_schedule
from lightning_dalle.ops.attention.online_softmax import PositionalDropout
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from lightning_dalle.ops.attention.schedule import WindowSchedule, column_schedule, window_schedule


class ContextAttention:
    """Exact attention of each process's shard of a sequence to the whole of it; fully masked tiles are not computed.

    | groups | keys and values |
    | --- | --- |
    | `ring_group` | rotate; of a row or convolution pattern a halo exchange brings those in reach |
    | `ulysses_group` | all-to-all: each process gets the group's sequence for a shard of the heads |
    | both | Ulysses inside, ring or halo across (USP) |

    Rank r of the ring and u of the Ulysses group holds the shard of rank `r * ulysses_group.size() + u` of the layout.

    All processes must make the same calls in the same order; each backward pass communicates too. Gradients flow once.
    The block schedule is made once for a mask and a device, and keeps a byte for each pair in tiles that are partly
    masked. Not run on CUDA.

    Args:
        layout: Shards of as many ranks as the groups' sizes multiplied.
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
        # 1. Two groups: which ranks of the layout share a place in the ring.
        self.ring = Ring(ring_group, self.statistics)
        ulysses_degree, ulysses_rank = (1, 0) if ulysses_group is None else (ulysses_group.size(), ulysses_group.rank())
        if layout.num_ranks != self.ring.size * ulysses_degree:
            raise ValueError(
                f"layout has {layout.num_ranks} ranks, but ring_group has {self.ring.size} "
                f"and ulysses_group {ulysses_degree}"
            )
        mask.check_length(layout.length)
        members = [range(place * ulysses_degree, (place + 1) * ulysses_degree) for place in range(self.ring.size)]
        # 2. Positions: of each place in the ring after the all-to-all, and of this process before it.
        self._runs = [_merged([run for rank in ranks for run in layout.runs(rank)]) for ranks in members]
        self.local_length = layout.local_length(self.ring.rank * ulysses_degree + ulysses_rank)
        # 3. Transports: all-to-all inside, and across it a halo exchange or the ring.
        self.ulysses: UlyssesAllToAll | None = None
        if ulysses_group is not None:
            lengths = [layout.local_length(rank) for rank in members[self.ring.rank]]
            self.ulysses = UlyssesAllToAll(ulysses_group, lengths, self.statistics)
        self._mask = mask
        self._window = _pattern_of(mask, "row", "convolution")
        if self._window is not None:
            halos = [window_schedule(self._window, runs).halo for runs in self._runs]
            self._halo_exchange = HaloExchange(self.ring, self._runs, halos)
        # 4. Block schedules, made when they are first needed: by device, and whether dropout needs small tiles.
        self._schedules: dict[tuple[str, bool], RingSchedule | WindowSchedule] = {}

    def __call__(
        self,
        query: Float[Tensor, "batch heads local head_dim"],
        key: Float[Tensor, "batch key_heads local head_dim"],
        value: Float[Tensor, "batch key_heads local head_dim"],
        *,
        dropout: float = 0.0,
        dropout_seed: int = 0,
    ) -> Float[Tensor, "batch heads local head_dim"]:
        """Attend, with scores scaled by `head_dim ** -0.5`; a query that sees no key gets 0.

        Args:
            key: May have fewer heads; query heads side by side share one (grouped-query attention).
            dropout: Probability that an attention weight is dropped after the softmax.
            dropout_seed: Decides, with sample, head and positions in the whole sequence alone, which weights are.

        Raises:
            ValueError: If lengths or heads do not fit, or `dropout` is no probability below 1.
        """
        self._check(query, key, dropout)
        num_heads, first_head = query.shape[1], 0
        if self.ulysses is not None:
            self.ulysses.check_heads(query, key)
            query, key, value = (self.ulysses.shard_heads(tensor) for tensor in (query, key, value))
            first_head = self.ulysses.rank * query.shape[1]
        positional = PositionalDropout(dropout, dropout_seed, num_heads, first_head) if dropout > 0 else None
        output = self._attend(query, key, value, positional)
        return output if self.ulysses is None else self.ulysses.shard_positions(output)

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
        if case not in self._schedules:
            self._schedules[case] = self._schedule(*case)
        schedule = self._schedules[case]
        output: Tensor
        if isinstance(schedule, WindowSchedule):
            output = WindowAttention.apply(query, key, value, self._halo_exchange, schedule, dropout)
        else:
            output = RingAttention.apply(query, key, value, self.ring, schedule, dropout)
        return output

    def _schedule(self, device: str, finely: bool) -> RingSchedule | WindowSchedule:
        own = self._runs[self.ring.rank]
        if self._window is not None:
            return window_schedule(self._window, own, device)
        columns = _pattern_of(self._mask, "column")
        if columns is not None:
            tiles = [column_schedule(columns, own, runs) for runs in self._runs]
        else:
            tiles = [mask_schedule(self._mask, own, runs, device, finely) for runs in self._runs]
        return RingSchedule(tiles, [sum(map(len, runs)) for runs in self._runs])


def _pattern_of(mask: SequenceMask, *kinds: PatternKind) -> AttentionPattern | None:
    """Return the mask's pattern if it is one of the kinds, and documents and padding mask nothing more."""
    rule, narrowed = mask.rule, mask.document_ids is not None or mask.key_padding_mask is not None
    if narrowed or not isinstance(rule, AttentionPattern) or rule.height == 0:
        return None
    return rule if rule.kind in kinds else None


def _merged(runs: Sequence[range]) -> list[range]:
    """Return the same positions in the same order, in as few runs as possible."""
    merged: list[range] = []
    for run in runs:
        if merged and run.start == merged[-1].stop:
            merged[-1] = range(merged[-1].start, run.stop)
        else:
            merged.append(run)
    return merged
