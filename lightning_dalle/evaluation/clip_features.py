"""Features of whole clips, by which sets of clips are compared."""

import copy

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from lightning_dalle.evaluation.extractors import snake_case
from lightning_dalle.evaluation.features import FeatureExtractor
from lightning_dalle.evaluation.scores import frechet_distance


def frame_difference(video: UInt8[Tensor, "batch 3 frames height width"]) -> Float[Tensor, " batch"]:
    """Return the mean absolute difference of neighbouring frames of each clip, in grey levels; 0 for one frame.

    Example:
        >>> import torch
        >>> clip = torch.tensor([10, 12, 6], dtype=torch.uint8).reshape(1, 1, 3, 1, 1).expand(1, 3, 3, 4, 4)
        >>> frame_difference(clip)
        tensor([4.])
    """
    if video.shape[2] < 2:
        return video.new_zeros(len(video)).float()
    return video.float().diff(dim=2).abs().mean(dim=(1, 2, 3, 4))


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


class ClipModuleExtractor(ClipExtractor):
    """A frozen copy of any network from uint8 clips [clips, 3, frames, height, width] to features [clips, features].

    Args:
        module: Copied, so that freezing it and keeping it in fp32 does not touch the user's.
    """

    def __init__(self, frames: FeatureExtractor, module: nn.Module) -> None:
        super().__init__(frames)
        self.name = f"video_{snake_case(type(module).__name__)}"
        self.network = copy.deepcopy(module).float().requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "ClipModuleExtractor":
        """Stay in evaluation mode."""
        return super().train(False)

    def extract(
        self, clips: UInt8[Tensor, "clips 3 frames height width"], frame_features: Float[Tensor, "all_frames features"]
    ) -> Float[Tensor, "clips clip_features"]:
        """Return the network's features in fp32, outside autocast and without gradients.

        Raises:
            ValueError: If the network does not return one row of features for a clip.
        """
        if len(clips) == 0:
            return frame_features.new_empty(0, 0)
        device = next(self.network.parameters(), torch.empty(0)).device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            features = self.network(clips.to(device))
        if features.ndim != 2 or len(features) != len(clips):
            raise ValueError(
                f"video_features ({self.name}) returned {tuple(features.shape)} for {len(clips)} clips; it must be "
                "[clips, features]"
            )
        return features.float()


def clip_extractor(frames: FeatureExtractor, module: nn.Module | None) -> ClipExtractor:
    """Return the extractor of a network of the user's, or without one that of the frames' features."""
    return ClipExtractor(frames) if module is None else ClipModuleExtractor(frames, module)


def clip_scores(
    real: Float[Tensor, "num_real features"], generated: Float[Tensor, "num_generated features"], name: str
) -> dict[str, float]:
    """Return `fd_NAME`, the Fréchet distance of clips, and `num_scored_clips`; nothing where there are no clips.

    Raises:
        ValueError: If one set has clips and the other has none, or there is only one clip.
        FloatingPointError: If a feature is not finite.
    """
    if not len(real) and not len(generated):
        return {}
    for kind, rows in (("real", real), ("generated", generated)):
        if not rows.isfinite().all():
            raise FloatingPointError(
                f"{kind} features of the extractor {name} are not finite; look at clips and weights"
            )
    return {f"fd_{name}": frechet_distance(real, generated).item(), "num_scored_clips": float(len(real))}
