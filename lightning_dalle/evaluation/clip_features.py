"""Features of whole clips, by which sets of clips are compared."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from lightning_dalle.evaluation.feature_extractor import FeatureExtractor


def as_frames(images: UInt8[Tensor, "batch 3 *size"]) -> UInt8[Tensor, "frames 3 height width"]:
    """Return images as they are, and clips as their frames, one clip after the other."""
    return images.transpose(1, 2).flatten(0, 1) if images.ndim == 5 else images


class ClipExtractor(nn.Module):
    """The means over time of the frames' features and of how much these change from frame to frame.

    It tells clips that stand still from those that move, and knows of no order: a clip and its reverse are the same.
    """

    def __init__(self, frames: FeatureExtractor) -> None:
        super().__init__()
        self.name = f"video_{frames.name}"

    def extract(
        self, clips: UInt8[Tensor, "clips 3 frames height width"], frame_features: Float[Tensor, "all_frames features"]
    ) -> Float[Tensor, "clips clip_features"]:
        """Return one row for each clip, from the features of its frames."""
        if len(clips) == 0:
            return frame_features.new_empty(0, 0)
        rows = frame_features.unflatten(0, (len(clips), -1))
        changes = rows.diff(dim=1).abs().sum(dim=1) / max(1, rows.shape[1] - 1)
        return torch.cat([rows.mean(dim=1), changes], dim=1)
