"""Attention over a sharded sequence against the PyPI package ring-attention-pytorch.

Release 0.5.20 of it is right forward, and in the gradient of queries. Its backward pass takes what a hand-over gives,
what came and what was sent, for the gradients of keys and values; both are stacks of the two, over which autograd
sums. So keys and values get the sum of both gradients, values that of another rank's. No way of calling it avoids that,
which is why the forward pass is timed by itself too.
"""

import itertools
import statistics
from functools import partial

import torch
from torch import Tensor, distributed
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.ops.attention.mask import SequenceMask
from tests.benchmarks.context_sizes import Attention, Sizes, step, whole_inputs
from tests.benchmarks.table import Table, milliseconds
from tests.benchmarks.timing import seconds_of
from tests.ranks import run_ranks


def contest(rank: int, sizes: Sizes, causal: bool) -> dict[str, list[float]]:
    """What both packages take and how far they are from double precision, on contiguous parts.

    Seconds of the forward pass and of forward and backward, and largest errors of output and gradients.
    """
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
    works = {
        (name, stage): work
        for name, attention in contestants
        for stage, work in (("forward", partial(forward, attention, own)), ("both", partial(step, attention, own)))
    }
    times: dict[tuple[str, str], list[float]] = {case: [] for case in works}
    for _, (case, work) in itertools.product(range(sizes.rounds), works.items()):
        distributed.barrier()
        times[case].append(seconds_of(work))
    medians = {case: statistics.median(seconds) for case, seconds in times.items()}
    return {name: [medians[name, "forward"], medians[name, "both"], *errors[name]] for name, _ in contestants}


@torch.no_grad()
def forward(attention: Attention, tensors: list[Tensor]) -> None:
    attention(*tensors[:3])


def contest_table(sizes: Sizes, world_size: int) -> Table:
    """One row for each mask and package."""
    rows: list[tuple[str, ...]] = []
    for causal in (False, True):
        ranks = run_ranks(contest, world_size, sizes, causal, timeout=1800)
        for name in ranks[0]:
            *seconds, output, query, key, value = (
                max(answers[name][place] for answers in ranks) for place in range(len(ranks[0][name]))
            )
            errors = output, query, key, value
            mask = "causal" if causal else "bidirectional"
            rows.append((mask, name, *map(milliseconds, seconds), *(f"{error:.1e}" for error in errors)))
    note = f"The same work on {world_size} ranks and contiguous parts; largest errors against double precision."
    columns: tuple[str, ...] = (
        "mask",
        "package",
        "forward, ms",
        "with backward, ms",
        "output",
        "of queries",
        "of keys",
        "of values",
    )
    return Table("Against another package", note, columns, rows)
