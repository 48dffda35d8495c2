"""Access to sharded sequences for code that is written for whole ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.attention.patterns import AttentionPattern


class SequenceShard(Protocol):
    """Local shard of a sequence, which knows the shards of the other processes."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: AttentionPattern | PackedSegments,
        dropout: float,
        dropout_seed: int,
    ) -> Tensor:
        """Attend from the local positions to those of all processes."""
        ...

    def positions(self, length: int, device: torch.device | str) -> Tensor:
        """Return the local positions of a sequence."""
        ...

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """Return the sum of all processes' totals over that of their counts."""
        ...


# Not a context variable: on CUDA a backward pass runs in threads of its own.
_current: list[SequenceShard | None] = [None]


def current_shard() -> SequenceShard | None:
    """Return the innermost shard that `sharded_sequences` made current; None where sequences are whole."""
    return _current[-1]


@contextmanager
def sharded_sequences(shard: SequenceShard | None) -> Iterator[None]:
    """Shard sequences within; with None they are whole, whatever is sharded around it, as generation needs them."""
    _current.append(shard)
    try:
        yield
    finally:
        _current.pop()


def local_positions(length: int, device: torch.device | str = "cpu") -> Int[Tensor, " local"]:
    """Return the positions of a sequence that this process holds, in their order: all where sequences are whole."""
    shard = current_shard()
    return torch.arange(length, device=device) if shard is None else shard.positions(length, device)


def sequence_mean(total: Float[Tensor, "*shape"], count: Num[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """Return a sum over positions divided by their number, both of the whole sequence where it is sharded.

    Write the loss of a sharded sequence with it: a mean of the processes' means weighs them wrongly. All processes that
    share the sequence must call it.

    Args:
        count: May be 0, which gives 0 for a sum of nothing.

    Example:
        >>> import torch
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> total = torch.nn.functional.cross_entropy(torch.zeros(1, 2, 3), labels, reduction="sum")
        >>> sequence_mean(total, (labels != -100).sum())
        tensor(0.6931)
    """
    shard = current_shard()
    return total / count.clamp(min=1) if shard is None else shard.mean(total, count)
