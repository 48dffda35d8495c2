"""What attention over a sharded sequence sends, and what it keeps for the backward pass."""

from functools import partial

import pytest
import torch
from torch import Tensor, distributed

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.ops.attention.mask import SequenceMask
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.attention.schedule import window_reach
from tests.distributed.engines import ENGINES, groups
from tests.distributed.sequences import BATCH, HEAD_DIM, LENGTH, MASKS, TEXT, inputs, shards
from tests.ranks import run_ranks


def _costs(rank: int, length: int) -> dict[str, tuple[int, int, int]]:
    return {engine: _cost(rank, engine, length) for engine in ENGINES[distributed.get_world_size()]}


def _cost(rank: int, engine: str, length: int) -> tuple[int, int, int]:
    """Bytes sent forward, bytes sent backward, bytes kept for it."""
    layout = SequenceLayout(length, distributed.get_world_size())
    kept: dict[int, int] = {}
    whole = [torch.randn(BATCH, 2 * layout.num_ranks, length, HEAD_DIM, dtype=torch.float64) for _ in range(3)]
    query, key, value = shards(layout, rank, whole)
    attention = ContextAttention(layout, SequenceMask("bidirectional"), **groups(engine))
    with torch.autograd.graph.saved_tensors_hooks(partial(_keep, kept), lambda tensor: tensor):
        output = attention(query, key, value)
    forward = attention.statistics.bytes_sent
    output.sum().backward()
    return forward, attention.statistics.bytes_sent - forward, sum(kept.values())


def _keep(kept: dict[int, int], tensor: Tensor) -> Tensor:
    kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return tensor


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_that_are_sent_and_kept_by_each_rank(world_size: int) -> None:
    length = 16 * world_size
    tensor = BATCH * 2 * world_size * length * HEAD_DIM * 8
    others = world_size - 1
    for costs in run_ranks(_costs, world_size, length):
        # Keys and values of all others but one come by and go on; backward, their gradients do too.
        assert costs["ring"][:2] == (2 * others * tensor // world_size, 4 * others * tensor // world_size)
        # Of query, key, value and output all but one part is traded, and traded back.
        traded = 4 * others * tensor // world_size**2
        assert costs["heads"][:2] == (traded, traded)
        for _, _, kept in costs.values():
            # Query, key, value, output and a number for each query.
            assert kept == (4 * tensor + tensor // HEAD_DIM) // world_size


def _uneven_bytes(rank: int) -> int:
    layout = SequenceLayout(LENGTH, distributed.get_world_size(), "zigzag")
    attention = ContextAttention(layout, SequenceMask(), **groups("ring"))
    attention(*shards(layout, rank, inputs(2, 2)[:3]))
    assert attention.statistics.communication_seconds >= attention.statistics.waiting_seconds > 0
    assert attention.statistics.attention_seconds > 0
    return attention.statistics.bytes_sent


def test_uneven_parts_travel_unpadded() -> None:
    assert sum(run_ranks(_uneven_bytes, 3)) == 2 * 2 * BATCH * 2 * LENGTH * HEAD_DIM * 8


def _window_costs(rank: int) -> tuple[int, int, int]:
    """Bytes sent forward, bytes sent backward, bytes kept for it."""
    layout, kept = SequenceLayout(LENGTH, distributed.get_world_size()), dict[int, int]()
    query, key, value = shards(layout, rank, inputs(2, 2)[:3])
    attention = ContextAttention(layout, MASKS["row"], **groups("ring"))
    with torch.autograd.graph.saved_tensors_hooks(partial(_keep, kept), lambda tensor: tensor):
        output = attention(query, key, value)
    forward = attention.statistics.bytes_sent
    output.sum().backward()
    return forward, attention.statistics.bytes_sent - forward, sum(kept.values())


def test_rows_travel_to_those_alone_that_see_them_and_are_not_kept() -> None:
    pair = 2 * BATCH * 2 * HEAD_DIM * 8
    rule = MASKS["row"].rule
    assert isinstance(rule, AttentionPattern)
    row, seen = window_reach(rule) * pair, (TEXT + window_reach(rule)) * pair
    # The first rank holds the text and the row before the second's. Gradients of both come home.
    expected = {2: [(seen, seen), (0, seen)], 3: [(2 * seen - row, 2 * seen - row), (row, row + seen), (0, seen)]}
    for world_size, bytes_sent in expected.items():
        costs = run_ranks(_window_costs, world_size)
        assert [cost[:2] for cost in costs] == bytes_sent
        layout = SequenceLayout(LENGTH, world_size)
        # Query, key, value, output and a number for each query.
        assert [cost[2] for cost in costs] == [
            layout.local_length(rank) * BATCH * 2 * (4 * HEAD_DIM + 1) * 8 for rank in range(world_size)
        ]
