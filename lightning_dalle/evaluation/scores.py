"""Scores of sets of images: Frechet and kernel distances, Inception Score, nearest neighbours."""

import warnings

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance

from lightning_dalle.evaluation.features import ImageFeatures


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


def nearest_neighbours(
    features: Float[Tensor, "images features"], reference: Float[Tensor, "references features"], max_batch: int = 1024
) -> tuple[Int[Tensor, " images"], Float[Tensor, " images"]]:
    """Return the index of each image's nearest reference by cosine, and that cosine; of equal ones the first.

    Raises:
        ValueError: If there is no reference.

    Example:
        >>> index, cosine = nearest_neighbours(torch.tensor([[0.0, 2.0]]), torch.eye(2))
        >>> index, cosine
        (tensor([1]), tensor([1.]))
    """
    if len(reference) == 0:
        raise ValueError("reference (0 images) must have at least one image")
    unit_reference = normalize(reference.float(), dim=1)
    cosines, indices = [features.new_empty(0).float()], [torch.empty(0, dtype=torch.int64, device=features.device)]
    for chunk in features.split(max_batch):
        best = (normalize(chunk.float(), dim=1) @ unit_reference.T).max(dim=1)
        cosines.append(best.values)
        indices.append(best.indices)
    return torch.cat(indices), torch.cat(cosines)


MAX_SUBSET_SIZE = 1000
NUM_SUBSETS = 100


def image_scores(real: ImageFeatures, generated: ImageFeatures, extractor: str, seed: int = 0) -> dict[str, float]:
    """Return a Fréchet distance, a kernel distance and, where there are logits, a class score.

    Only those of the Inception network are called `fid`, `kid` and `inception_score`; others bear their extractor's
    name, `fd_NAME`, `kd_NAME`, `class_score_NAME`. Few images bias the Fréchet distance upwards, not the kernel
    distance.

    The kernel distance is the mean of 100 subsets of 1000 images, or that of all images where there are no more. The
    class score is exp(mean KL(p(y|x) || p(y))) over all images at once, without the usual ten parts.

    Args:
        extractor: Name of the extractor.
        seed: Seeds the subsets; the global random state is left alone.

    Raises:
        ValueError: If a set has fewer than 2 images.
        FloatingPointError: If a feature or a score is not finite.
    """
    _check_finite({"real features": real.features, "generated features": generated.features}, extractor)
    scores = {"fd": frechet_distance(real.features, generated.features)}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Both metrics warn that they keep the features, and one part has no standard deviation.
        warnings.simplefilter("ignore", UserWarning)
        torch.manual_seed(seed)
        scores["kd"] = _kernel_distance(real.features, generated.features)
        if generated.logits.shape[1]:
            scores["class_score"] = _class_score(generated.logits)
    _check_finite(scores, extractor)
    names = {kind: f"{kind}_{extractor}" for kind in scores}
    if extractor == "inception":
        names = {"fd": "fid", "kd": "kid", "class_score": "inception_score"}
    return {names[kind]: score.item() for kind, score in scores.items()}


class _Precomputed(nn.Identity):
    """Stands where torchmetrics wants a network, since the features are there already."""


def _kernel_distance(real: Tensor, generated: Tensor) -> Tensor:
    smaller = min(len(real), len(generated))
    subset_size = min(MAX_SUBSET_SIZE, smaller)
    # All subsets of as many images as there are would be the same.
    num_subsets = 1 if len(real) == len(generated) == subset_size else NUM_SUBSETS
    metric = KernelInceptionDistance(feature=_Precomputed(), subsets=num_subsets, subset_size=subset_size)
    metric.update(real.double(), real=True)
    metric.update(generated.double(), real=False)
    return metric.compute()[0]


def _class_score(logits: Tensor) -> Tensor:
    # In float32 the probabilities of saturated logits underflow, and 0 times minus infinity is NaN.
    metric = InceptionScore(feature=_Precomputed(), splits=1)
    metric.update(logits.double())
    return metric.compute()[0]


def _check_finite(tensors: dict[str, Tensor], extractor: str) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise FloatingPointError(f"{name} of the extractor {extractor} are not finite; look at images and weights")
