"""k-means on tensors."""

import pytest
import torch

from lightning_dalle.ops.k_means import k_means, nearest_centre


def test_nearest_centre_is_that_of_cdist() -> None:
    points, centres = torch.randn(500, 6), torch.randn(9, 6)
    assert torch.equal(nearest_centre(points, centres), torch.cdist(points, centres).argmin(dim=1))


def test_separate_clusters_are_found() -> None:
    means = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    points = means.repeat_interleave(50, dim=0) + 0.1 * torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    centres = k_means(points, 4, iterations=5, seed=0)
    nearest = nearest_centre(means, centres)
    assert sorted(nearest.tolist()) == [0, 1, 2, 3]
    # The mean of 50 points of deviation 0.1 is within 0.06 of the truth in four standard deviations.
    torch.testing.assert_close(centres[nearest], means, rtol=0, atol=0.06)


def test_iterations_never_raise_the_error() -> None:
    points = torch.rand(400, 3, generator=torch.Generator().manual_seed(1))
    errors = []
    for iterations in range(6):
        centres = k_means(points, 7, iterations=iterations, seed=2)
        errors.append((points - centres[nearest_centre(points, centres)]).square().sum().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


def test_seeds_are_distinct_among_many_equal_points() -> None:
    points = torch.cat([torch.zeros(1000, 2), torch.eye(2), torch.ones(1, 2)])
    centres = k_means(points, 4, iterations=3, seed=0)
    assert len(centres.unique(dim=0)) == 4


def test_weights_count_like_repeated_points() -> None:
    generator = torch.Generator().manual_seed(4)
    points = torch.rand(60, 3, dtype=torch.float64, generator=generator)
    times = torch.randint(1, 5, (60,), generator=generator)
    repeated = k_means(points.repeat_interleave(times, dim=0), 6, iterations=5, seed=1)
    weighted = k_means(points, 6, iterations=5, seed=1, weights=times.double())
    torch.testing.assert_close(weighted, repeated)


def test_fewer_distinct_points_than_clusters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_clusters \(3\) exceeds the 2 distinct points found; give more points"):
        k_means(torch.eye(2).repeat(5, 1), 3, iterations=1, seed=0)
