"""Choice of the parameters that PowerSGD compresses, and of their matrices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn


def uncompressed_names(module: nn.Module, patterns: Iterable[str] = ()) -> frozenset[str]:
    """Return names of embeddings, of what is tied to one, and of what a pattern matches.

    They are those of `named_parameters`. Vectors need no naming: they are never compressed.

    Args:
        patterns: Shell-style, against the whole name, as `*_head.weight`.

    Raises:
        ValueError: If a pattern matches no parameter.

    Example:
        >>> network = nn.ModuleDict({"tokens": nn.Embedding(9, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 9)})
        >>> sorted(uncompressed_names(network, ["head.*"]))
        ['head.bias', 'head.weight', 'tokens.weight']
    """
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    excluded = {name for name, parameter in module.named_parameters() if id(parameter) in embeddings}
    # A tied parameter has several names, of which a pattern may match any.
    by_every_name = dict(module.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    for pattern in patterns:
        matched = [parameter for name, parameter in by_every_name.items() if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"pattern {pattern!r} matches no parameter; names are such as {list(by_every_name)[:3]}")
        excluded |= {first_names[id(parameter)] for parameter in matched}
    return frozenset(excluded)


@dataclass(frozen=True)
class MatrixPlan:
    """One gradient that is sent as P [rows, rank] and Q [columns, rank], where P becomes orthonormal.

    Attributes:
        index: Index of the gradient in the list of all.
        name: Name of the parameter.
        transposed: Whether rows are the gradient's flattened trailing dimensions.
    """

    index: int
    name: str
    rows: int
    columns: int
    rank: int
    transposed: bool

    def matrix_of(self, tensor: Tensor) -> Tensor:
        """View the gradient as [rows, columns]."""
        matrix = tensor.view(tensor.shape[0], -1)
        return matrix.T if self.transposed else matrix

    @property
    def num_sent(self) -> int:
        """Number of elements of P and Q."""
        return self.rank * (self.rows + self.columns)


@dataclass(frozen=True)
class CompressionPlan:
    """Division of all gradients into compressed and uncompressed ones.

    Attributes:
        matrices: Gradients sent as P and Q.
        uncompressed: Indices of those sent as they are, in 32 bits.
        num_elements: Number of elements of all gradients.
    """

    matrices: tuple[MatrixPlan, ...]
    uncompressed: tuple[int, ...]
    num_elements: int

    @property
    def num_sent(self) -> int:
        """Number of elements sent for one reduction."""
        in_matrices = sum(matrix.rows * matrix.columns for matrix in self.matrices)
        return self.num_elements - in_matrices + sum(matrix.num_sent for matrix in self.matrices)

    @property
    def rate(self) -> float:
        """Share of the elements that need not be sent."""
        return 1 - self.num_sent / self.num_elements if self.num_elements else 0.0


def plan_compression(
    shapes: Mapping[str, Sequence[int]],
    *,
    rank: int,
    min_compression_rate: float = 2.0,
    min_elements: int = 0,
    excluded: frozenset[str] = frozenset(),
    transpose: bool = True,
) -> CompressionPlan:
    """Choose what is compressed among gradients of these shapes, in their order.

    A tensor of more than two dimensions counts as the matrix of its first against all others.

    Args:
        shapes: Shapes that one process holds, which are those of shards where parameters are sharded.
        rank: Rank of each approximation, at most the matrix's smaller side.
        min_compression_rate: A matrix is sent uncompressed where P and Q have more than 1 / this many of its elements.
        min_elements: Smaller tensors are sent uncompressed.
        excluded: Names of tensors that are sent uncompressed.
        transpose: Transpose tall matrices, so that P is the smaller of P and Q; at full rank that is done anyway.

    Example:
        The paper's transformer layer of width d on 8 devices saves 1 - 5r/(8d):

        >>> d, r = 3968, 896
        >>> layer = {name: (d, d // 8) for name in ("query", "key", "value", "output")}
        >>> layer |= {"fc1": (d, 4 * d // 8), "fc2": (4 * d // 8, d)}
        >>> round(plan_compression(layer, rank=r // 8).rate, 3), round(1 - 5 * r / (8 * d), 3)
        (0.859, 0.859)
    """
    matrices, uncompressed = [], []
    for index, (name, shape) in enumerate(shapes.items()):
        matrix = _as_matrix(index, name, shape, rank, transpose)
        numel = math.prod(shape)
        if matrix is None or name in excluded or numel < min_elements or matrix.num_sent * min_compression_rate > numel:
            uncompressed.append(index)
        else:
            matrices.append(matrix)
    return CompressionPlan(tuple(matrices), tuple(uncompressed), sum(math.prod(shape) for shape in shapes.values()))


def _as_matrix(index: int, name: str, shape: Sequence[int], rank: int, transpose: bool) -> MatrixPlan | None:
    """Return the matrix, or None for a scalar, a vector or an empty shard."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    first, others = shape[0], math.prod(shape[1:])
    # At full rank the square basis of the smaller side loses nothing, not even to rounding.
    transposed = first > others and (transpose or rank >= others)
    rows, columns = (others, first) if transposed else (first, others)
    return MatrixPlan(index, name, rows, columns, min(rank, first, others), transposed)
