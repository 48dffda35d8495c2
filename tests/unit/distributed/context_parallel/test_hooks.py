"""A plan attached to a module, on one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.distributed.context_parallel.comm import ContextGroups
from lightning_dalle.distributed.context_parallel.hooks import attach_plan
from lightning_dalle.distributed.context_parallel.plan import SequencePlan
from lightning_dalle.distributed.context_parallel.session import ContextParallelSession
from lightning_dalle.ops.sharded_sequence import current_shard

LENGTH = 9


def _session(**plan: Any) -> ContextParallelSession:
    return ContextParallelSession(SequencePlan(**{"batch": {"tokens": 1}, **plan}), ContextGroups())


def _batch() -> dict[str, Tensor]:
    return {"tokens": torch.arange(2 * LENGTH).view(2, LENGTH)}


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.last = _Pair()


class _Pair(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
        return hidden, 7


def test_plan_is_attached_to_what_exists() -> None:
    network = _Network()
    session = _session(inputs={"first": {"input": 1}}, outputs={"last": 1})
    handles = attach_plan(network, session)
    assert len(handles) == 2
    hidden = torch.randn(2, LENGTH, 3)
    assert network.last(network.first(hidden))[0] is hidden
    with session.step(_batch()):
        output, other = network.last(network.first(input=hidden))
        _attend()
    assert torch.equal(output, hidden)
    assert other == 7
    with pytest.raises(ValueError, match="'second' is no submodule of _Network"):
        attach_plan(network, _session(outputs={"second": 1}))
    with pytest.raises(
        ValueError, match=r"first takes no argument \['hidden'\], which the plan shards; it takes \(input"
    ):
        attach_plan(network, _session(inputs={"first": {"hidden": 1}}, outputs={"last": 1}))


def _attend() -> Tensor:
    return scaled_dot_product_attention(*torch.randn(3, 2, 2, LENGTH, 4))


class _Fails(nn.Module):
    def forward(self, fails: bool) -> object:
        if fails:
            raise KeyError
        return current_shard()


def test_unsharded_submodules_see_whole_sequences_also_after_an_error() -> None:
    network = nn.ModuleDict({"caption": _Fails()})
    session = _session(unsharded=["caption"])
    handles = attach_plan(network, session)
    with session.step(_batch()):
        _attend()
        assert network["caption"](False) is None
        with pytest.raises(KeyError):
            network["caption"](True)
        assert current_shard() is session
    for handle in handles:
        handle.remove()
    with session.step(_batch()):
        _attend()
        assert network["caption"](False) is session
    with pytest.raises(ValueError, match="'text' is no submodule of ModuleDict"):
        attach_plan(network, _session(unsharded=["text"]))
