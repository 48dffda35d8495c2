"""Means over whole sequences, local positions, and the shard that takes them over."""

import torch
from torch import Tensor

from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.sharded_sequence import current_shard, local_positions, sequence_mean, sharded_sequences


class _Recorder:
    def attend(self, query: Tensor, *_: object) -> Tensor:
        return torch.zeros_like(query)

    def positions(self, length: int, device: torch.device | str) -> Tensor:
        return torch.arange(0, length, 2, device=device)

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        return total + count


def test_mean_of_nothing_is_nothing() -> None:
    totals = torch.tensor([6.0, 0.0], requires_grad=True)
    means = sequence_mean(totals, torch.tensor([3, 0]))
    assert means.tolist() == [2.0, 0.0]
    means.sum().backward()
    assert totals.grad is not None
    torch.testing.assert_close(totals.grad, torch.tensor([1 / 3, 1.0]))


def test_shard_takes_over_until_sequences_are_whole_again() -> None:
    pattern, query, shard = AttentionPattern("row", 3, 2, 2), torch.ones(1, 1, 7, 2), _Recorder()
    with sharded_sequences(shard):
        assert current_shard() is shard
        assert not attend(query[:, :, :4], query[:, :, :4], query[:, :, :4], pattern).any()
        assert float(sequence_mean(torch.tensor(4.0), torch.tensor(2))) == 6
        assert local_positions(5).tolist() == [0, 2, 4]
        with sharded_sequences(None):
            assert attend(query, query, query, pattern).all()
            assert float(sequence_mean(torch.tensor(4.0), torch.tensor(2))) == 2
            assert local_positions(5).tolist() == [0, 1, 2, 3, 4]
    assert current_shard() is None
