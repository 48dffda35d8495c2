"""Attention over a cut sequence against one process: time, kept and peak memory, bytes, and another package.

    python -m tests.benchmarks.context_parallel

Every rank and the process that it is compared with compute in one thread, so that two ranks need two idle cores. Rank 0
attends alone and all ranks attend together in turn. The rows of `ring-attention-pytorch` appear where it is installed;
nothing of this package needs it.
"""

import argparse
import importlib.util
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from rich.console import Console
from torch import Tensor, distributed, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from lightning_dalle.distributed.context_attention import ContextAttention
from lightning_dalle.distributed.sequence_layout import LayoutKind, SequenceLayout
from lightning_dalle.distributed.sequence_mask import SequenceMask
from lightning_dalle.ops.attention import attend
from lightning_dalle.ops.attention_pattern import AttentionPattern
from tests.benchmarks.table import Table, milliseconds
from tests.benchmarks.timing import seconds_of
from tests.ranks import run_ranks

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What is attended; the sequence is a text of 1/16 of it and an image whose rows are twice as wide as high."""

    length: int = 4096
    heads: int = 8
    head_dim: int = 64
    rounds: int = 5
    depth: int = 8

    @property
    def pattern(self) -> AttentionPattern:
        text = self.length // 16
        width = max(2, int((self.length - text) ** 0.5) // 4 * 4)
        while (self.length - text) % width:
            width -= 1
        return AttentionPattern("row", text, (self.length - text) // width, width)


@dataclass(frozen=True)
class Case:
    """A mask, with the best that one process has for it."""

    name: str
    mask: SequenceMask
    layout: LayoutKind
    alone: Attention


def cases(sizes: Sizes) -> list[Case]:
    pattern = sizes.pattern
    return [
        Case("bidirectional", SequenceMask("bidirectional"), "contiguous", scaled_dot_product_attention),
        Case("causal", SequenceMask("causal"), "zigzag", partial(scaled_dot_product_attention, is_causal=True)),
        Case("text prefix + row", SequenceMask(pattern), "zigzag", partial(attend, pattern=pattern)),
    ]


def whole_inputs(sizes: Sizes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, sizes.heads, sizes.length, sizes.head_dim)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def step(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = attention(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, tensors[3])]


def kept_bytes(attention: Attention, tensors: list[Tensor]) -> int:
    """Of what a forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*(tensor.detach().requires_grad_() for tensor in tensors[:3]))
    return sum(kept.values())


def peak_bytes(work: Callable[[], object]) -> int:
    """Largest sum of what torch's allocator gave out during the work and had not got back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


def measure(rank: int, sizes: Sizes) -> list[dict[str, float]]:
    """Each case's figures of this rank."""
    return [_measure_case(rank, sizes, case) for case in cases(sizes)]


def _measure_case(rank: int, sizes: Sizes, case: Case) -> dict[str, float]:
    layout = SequenceLayout(sizes.length, distributed.get_world_size(), case.layout)
    attention = ContextAttention(layout, case.mask, ring_group=distributed.group.WORLD)
    whole = whole_inputs(sizes)
    own = [layout.shard(tensor, rank, dim=-2) for tensor in whole]
    seconds: dict[str, list[float]] = {"alone": [], "together": []}
    for number in range(sizes.rounds + 1):
        if number == 1:
            before = replace(attention.traffic)
        distributed.barrier()
        alone = seconds_of(lambda: step(case.alone, whole)) if rank == 0 else 0.0
        distributed.barrier()
        together = seconds_of(lambda: step(attention, own))
        if number > 0:
            seconds["alone"].append(alone)
            seconds["together"].append(together)
    traffic = attention.traffic - before
    return {
        **{name: statistics.median(values) for name, values in seconds.items()},
        "error": max(
            float((mine - layout.shard(right, rank, -2)).abs().max())
            for mine, right in zip(step(attention, own), step(case.alone, whole), strict=True)
        ),
        "computing": traffic.computing_seconds,
        "hidden": traffic.hidden_share,
        "bytes": traffic.sent_bytes / sizes.rounds,
        "kept": kept_bytes(attention, own),
        "kept_alone": kept_bytes(case.alone, whole),
    }


