"""Memory of attention over a sharded sequence: what is kept for the backward pass, and the peak of a training step."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.ops.attention.mask import SequenceMask
from tests.benchmarks.context_sizes import Attention, Sizes
from tests.benchmarks.table import Table
from tests.ranks import run_ranks


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
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.attention = heads, attention

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.projections(self.norm(hidden)).unflatten(-1, (3, self.heads, -1))
        attended = self.attention(*projected.permute(2, 0, 3, 1, 4))
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        return hidden + self.fc2(gelu(self.fc1(self.network_norm(hidden))))


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
