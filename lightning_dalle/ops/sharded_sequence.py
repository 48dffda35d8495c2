"""Sharded sequences seen from code that is written for whole ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.attention.patterns import AttentionPattern


class SequenceShard(Protocol):
    """What knows the rest of a sequence of which this process holds a part."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: AttentionPattern | PackedSegments,
        dropout: float,
        dropout_seed: int,
    ) -> Tensor:
        """Attention of the own positions to those of all processes."""
        ...

    def positions(self, length: int, device: torch.device | str) -> Tensor:
        """The own positions of a sequence."""
        ...

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The sum of all processes' totals over that of their counts."""
        ...


# Not a context variable: on CUDA a backward pass runs in threads of its own.
_current: list[SequenceShard | None] = [None]


def current_shard() -> SequenceShard | None:
    """The cut that holds at the moment; None where sequences are whole."""
    return _current[-1]


@contextmanager
def sharded_sequences(cut: SequenceShard | None) -> Iterator[None]:
    """Sequences are cut in this way within, or whole in spite of a cut around it, as generation needs them."""
    _current.append(cut)
    try:
        yield
    finally:
        _current.pop()


def local_positions(length: int, device: torch.device | str = "cpu") -> Int[Tensor, " local"]:
    """Positions of a sequence that this process holds, in their order: all of them where sequences are whole."""
    cut = current_shard()
    return torch.arange(length, device=device) if cut is None else cut.positions(length, device)


def sequence_mean(total: Float[Tensor, "*shape"], count: Num[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """A sum over positions divided by their number; those of the whole sequence where it is cut.

    A loss over a cut sequence is to be written with it: a mean of the processes' own means weighs them wrongly. Under a
    cut all processes of its group must call it.

    Args:
        count: May be 0, which gives 0 for a sum of nothing.

    Example:
        >>> import torch
        >>> labels = torch.tensor([[1, 0, -100]])
        >>> total = torch.nn.functional.cross_entropy(torch.zeros(1, 2, 3), labels, reduction="sum")
        >>> sequence_mean(total, (labels != -100).sum())
        tensor(0.6931)
    """
    cut = current_shard()
    return total / count.clamp(min=1) if cut is None else cut.mean(total, count)
