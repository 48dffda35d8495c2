"""k-means with k-means++ seeding, reproducible from a seed."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def nearest_centre(
    points: Float[Tensor, "points features"], centres: Float[Tensor, "clusters features"]
) -> Int[Tensor, " points"]:
    """Return the index of the nearest centre in the Euclidean norm, in blocks that bound the memory."""
    half_squared_norms = centres.square().sum(dim=1) / 2
    blocks = points.split(max(1, 2**24 // len(centres)))
    return torch.cat([torch.addmm(half_squared_norms, block, centres.T, alpha=-1).argmin(dim=1) for block in blocks])


def k_means(
    points: Float[Tensor, "points features"],
    num_clusters: int,
    *,
    iterations: int,
    seed: int,
    weights: Float[Tensor, " points"] | None = None,
) -> Float[Tensor, "clusters features"]:
    """Cluster points by Lloyd's iterations from a k-means++ start; an empty cluster keeps its centre.

    Args:
        weights: How many times each point counts, positive; None is once.

    Raises:
        ValueError: If there are fewer distinct points than clusters.
    """
    weights = torch.ones_like(points[:, 0]) if weights is None else weights
    weighted = points * weights[:, None]
    centres = _plus_plus_seeds(points, weights, num_clusters, torch.Generator().manual_seed(seed))
    for _ in range(iterations):
        assignment = nearest_centre(points, centres)
        counts = torch.zeros_like(centres[:, 0]).index_add_(0, assignment, weights)
        sums = torch.zeros_like(centres).index_add_(0, assignment, weighted)
        filled = counts[:, None] > 0
        centres = torch.where(filled, sums / torch.where(filled, counts[:, None], 1), centres)
    return centres


def _plus_plus_seeds(
    points: Float[Tensor, "points features"],
    weights: Float[Tensor, " points"],
    num_clusters: int,
    generator: torch.Generator,
) -> Float[Tensor, "clusters features"]:
    """Choose each next seed with a probability proportional to its weighted squared distance from the seeds so far."""
    uniforms = torch.rand(num_clusters, generator=generator, dtype=torch.float64).tolist()
    chosen = [int(uniforms[0] * len(points))]
    squared_norms = points.square().sum(dim=1)
    squared_distances = _squared_distances(points, squared_norms, chosen[0])
    for uniform in uniforms[1:]:
        cumulative = (squared_distances.double() * weights).cumsum(dim=0)
        if cumulative[-1] <= 0:
            raise ValueError(
                f"num_clusters ({num_clusters}) exceeds the {len(chosen)} distinct points found; "
                "give more points or ask for fewer clusters"
            )
        # right=True never lands on a point of zero distance, that is on a seed taken before.
        index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
        chosen.append(min(int(index), len(points) - 1))
        newest = _squared_distances(points, squared_norms, chosen[-1])
        torch.minimum(squared_distances, newest, out=squared_distances)
    return points[chosen]


def _squared_distances(
    points: Float[Tensor, "points features"], squared_norms: Float[Tensor, " points"], index: int
) -> Float[Tensor, " points"]:
    """From one of the points to all, exactly 0 where rounding could hide that two are equal.

    A matrix-vector product reads the points once; their differences would be written and read again for every seed.
    """
    sizes = squared_norms + squared_norms[index]
    distances = torch.addmv(sizes, points, points[index], alpha=-2)
    return distances.masked_fill(distances <= 4e-6 * sizes, 0)
