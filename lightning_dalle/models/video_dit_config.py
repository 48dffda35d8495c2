"""Sizes and choices of the video diffusion transformer."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_dalle.ops.patchify import Grid
from lightning_dalle.ops.rotary_grid import RotaryGridConfig

TextConditioning = Literal["cross_attention", "joint"]
Prediction = Literal["velocity", "clean"]


@dataclass(frozen=True, kw_only=True)
class VideoDiTConfig:
    """Sizes of a `VideoDiT`; the defaults are those of Wan 2.1's smaller network, 1.4e9 parameters.

    That network's positions are `RotaryGridConfig(trained_grid=(21, 30, 52), axis_dims=(44, 42, 42))`: 81 frames of
    480 x 832 pixels, 4 x 8 x 8 of which make a latent.

    Args:
        patch_size: Values of the grid along time, height and width that make a token.
        text_width: Features of each token that the text encoder gives.
        conditioning: `cross_attention` from video to text; `joint` attention of both in one sequence.
        prediction: What the last layer gives: the `velocity`, or the `clean` data that it leads to, which suit patches
            of more values than the width, through which noise does not fit (Li & He 2025).
        data_mean: Where the outputs start, so that training need not find it first.
        time_features: Sines and cosines of the time.
        pooled_text: The mean of the words' features modulates blocks together with the time (Esser et al. 2024, section
            5), which small networks learn to follow much sooner than single words.
        position_waves: Waves over the grid that are added to the tokens (`ops.position_waves`), so that each knows
            where it stands: rotations tell how far apart two tokens are. 0 has none.
        rotary: Positions; its `trained_grid` counts tokens.
        activation_checkpointing: Recompute each block in the backward pass instead of keeping its activations.

    Raises:
        ValueError: If a size is below 1, or does not divide as the network needs.
    """

    depth: int = 30
    num_heads: int = 12
    head_dim: int = 128
    feed_forward_width: int = 8960
    channels: int = 16
    patch_size: Grid = (1, 2, 2)
    text_width: int = 4096
    conditioning: TextConditioning = "cross_attention"
    prediction: Prediction = "velocity"
    data_mean: float = 0.0
    time_features: int = 256
    pooled_text: bool = False
    position_waves: int = 0
    rotary: RotaryGridConfig
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        sizes = {name: value for name, value in vars(self).items() if type(value) is int}
        for name, size in {**sizes, "patch_size": min(self.patch_size)}.items():
            least = 0 if name == "position_waves" else 1
            if size < least:
                raise ValueError(f"{name} ({size}) must be at least {least}")
        if len(self.patch_size) != 3:
            raise ValueError(f"patch_size {self.patch_size} must have three sides: time, height and width")
        if self.time_features % 2:
            raise ValueError(f"time_features ({self.time_features}) must be even: sines and cosines")
        for name, choices in (("conditioning", TextConditioning), ("prediction", Prediction)):
            value, known = getattr(self, name), get_args(choices)
            if value not in known:
                raise ValueError(f"{name} ({value!r}) must be {known[0]!r} or {known[1]!r}")
        self.rotary.split(self.head_dim)

    @property
    def width(self) -> int:
        """Features of the residual stream."""
        return self.num_heads * self.head_dim

    @property
    def patch_features(self) -> int:
        """Values of a token."""
        return self.channels * math.prod(self.patch_size)
