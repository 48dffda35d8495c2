"""P that is sent during the last backward pass, against P that is sent after it."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from tests.distributed.toy_module import Toy, batches, powersgd_strategy, trainer_of, whole_state
from tests.foreign_module import LIGHTNING_WARNINGS
from tests.ranks import run_ranks

pytestmark = LIGHTNING_WARNINGS
OPTIONS: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


class _Counting(Toy):
    """Notes after each backward pass how many buckets of P are in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def on_after_backward(self) -> None:
        overlap = self.trainer.strategy.gradients._overlap  # type: ignore[attr-defined]
        self.sent.append(len(overlap._in_flight) if overlap is not None else 0)


class _LeavesOut(_Counting):
    """One rank leaves a block out, also when the order is recorded."""

    def forward(self, inputs: Tensor) -> Tensor:
        leaves_out = self.global_rank == 1 and self.global_step != 1
        hidden = self.first(inputs)
        for number, block in enumerate(self.blocks):
            hidden = hidden if leaves_out and number == 1 else block(hidden)
        return self.last(hidden * self.gain)


class _RunsTwice(_Counting):
    """The gradients of its blocks come in two parts, from two backward passes where each checkpoint has its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in (*self.blocks, *self.blocks):
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.last(hidden * self.gain)


def _train(rank: int, world_size: int, shard_size: int, kind: type[_Counting], overlap: bool) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    module = kind()
    strategy = powersgd_strategy(
        shard_size=shard_size, matrix_approximation_rank=2, min_compression_rate=1.0, overlap=overlap
    )
    loader = batches(8, rank, world_size, torch.float64)
    trainer_of(world_size, strategy, **OPTIONS).fit(module, loader, loader)
    assert isinstance(strategy.gradients, PowerSGDGradients)
    compressor = strategy.gradients.compressor
    hooks = [getattr(part, "_post_accumulate_grad_hooks", None) for part in module.parameters()]
    return {
        "state": whole_state(module),
        "errors": [compressor.error_feedback.peek(index) for index in range(len(compressor.names))],
        "sent": module.sent,
        "bytes": compressor.communication.bytes_sent,
        "matrices": len(compressor.plan.matrices),
        "hooks": sum(len(each) for each in hooks if each),
    }


def _both(rank: int, world_size: int, shard_size: int, kind: type[_Counting]) -> Any:
    return [_train(rank, world_size, shard_size, kind, overlap) for overlap in (False, True)]


@pytest.mark.parametrize(
    ("world_size", "shard_size", "kind"), [(4, 2, _Counting), (2, 1, _LeavesOut), (2, 1, _RunsTwice)]
)
def test_overlap_changes_no_bit(world_size: int, shard_size: int, kind: type[_Counting]) -> None:
    for rank, (plain, overlapped) in enumerate(run_ranks(_both, world_size, world_size, shard_size, kind, timeout=240)):
        # Two replicas add up to the same in every message.
        torch.testing.assert_close(overlapped["state"], plain["state"], rtol=0, atol=0)
        torch.testing.assert_close(overlapped["errors"], plain["errors"], rtol=0, atol=0)
        # Nothing in backward passes that accumulate, nor in the first step, which records the order.
        assert overlapped["sent"][::2] == [0] * 4
        assert overlapped["sent"][1] == 0
        assert min(overlapped["sent"][3::2]) > 0 or (kind is _LeavesOut and rank == 1)
        assert max(overlapped["sent"]) <= overlapped["matrices"]
        assert plain["sent"] == [0] * 8
        assert overlapped["hooks"] == 0
        # Messages of an odd number of bytes are rounded down one by one.
        assert overlapped["bytes"] == pytest.approx(plain["bytes"], rel=1e-3)