class Layers(nn.Sequential):
    """A stack of residual blocks, to see what attention's own buffers weigh beside what is kept of all layers."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        width = sizes.heads * sizes.head_dim
        super().__init__(*(Layer(width, sizes.heads, attention) for _ in range(sizes.depth)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.norm, self.projections = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.output, self.network_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.attention = heads, attention

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.projections(self.norm(hidden)).unflatten(-1, (3, self.heads, -1))
        attended = self.attention(*projected.permute(2, 0, 3, 1, 4))
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return hidden + self.contract(gelu(self.expand(self.network_norm(hidden))))


def train(network: nn.Module, hidden: Tensor) -> None:
    network(hidden).square().mean().backward()


def growth(rank: int, sizes: Sizes) -> float:
    """Bytes that a position more adds to the peak of a training step of all layers."""
    world_size = distributed.get_world_size()
    peaks = []
    for length in (sizes.length // 8, sizes.length // 4):
        attention: Attention = scaled_dot_product_attention
        if world_size > 1:
            layout = SequenceLayout(length, world_size)
            attention = ContextAttention(layout, SequenceMask("bidirectional"), ring_group=distributed.group.WORLD)
        network = Layers(sizes, attention)
        for parameter in network.parameters():
            # There before, so that only activations count.
            parameter.grad = torch.zeros_like(parameter)
        hidden = torch.randn(1, length // world_size, sizes.heads * sizes.head_dim)
        peaks.append(peak_bytes(partial(train, network, hidden)))
    return (peaks[1] - peaks[0]) / (sizes.length // 8)


def table_of(sizes: Sizes, world_size: int) -> Table:
    """One row for each mask."""
    ranks = run_ranks(measure, world_size, sizes, timeout=1800)
    columns: tuple[str, ...] = (
        "mask",
        "alone, ms",
        f"{world_size} ranks, ms",
        "ratio",
        "hidden",
        "imbalance",
        "MB sent",
        "formula, MB",
    )
    columns += ("kept", "largest difference")
    size = sizes.length * sizes.heads * sizes.head_dim * 4
    # Keys and values forward; they and their gradients backward, which come home with one more message.
    formula = 6 * (world_size - 1) / world_size * size
    rows: list[tuple[str, ...]] = []
    for number, case in enumerate(cases(sizes)):
        figures = [answers[number] for answers in ranks]
        together = max(each["together"] for each in figures)
        computing = [each["computing"] for each in figures]
        row = (
            case.name,
            milliseconds(figures[0]["alone"]),
            milliseconds(together),
            f"{together / figures[0]['alone']:.2f}",
            f"{min(each['hidden'] for each in figures):.0%}",
            f"{max(computing) / statistics.mean(computing) - 1:.1%}",
            f"{max(each['bytes'] for each in figures) / 1e6:.2f}",
            f"{formula / 1e6:.2f}",
            f"{max(each['kept'] / each['kept_alone'] for each in figures):.2f}",
            f"{max(each['error'] for each in figures):.0e}",
        )
        rows.append(row)
    note = (
        f"Forward and backward of {sizes.length} positions, {sizes.heads} heads of {sizes.head_dim}, fp32. `kept` is a "
        "rank's share of what one process keeps for its backward pass; `imbalance` is of seconds in attention."
    )
    return Table(f"Attention on {world_size} ranks", note, columns, rows)


def longest_table(sizes: Sizes, world_sizes: list[int]) -> Table:
    """How much longer a sequence fits on so many ranks."""
    growths = {size: max(run_ranks(growth, size, sizes, timeout=1800)) for size in (1, *world_sizes)}
    rows: list[tuple[str, ...]] = [
        (str(size), f"{bytes_a_position / 1e3:.1f}", f"{growths[1] / bytes_a_position:.2f}x")
        for size, bytes_a_position in growths.items()
    ]
    note = (
        f"Peak of a rank's memory for activations in a training step of {sizes.depth} layers, for each position of the "
        "whole sequence, and so how much longer a sequence fits into the same memory. Bidirectional attention."
    )
    return Table("Memory of a position", note, ("ranks", "kB a position", "longest sequence"), rows)


def contest(rank: int, sizes: Sizes, causal: bool) -> dict[str, list[float]]:
    """Seconds, and errors of output and gradients against double precision, of both packages on contiguous parts."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    world_size = distributed.get_world_size()
    layout = SequenceLayout(sizes.length, world_size)
    ours = ContextAttention(
        layout, SequenceMask("causal" if causal else "bidirectional"), ring_group=distributed.group.WORLD
    )

    def theirs(*tensors: Tensor) -> Tensor:
        moved = (tensor.transpose(1, 2) for tensor in tensors)
        attended: Tensor = ring_flash_attn(*moved, causal=causal, ring_reduce_col=True)
        return attended.transpose(1, 2)

    whole = whole_inputs(sizes)
    exact = step(partial(scaled_dot_product_attention, is_causal=causal), [tensor.double() for tensor in whole])
    own = [layout.shard(tensor, rank, dim=-2) for tensor in whole]
    contestants: list[tuple[str, Attention]] = [("this one", ours), ("ring-attention-pytorch", theirs)]
    errors = {}
    for name, attention in contestants:
        parts = zip(step(attention, own), exact, strict=True)
        errors[name] = [float((mine - layout.shard(right, rank, -2)).abs().max()) for mine, right in parts]
    times: dict[str, list[float]] = {name: [] for name, _ in contestants}
    for _, (name, attention) in itertools.product(range(sizes.rounds), contestants):
        distributed.barrier()
        times[name].append(seconds_of(partial(step, attention, own)))
    return {name: [statistics.median(times[name]), *errors[name]] for name, _ in contestants}


def contest_table(sizes: Sizes, world_size: int) -> Table:
    """One row for each mask and package."""
    rows: list[tuple[str, ...]] = []
    for causal in (False, True):
        ranks = run_ranks(contest, world_size, sizes, causal, timeout=1800)
        for name in ranks[0]:
            seconds, *errors = (max(answers[name][place] for answers in ranks) for place in range(5))
            mask = "causal" if causal else "bidirectional"
            rows.append((mask, name, milliseconds(seconds), *(f"{error:.1e}" for error in errors)))
    note = f"The same work on {world_size} ranks and contiguous parts; largest errors against double precision."
    columns: tuple[str, ...] = ("mask", "package", "ms", "output", "of queries", "of keys", "of values")
    return Table("Against another package", note, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=Sizes.length)
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    arguments = parser.parse_args()
    sizes = Sizes(length=arguments.length, rounds=arguments.rounds)
    torch.set_num_threads(1)
    console = Console(width=200)
    for world_size in arguments.ranks:
        table_of(sizes, world_size).show(console)
    if importlib.util.find_spec("ring_attention_pytorch") is not None:
        contest_table(sizes, arguments.ranks[0]).show(console)
    longest_table(sizes, arguments.ranks).show(console)


if __name__ == "__main__":
    main()
