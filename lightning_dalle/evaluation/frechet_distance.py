"""The Fréchet distance between two sets of features (Heusel et al. 2017, equation 6)."""

import torch
from jaxtyping import Float
from torch import Tensor


def frechet_distance(
    real: Float[Tensor, "num_real features"], generated: Float[Tensor, "num_generated features"]
) -> Float[Tensor, ""]:
    """Return |mu - mu'|^2 + Tr(C + C' - 2 (C C')^(1/2)) of the Gaussians through both sets, in float64.

    torchmetrics' `FrechetInceptionDistance` computes the same from the eigenvalues of C C', features x features. Here
    the trace of the root is the nuclear norm of A B^T, where C = A^T A and C' = B^T B are built from the centred
    features themselves: exact where fewer images than features leave the covariances singular, and cheaper there.
    Rounding can leave the distance of a set to itself slightly negative.

    It falls with the number of images for one and the same pair of distributions: compare equal numbers only.

    Raises:
        ValueError: If a set has fewer than 2 images, which have no covariance.
    """
    if min(len(real), len(generated)) < 2:
        raise ValueError(
            f"real ({len(real)} images) and generated ({len(generated)}) must each have at least 2 for a covariance"
        )
    real, generated = real.double(), generated.double()
    mean_distance = (real.mean(dim=0) - generated.mean(dim=0)).square().sum()
    real_root, generated_root = _covariance_root(real), _covariance_root(generated)
    trace_of_root = torch.linalg.svdvals(real_root @ generated_root.T).sum()
    return mean_distance + real_root.square().sum() + generated_root.square().sum() - 2 * trace_of_root


def _covariance_root(features: Tensor) -> Tensor:
    """Return R with R^T R = the covariance and no more rows than there are images or features."""
    centred = (features - features.mean(dim=0)) / (len(features) - 1) ** 0.5
    return torch.linalg.qr(centred, mode="r").R
