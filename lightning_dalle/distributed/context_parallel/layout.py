"""Which positions of a sequence each process of a context group holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

LayoutKind = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class SequenceLayout:
    """Shards of `length` positions among `num_ranks` processes, as even as it can be: nothing is padded or dropped.

    - `contiguous`: one run of positions each;
    - `zigzag`: of twice as many runs, the first and the last, the second and the last but one, and so on, so that
      under a causal mask all processes have the same work.

    Args:
        length: Positions of the whole sequence; at least one for each run.

    Raises:
        ValueError: If the kind is unknown, or a run would be empty.

    Example:
        >>> SequenceLayout(10, num_ranks=2, kind="zigzag").positions(0).tolist()
        [0, 1, 7, 8, 9]
    """

    length: int
    num_ranks: int
    kind: LayoutKind = "contiguous"

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayoutKind):
            raise ValueError(f"kind ({self.kind!r}) must be one of {', '.join(get_args(LayoutKind))}")
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks ({self.num_ranks}) must be at least 1")
        if self.length < self._num_runs:
            raise ValueError(
                f"length ({self.length}) must be at least {self._num_runs}, the runs of a {self.kind} layout on "
                f"num_ranks ({self.num_ranks}); use fewer ranks or a longer sequence"
            )

    def runs(self, rank: int) -> tuple[range, ...]:
        """Return the positions of a process as runs, in the order in which it holds them."""
        if self.kind == "contiguous":
            return (self._run(rank),)
        return self._run(rank), self._run(self._num_runs - 1 - rank)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Int[Tensor, " local"]:
        """Return the positions of a process, for position embeddings and rotations."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs(rank)])

    def local_length(self, rank: int) -> int:
        """Return how many positions a process holds."""
        return sum(map(len, self.runs(rank)))

    def shard(self, tensor: Tensor, rank: int, dim: int = -1) -> Tensor:
        """Return the part of a whole tensor that a process holds; gradients flow.

        Raises:
            ValueError: If `tensor` does not have `length` positions along `dim`.
        """
        if tensor.shape[dim] != self.length:
            raise ValueError(
                f"tensor has {tensor.shape[dim]} positions along dim {dim}, but the layout has length {self.length}"
            )
        return torch.cat([tensor.narrow(dim, run.start, len(run)) for run in self.runs(rank)], dim)

    def unshard(self, parts: Sequence[Tensor], dim: int = -1) -> Tensor:
        """Return the whole tensor, from the parts of all processes in the order of ranks."""
        order = torch.cat([self.positions(rank) for rank in range(self.num_ranks)]).argsort()
        whole = torch.cat(list(parts), dim)
        return whole.index_select(dim, order.to(whole.device))

    def labels(
        self,
        tokens: Int[Tensor, "*batch length"],
        rank: int,
        document_ids: Int[Tensor, "*#batch length"] | None = None,
        ignore_index: int = -100,
    ) -> Int[Tensor, "*batch local"]:
        """Return the next token at each position of a process, wherever that token lies.

        Args:
            document_ids: Number of the packed document of each position, whose last token predicts nothing.
            ignore_index: Label where there is no next token.
        """
        labels = tokens.roll(-1, dims=-1)
        labels[..., -1] = ignore_index
        if document_ids is not None:
            labels = labels.masked_fill(document_ids != document_ids.roll(-1, dims=-1), ignore_index)
        return self.shard(labels, rank)

    @property
    def _num_runs(self) -> int:
        return self.num_ranks * (2 if self.kind == "zigzag" else 1)

    def _run(self, index: int) -> range:
        return range(index * self.length // self._num_runs, (index + 1) * self.length // self._num_runs)
