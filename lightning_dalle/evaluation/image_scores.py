"""Scores of generated images against real ones, from their features."""

import warnings

import torch
from torch import Tensor, nn
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance

from lightning_dalle.evaluation.feature_extractor import ImageFeatures
from lightning_dalle.evaluation.frechet_distance import frechet_distance

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
        seed: Of the subsets; the global random state is left alone.

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
