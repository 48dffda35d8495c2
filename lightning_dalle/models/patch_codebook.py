"""A vector-quantising shortcut around the discrete VAE's convolutions, which k-means can initialise.

The index of the nearest of K patches c is `argmax_k (2 c_k . x - |c_k|^2)`, affine in the patch x. Added to the
encoder's logits, with a table from code to patch added to the decoder's mu, it makes a plain codebook of patches a
point that training starts from, and the paper's convolutions a refinement of it. Not in the paper.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from lightning_dalle.ops.k_means import k_means, nearest_centre

MAX_PATCHES = 65_536
"""Distinct patches that k-means sees at most, which bounds its time."""
K_MEANS_ITERATIONS = 15
MIN_VARIANCE = 1e-6
"""Keeps the logits finite where the codes reproduce every patch exactly."""


class PatchEncoder(nn.Module):
    """Affine map from non-overlapping patches to logits; zero until initialised."""

    def __init__(self, codebook_size: int, stride: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(codebook_size, 3, stride, stride))
        self.b = nn.Parameter(torch.zeros(codebook_size))

    def forward(
        self, mapped: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch codes grid_height grid_width"]:
        """Return the logits, in the parameters' type under autocast."""
        with torch.autocast(mapped.device.type, enabled=False):
            return functional.conv2d(mapped.to(self.w.dtype), self.w, self.b, stride=self.w.shape[-1])


class PatchDecoder(nn.Module):
    """Table from code to patch in logit units; zero until initialised."""

    def __init__(self, codebook_size: int, stride: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(codebook_size, 3, stride, stride))

    def forward(
        self, codes: Float[Tensor, "batch codes grid_height grid_width"] | Int[Tensor, "batch grid_height grid_width"]
    ) -> Float[Tensor, "batch 3 height width"]:
        """Return the patches of hard codes, or the mixture of patches of relaxed ones."""
        stride = self.w.shape[-1]
        table = self.w.flatten(1)
        if codes.is_floating_point():
            with torch.autocast(codes.device.type, enabled=False):
                patches = functional.conv2d(codes.to(table.dtype), table.t()[:, :, None, None])
        else:
            patches = functional.embedding(codes, table).permute(0, 3, 1, 2)
        return functional.pixel_shuffle(patches, stride)


class PatchCodebook(NamedTuple):
    """Initial values of a patch codebook."""

    encoder_weight: Float[Tensor, "codes 3 stride stride"]
    encoder_bias: Float[Tensor, " codes"]
    decoder_weight: Float[Tensor, "codes 3 stride stride"]
    log_scale: float
    """ln of the mean absolute deviation in logit units: the best constant ln b of the logit-Laplace density."""


def fit_patch_codebook(
    mapped: Float[Tensor, "batch 3 height width"], codebook_size: int, stride: int, *, temperature: float, seed: int
) -> PatchCodebook:
    """Cluster patches by k-means among mapped pixels, where the error is that of PSNR.

    Equal patches, as of a plain background, are one point of their weight: half of the patches of emoji are white, and
    would leave room for half of the others.

    Args:
        mapped: Images as `map_pixels` gives them.
        codebook_size: Number of clusters.
        stride: Side of a patch, in pixels.
        temperature: Divides the logits; at 1 they are those of the posterior of a mixture of isotropic Gaussians with
            the clusters' mean squared error.
        seed: Seeds the choice of patches and of the seeding of k-means.
    """
    points = functional.pixel_unshuffle(mapped, stride).permute(0, 2, 3, 1).flatten(0, 2)
    points, counts = points.unique(dim=0, return_counts=True)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(points), generator=generator)[:MAX_PATCHES].to(points.device)
    points, weights = points[chosen], counts[chosen].to(points.dtype)
    centres = k_means(points, codebook_size, iterations=K_MEANS_ITERATIONS, seed=seed, weights=weights)
    nearest = centres[nearest_centre(points, centres)]
    share = (weights / weights.sum())[:, None]
    doubled_variance = 2 * ((points - nearest).square() * share).mean(dim=1).sum().clamp(min=MIN_VARIANCE)
    deviation = ((points.logit() - nearest.logit()).abs() * share).mean(dim=1).sum()
    shape = (codebook_size, 3, stride, stride)
    return PatchCodebook(
        encoder_weight=(2 * centres / (temperature * doubled_variance)).reshape(shape),
        encoder_bias=-centres.square().sum(dim=1) / (temperature * doubled_variance),
        decoder_weight=centres.logit().reshape(shape),
        log_scale=float(deviation.clamp(min=MIN_VARIANCE).log()),
    )
