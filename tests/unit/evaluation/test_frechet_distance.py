import pytest
import torch
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from lightning_dalle.evaluation.scores import frechet_distance


class _Features(nn.Identity):
    num_features = 12


def _sets(num_real: int, num_generated: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(num_real, 12, generator=generator, dtype=torch.float64)
    mixing = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    return real, torch.randn(num_generated, 12, generator=generator, dtype=torch.float64) @ mixing + 1


def _torchmetrics(real: Tensor, generated: Tensor) -> Tensor:
    metric = FrechetInceptionDistance(feature=_Features())
    metric.update(real, real=True)
    metric.update(generated, real=False)
    return metric.compute()


def test_equals_torchmetrics_where_covariances_have_full_rank() -> None:
    real, generated = _sets(200, 150)
    # float64 in both; the eigenvalues of a product that is not symmetric are the less exact side.
    torch.testing.assert_close(frechet_distance(real, generated), _torchmetrics(real, generated), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("num_real", "num_generated"), [(5, 5), (3, 40), (40, 3), (2, 2)])
def test_equals_the_matrix_square_root_with_fewer_images_than_features(num_real: int, num_generated: int) -> None:
    real, generated = _sets(num_real, num_generated)
    first, second = real.T.cov(), generated.T.cov()
    values, vectors = torch.linalg.eigh(first)
    root = vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T
    trace = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    expected = (real.mean(0) - generated.mean(0)).square().sum() + first.trace() + second.trace() - 2 * trace
    # Roots of eigenvalues that are zero up to 1e-16 leave 1e-8 in the oracle, not in the nuclear norm.
    torch.testing.assert_close(frechet_distance(real, generated), expected, rtol=1e-6, atol=0)


def test_of_two_gaussians_on_a_line() -> None:
    line = torch.tensor([[-1.0], [0.0], [1.0]])
    # Means 0 and 3, standard deviations 1 and 2: 3^2 + (2 - 1)^2.
    torch.testing.assert_close(frechet_distance(line, 2 * line + 3), torch.tensor(10.0, dtype=torch.float64))


def test_of_a_set_to_itself_is_zero_up_to_rounding() -> None:
    real, _ = _sets(50, 2)
    assert abs(frechet_distance(real.float(), real.float().flip(0)).item()) < 1e-12


@pytest.mark.parametrize(("num_real", "num_generated"), [(1, 5), (5, 1), (0, 5)])
def test_refuses_sets_without_a_covariance(num_real: int, num_generated: int) -> None:
    with pytest.raises(ValueError, match=rf"real \({num_real} images\) and generated \({num_generated}\)"):
        frechet_distance(*_sets(num_real, num_generated))
