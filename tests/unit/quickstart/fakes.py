"""Stand-ins for trained models, whose pictures and scores are known."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_dalle.quickstart.pictures import Models


class FakeDiscreteVAE:
    """Keeps every picture exactly, or darkens it."""

    device = torch.device("cpu")

    def __init__(self, darkening: int = 0) -> None:
        self.darkening = darkening

    def encode(self, images: Tensor) -> Tensor:
        return images

    def decode(self, ids: Tensor) -> Tensor:
        return ids - torch.minimum(ids, torch.tensor(self.darkening, dtype=torch.uint8))


class FakeTextToImage:
    """Draws the right picture as the candidates of certain numbers, and noise as the others."""

    def __init__(self, right_picture: Any, right_candidates: Sequence[int]) -> None:
        self.right_picture = right_picture
        self.right_candidates = right_candidates
        self.calls: list[dict[str, Any]] = []

    def generate(self, captions: Sequence[str], num_candidates: int, **options: Any) -> Tensor:
        self.calls.append({"captions": captions, **options})
        rows = []
        for caption in captions:
            right = torch.from_numpy(self.right_picture(caption))
            noise = torch.randint(0, 256, (num_candidates, *right.shape), generator=options["generator"])
            row = noise.to(torch.uint8)
            row[list(self.right_candidates)] = right
            rows.append(row)
        return torch.stack(rows)


class FakeContrastive:
    """Likes bright pictures, whatever the caption; features are the pixels."""

    def encode_images(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1).float() / 255
        return normalize(pixels - 0.5, dim=1)

    def encode_captions(self, captions: Sequence[str]) -> Tensor:
        return torch.ones(len(captions), self.width)

    def __init__(self, width: int) -> None:
        self.width = width


def fake_models(right_picture: Any, right_candidates: Sequence[int], width: int, darkening: int = 0) -> Models:
    return Models(
        FakeDiscreteVAE(darkening),  # type: ignore[arg-type]
        FakeContrastive(width),  # type: ignore[arg-type]
        FakeTextToImage(right_picture, right_candidates),  # type: ignore[arg-type]
    )


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
