"""Frozen networks that turn images into features, by which sets of images are compared."""

import hashlib
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn


class ImageFeatures(NamedTuple):
    """What an extractor sees in images; `logits` is empty ([images, 0]) where it is no classifier."""

    features: Float[Tensor, "images features"]
    logits: Float[Tensor, "images classes"]


class FeatureExtractor(nn.Module):
    """Base of extractors: a network that is frozen, in evaluation mode and in fp32, whatever happens around it.

    Args:
        network: Frozen from here on.
        name: What the scores are called after, as in `fd_NAME`.
        resize: How the images are resized, in words; it changes scores more than most models do.
    """

    network: Any

    def __init__(self, network: nn.Module, name: str, resize: str) -> None:
        super().__init__()
        self.network = network.float().requires_grad_(False).eval()
        self.name = name
        self.resize = resize

    def train(self, mode: bool = True) -> "FeatureExtractor":
        """Stay in evaluation mode."""
        return super().train(False)

    def compute(self, images: UInt8[Tensor, "images 3 height width"]) -> ImageFeatures:
        """Features of one chunk of images on the network's device."""
        raise NotImplementedError

    def extract(self, images: UInt8[Tensor, "images 3 height width"], max_batch: int = 64) -> ImageFeatures:
        """Return the features of any number of images in fp32, outside autocast and without gradients; [0, 0] for none.

        Args:
            max_batch: Images in one pass.
        """
        device = next(self.network.parameters(), torch.empty(0)).device
        if len(images) == 0:
            return ImageFeatures(torch.empty(0, 0, device=device), torch.empty(0, 0, device=device))
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            chunks = [self.compute(chunk.to(device)) for chunk in images.split(max_batch)]
        return ImageFeatures(*(torch.cat(parts).float() for parts in zip(*chunks, strict=True)))

    @property
    def details(self) -> dict[str, str]:
        """What must stand beside a score to compare it with another."""
        digest = hashlib.sha256()
        for name, tensor in self.network.state_dict().items():
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        return {"extractor": self.name, "weights_sha256": digest.hexdigest(), "resize": self.resize, "dtype": "float32"}
