"""How much moves in clips."""

from jaxtyping import Float, UInt8
from torch import Tensor


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
