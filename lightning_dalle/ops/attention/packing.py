"""Several sequences packed into one, each attending to itself."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class PackedSegments:
    """Who attends to whom where parts follow each other: all queries of a part to all keys of it, and to no others.

    One part is plain full attention.

    Args:
        of_context: Keys are of another sequence, such as the captions of clips, which whoever holds a part of the
            queries holds whole.

    Raises:
        ValueError: If queries and keys do not have the same number of parts, at least one of them each.
    """

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    of_context: bool = False

    def __post_init__(self) -> None:
        if not self.query_lengths or len(self.query_lengths) != len(self.key_lengths):
            raise ValueError(
                f"query_lengths has {len(self.query_lengths)} parts and key_lengths {len(self.key_lengths)}; both must "
                "have the same number, at least one"
            )

    def check_lengths(self, queries: int, keys: int) -> None:
        """Refuse sequences of another length.

        Raises:
            ValueError: If the parts do not add up to them.
        """
        for name, length, parts in (("query", queries, self.query_lengths), ("key", keys, self.key_lengths)):
            if length != sum(parts):
                raise ValueError(f"{name} has {length} positions, but {name}_lengths {parts} add up to {sum(parts)}")

    @property
    def length(self) -> int:
        """Positions of the queries' sequence."""
        return sum(self.query_lengths)

    def document_ids(self) -> tuple[Int[Tensor, "1 queries"], Int[Tensor, "1 keys"]]:
        """Return the number of the part of each query, and of each key."""
        numbers = torch.arange(len(self.query_lengths))
        queries, keys = (
            numbers.repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
            for lengths in (self.query_lengths, self.key_lengths)
        )
        return queries, keys

    def of_queries(self, positions: Int[Tensor, " own"]) -> "PackedSegments":
        """Return the same for some of the queries, in ascending order, and all keys; parts may have no queries.

        Example:
            >>> PackedSegments((2, 3), (1, 4), of_context=True).of_queries(torch.tensor([3, 4])).query_lengths
            (0, 2)
        """
        counts = self.document_ids()[0][0, positions.cpu()].bincount(minlength=len(self.query_lengths))
        return replace(self, query_lengths=tuple(counts.tolist()))

    def attend(
        self,
        query: Float[Tensor, "batch heads queries head_dim"],
        key: Float[Tensor, "batch heads keys head_dim"],
        value: Float[Tensor, "batch heads keys head_dim"],
    ) -> Float[Tensor, "batch heads queries head_dim"]:
        """Attend part by part, so that no score between two parts is computed."""
        if len(self.query_lengths) == 1:
            return scaled_dot_product_attention(query, key, value)
        parts = zip(
            query.split(self.query_lengths, dim=2),
            key.split(self.key_lengths, dim=2),
            value.split(self.key_lengths, dim=2),
            strict=True,
        )
        return torch.cat([scaled_dot_product_attention(*part) for part in parts if part[0].shape[2]], dim=2)
