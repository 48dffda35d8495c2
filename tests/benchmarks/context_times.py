"""Time, bytes and kept memory of attention over a sharded sequence against one process."""

import statistics
from dataclasses import dataclass, replace
from functools import partial

from torch import distributed
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.layout import LayoutKind, SequenceLayout
from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.mask import SequenceMask
from lightning_dalle.ops.attention.patterns import PatternKind
from tests.benchmarks.context_memory import kept_bytes
from tests.benchmarks.context_sizes import Attention, Sizes, step, whole_inputs
from tests.benchmarks.table import Table, milliseconds
from tests.benchmarks.timing import seconds_of
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Case:
    """A mask, with the best that one process has for it."""

    name: str
    mask: SequenceMask
    layout: LayoutKind
    alone: Attention


def cases(sizes: Sizes) -> list[Case]:
    kinds: tuple[PatternKind, ...] = ("row", "column", "convolution")
    patterns = {kind: sizes.pattern(kind) for kind in kinds}
    return [
        Case("bidirectional", SequenceMask("bidirectional"), "contiguous", scaled_dot_product_attention),
        Case("causal", SequenceMask("causal"), "zigzag", partial(scaled_dot_product_attention, is_causal=True)),
        *(
            Case(f"text prefix + {kind}", SequenceMask(pattern), "zigzag", partial(attend, pattern=pattern))
            for kind, pattern in patterns.items()
        ),
    ]


def measure(rank: int, sizes: Sizes) -> list[dict[str, float]]:
    """Each case's metrics of this rank."""
    return [_measure_case(rank, sizes, case) for case in cases(sizes)]


def _measure_case(rank: int, sizes: Sizes, case: Case) -> dict[str, float]:
    layout = SequenceLayout(sizes.length, distributed.get_world_size(), case.layout)
    attention = ContextAttention(layout, case.mask, ring_group=distributed.group.WORLD)
    whole = whole_inputs(sizes)
    own = [layout.shard(tensor, rank, dim=-2) for tensor in whole]
    seconds: dict[str, list[float]] = {"alone": [], "together": []}
    for number in range(sizes.rounds + 1):
        if number == 1:
            before = replace(attention.statistics)
        distributed.barrier()
        alone = seconds_of(lambda: step(case.alone, whole)) if rank == 0 else 0.0
        distributed.barrier()
        together = seconds_of(lambda: step(attention, own))
        if number > 0:
            seconds["alone"].append(alone)
            seconds["together"].append(together)
    communication = attention.statistics - before
    return {
        **{name: statistics.median(values) for name, values in seconds.items()},
        "error": max(
            float((mine - layout.shard(right, rank, -2)).abs().max())
            for mine, right in zip(step(attention, own), step(case.alone, whole), strict=True)
        ),
        "computing": communication.attention_seconds,
        "overlap": communication.overlap_ratio,
        "bytes": communication.bytes_sent / sizes.rounds,
        "kept": kept_bytes(attention, own),
        "kept_alone": kept_bytes(case.alone, whole),
    }


def table_of(sizes: Sizes, world_size: int) -> Table:
    """One row for each mask."""
    ranks = run_ranks(measure, world_size, sizes, timeout=1800)
    columns: tuple[str, ...] = (
        "mask",
        "alone, ms",
        f"{world_size} ranks, ms",
        "ratio",
        "overlap",
        "imbalance",
        "MB sent",
        "of a ring, MB",
    )
    columns += ("kept", "largest difference")
    size = sizes.length * sizes.heads * sizes.head_dim * 4
    # Keys and values forward; they and their gradients backward, which come home with one more message.
    ring = 6 * (world_size - 1) / world_size * size
    rows: list[tuple[str, ...]] = []
    for number, case in enumerate(cases(sizes)):
        metrics = [answers[number] for answers in ranks]
        together = max(each["together"] for each in metrics)
        computing = [each["computing"] for each in metrics]
        row = (
            case.name,
            milliseconds(metrics[0]["alone"]),
            milliseconds(together),
            f"{together / metrics[0]['alone']:.2f}",
            f"{min(each['overlap'] for each in metrics):.0%}",
            f"{max(computing) / statistics.mean(computing) - 1:.1%}",
            f"{max(each['bytes'] for each in metrics) / 1e6:.2f}",
            f"{ring / 1e6:.2f}",
            f"{max(each['kept'] / each['kept_alone'] for each in metrics):.2f}",
            f"{max(each['error'] for each in metrics):.0e}",
        )
        rows.append(row)
    note = (
        f"Forward and backward of {sizes.length} positions, {sizes.heads} heads of {sizes.head_dim}, fp32. `kept` is a "
        "rank's share of what one process keeps for its backward pass; `imbalance` is of seconds in attention."
    )
    return Table(f"Attention on {world_size} ranks", note, columns, rows)
