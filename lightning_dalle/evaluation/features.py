"""Features of images, computed once for equal images."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped, UInt8
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
        """Return the features of one chunk of images on the network's device."""
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


class FeatureCache:
    """The features of a set of images, each found by the image's own content.

    Args:
        path: Path of the file; its name must say which extractor and resize the features are of. One process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}
        if path.is_file():
            stored = torch.load(path, map_location="cpu", weights_only=True)
            self._known = dict(zip(stored["images"], stored["features"], strict=True))

    def features(
        self,
        images: UInt8[Tensor, "images 3 height width"],
        extract: Callable[[UInt8[Tensor, "images 3 height width"]], Float[Tensor, "images features"]],
    ) -> Float[Tensor, "images features"]:
        """Return the features of images on the CPU; `extract` is called for the unknown ones."""
        keys = [_content_key(image) for image in images]
        unknown = [index for index, key in enumerate(keys) if key not in self._known]
        if unknown:
            extracted = extract(images[unknown]).cpu()
            self._known |= {keys[index]: row for index, row in zip(unknown, extracted, strict=True)}
        self._used |= {key: self._known[key] for key in keys}
        return torch.stack([self._known[key] for key in keys])

    def save(self) -> None:
        """Write the features that were asked for, all at once or not at all; the others are dropped."""
        if not self._used:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(f".{os.getpid()}.tmp")
        torch.save({"images": list(self._used), "features": torch.stack(list(self._used.values()))}, unfinished)
        unfinished.replace(self.path)


def _content_key(image: Tensor) -> str:
    header = repr(tuple(image.shape)).encode()
    return hashlib.sha256(header + image.cpu().contiguous().numpy().tobytes()).hexdigest()


def as_uint8(images: Shaped[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Return images as uint8; floating-point ones are taken as values in [0, 1], clamped and rounded.

    A plain conversion would truncate decimals and wrap what lies outside (1.004 becomes 0).

    Raises:
        TypeError: If the images are integers of another kind.

    Example:
        >>> as_uint8(torch.tensor([-0.1, 0.5, 1.004]))
        tensor([  0, 128, 255], dtype=torch.uint8)
    """
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise TypeError(f"images ({images.dtype}) must be uint8, or floating-point values in [0, 1]")
    return images.float().clamp(0, 1).mul(255).round().to(torch.uint8)
