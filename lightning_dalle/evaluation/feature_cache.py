"""Features of real images on disk, which do not change from one validation to the next."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor


class FeatureCache:
    """The features of a set of images, each found by the image's own content.

    Args:
        path: Of the file; its name must say which extractor and resize the features are of. One process writes it.
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
