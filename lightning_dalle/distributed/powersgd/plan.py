"""Which parameters PowerSGD compresses, and as which matrices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn


def uncompressed_names(module: nn.Module, patterns: Iterable[str] = ()) -> frozenset[str]:
    """Names, as `named_parameters` gives them, of embeddings, of what is tied to one, and of what a pattern matches.

    Vectors need no naming: they are never compressed.

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
    places = dict(module.named_parameters(remove_duplicate=False))
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    for pattern in patterns:
        matched = [parameter for name, parameter in places.items() if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(f"pattern {pattern!r} matches no parameter; names are such as {list(places)[:3]}")
        excluded |= {first_names[id(parameter)] for parameter in matched}
    return frozenset(excluded)


@dataclass(frozen=True)
class MatrixPlan:
    """One gradient that is sent as two factors, of which that with the rows becomes orthonormal.

    Attributes:
        place: Of the gradient in the list of all.
        name: Of the parameter.
        transposed: Whether rows are the gradient's flattened trailing dimensions.
    """

    place: int
    name: str
    rows: int
    columns: int
    rank: int
    transposed: bool

    def matrix_of(self, tensor: Tensor) -> Tensor:
        """The gradient as [rows, columns], a view of its memory."""
        matrix = tensor.view(tensor.shape[0], -1)
        return matrix.T if self.transposed else matrix

    @property
    def num_sent(self) -> int:
        """Elements of both factors."""
        return self.rank * (self.rows + self.columns)


@dataclass(frozen=True)
class CompressionPlan:
    """Every gradient is in one of the two lists.

    Attributes:
        matrices: Those sent as factors.
        uncompressed: Places of those sent as they are, in 32 bits.
        num_elements: Of all gradients.
    """

    matrices: tuple[MatrixPlan, ...]
    uncompressed: tuple[int, ...]
    num_elements: int

    @property
    def num_sent(self) -> int:
        """Elements that travel for one reduction."""
        in_matrices = sum(matrix.rows * matrix.columns for matrix in self.matrices)
        return self.num_elements - in_matrices + sum(matrix.num_sent for matrix in self.matrices)

    @property
    def rate(self) -> float:
        """Share of the elements that need not travel."""
        return 1 - self.num_sent / self.num_elements if self.num_elements else 0.0


def plan_compression(
    shapes: Mapping[str, Sequence[int]],
    *,
    rank: int,
    min_compression_rate: float = 0.5,
    minimum_elements: int = 0,
    excluded: frozenset[str] = frozenset(),
    transpose: bool = True,
) -> CompressionPlan:
    """Choose what is compressed among gradients of these shapes, in their order.

    A tensor of more than two dimensions counts as the matrix of its first against all others.

    Args:
        shapes: Of what one process holds, which are shards where parameters are sharded.
        rank: Of each matrix, at most its smaller side.
        min_compression_rate: Share of its elements that a matrix must save, else it travels whole. Negative values compress
            where that costs more than it saves.
        minimum_elements: Smaller tensors travel whole.
        excluded: Names of tensors that travel whole.
        transpose: Tall matrices, so that the orthonormal factor is the smaller one; at full rank that is done anyway.

    Example:
        The paper's transformer layer of width d on 8 devices saves 1 - 5r/(8d):

        >>> d, r = 3968, 896
        >>> layer = {name: (d, d // 8) for name in ("query", "key", "value", "output")}
        >>> layer |= {"expand": (d, 4 * d // 8), "contract": (4 * d // 8, d)}
        >>> round(plan_compression(layer, rank=r // 8).rate, 3), round(1 - 5 * r / (8 * d), 3)
        (0.859, 0.859)
    """
    matrices, uncompressed = [], []
    for place, (name, shape) in enumerate(shapes.items()):
        matrix = _as_matrix(place, name, shape, rank, transpose)
        numel = math.prod(shape)
        if (
            matrix is None
            or name in excluded
            or numel < minimum_elements
            or 1 - matrix.num_sent / numel < min_compression_rate
        ):
            uncompressed.append(place)
        else:
            matrices.append(matrix)
    return CompressionPlan(tuple(matrices), tuple(uncompressed), sum(math.prod(shape) for shape in shapes.values()))


def _as_matrix(place: int, name: str, shape: Sequence[int], rank: int, transpose: bool) -> MatrixPlan | None:
    """The matrix, or None of a scalar, a vector or a shard that holds nothing."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    first, others = shape[0], math.prod(shape[1:])
    # At full rank the square basis of the smaller side loses nothing, not even to rounding.
    transposed = first > others and (transpose or rank >= others)
    rows, columns = (others, first) if transposed else (first, others)
    return MatrixPlan(place, name, rows, columns, min(rank, first, others), transposed)
