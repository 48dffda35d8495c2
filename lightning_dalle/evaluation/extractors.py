"""Feature extractors by name, by file and from a network of the user's."""

import copy
import re
from pathlib import Path

from jaxtyping import UInt8
from torch import Tensor, nn

from lightning_dalle.evaluation.effnet_lite0 import EffnetLite0Extractor
from lightning_dalle.evaluation.feature_extractor import FeatureExtractor, ImageFeatures
from lightning_dalle.evaluation.inception import InceptionExtractor


class ModuleExtractor(FeatureExtractor):
    """A copy of any network from uint8 images [images, 3, height, width] to features [images, features].

    Args:
        module: Copied, so that freezing it and keeping it in fp32 does not touch the user's.
        name: What the scores are called after; None is the class name in snake case.

    """

    def __init__(self, module: nn.Module, name: str | None = None) -> None:
        super().__init__(copy.deepcopy(module), name or snake_case(type(module).__name__), "by the module")

    def compute(self, images: UInt8[Tensor, "images 3 height width"]) -> ImageFeatures:
        """Features of one chunk of images.

        Raises:
            ValueError: If the network does not return one row of features for an image.
        """
        features = self.network(images)
        if features.ndim != 2 or len(features) != len(images):
            raise ValueError(
                f"features ({self.name}) returned {tuple(features.shape)} for {len(images)} images; "
                "it must be [images, features]"
            )
        return ImageFeatures(features, features.new_empty(len(features), 0))


def snake_case(name: str) -> str:
    """Return a class name as the scores spell it."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def load_extractor(features: str | Path | nn.Module) -> FeatureExtractor:
    """Return the extractor that `features` names.

    Args:
        features: `"inception"`, `"effnet_lite0"`, the path of a local Inception weights file, or a network.

    Raises:
        ValueError: If it is neither a known name nor a file.
    """
    if isinstance(features, FeatureExtractor):
        return features
    if isinstance(features, nn.Module):
        return ModuleExtractor(features)
    if features == "inception":
        return InceptionExtractor()
    if features == "effnet_lite0":
        return EffnetLite0Extractor()
    if Path(features).is_file():
        return InceptionExtractor(features)
    raise ValueError(
        f"features ({features}) must be 'inception', 'effnet_lite0', an Inception weights file or a module"
    )
