"""Which images of a set are closest to given ones."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize


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


def caption_match_share(
    features: Float[Tensor, "images features"],
    captions: Sequence[str],
    reference: Float[Tensor, "references features"],
    reference_captions: Sequence[str],
) -> float:
    """Return the share of images whose nearest reference bears their caption.

    Raises:
        ValueError: If images and captions are not equally many, or there are none.
    """
    for name, rows, texts in (("features", features, captions), ("reference", reference, reference_captions)):
        if len(rows) != len(texts) or not texts:
            raise ValueError(f"{name} ({len(rows)} images) must have one caption each and there are {len(texts)}")
    indices, _ = nearest_neighbours(features, reference)
    pairs = zip(captions, indices.tolist(), strict=True)
    return sum(caption == reference_captions[index] for caption, index in pairs) / len(captions)
