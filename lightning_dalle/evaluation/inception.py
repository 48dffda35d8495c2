"""The Inception network of FID, KID and the Inception Score."""

import os
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from lightning_dalle.evaluation.feature_extractor import FeatureExtractor, ImageFeatures
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
        """Features of one chunk of images."""
        # forward() returns the first of the requested outputs only.
        return ImageFeatures(*self.network._torch_fidelity_forward(images))
