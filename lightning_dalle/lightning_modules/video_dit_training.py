"""What training a video diffusion transformer takes beside the network: settings, and the loss."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from lightning_dalle.lightning_modules.configuration import check_ranges
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.models.video_dit import VideoDiT
from lightning_dalle.ops.flow_matching import TimestepDensity, interpolate, velocity_target
from lightning_dalle.ops.patchify import Grid


@dataclass(frozen=True, kw_only=True)
class VideoDiTTrainingConfig:
    """Settings of `VideoDiTModule`.

    Args:
        clip_size: Frames, height and width in pixels of the largest training clips; `generate` draws clips of it unless
            told otherwise.
        optimizer: Optimizer of the network, and of the text encoder if that is trained.
        time_density: Time density of training times between data (0) and noise (1).
        shift: Moves the times of clips of `clip_size` towards noise, in training and sampling; those of others by the
            root of their size to it (`ops.flow_matching.resolution_shift`).
        caption_dropout: Share of training captions that are replaced by none, which guidance needs.
        first_frame_share: Share of training clips whose first frame is shown as it is, which `first_frame` needs.
        seed: Seeds noise, times and dropout, together with update, batch and rank.

    Raises:
        ValueError: If a value is out of its range.
    """

    clip_size: tuple[int, int, int]
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, beta2=0.99)
    schedule: ScheduleConfig = ScheduleConfig(warmup_steps=1000)
    time_density: TimestepDensity = "logit_normal"
    shift: float = 1.0
    caption_dropout: float = 0.1
    first_frame_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_size", tuple(self.clip_size))
        if len(self.clip_size) != 3 or min(self.clip_size) < 1:
            raise ValueError(f"clip_size {self.clip_size} must be frames, height and width, each at least 1")
        check_ranges(
            self,
            positive=("shift",),
            shares=("caption_dropout", "first_frame_share"),
            choices={"time_density": get_args(TimestepDensity)},
        )


def flow_matching_loss(
    network: VideoDiT,
    latents: Float[Tensor, "clips channels frames height width"]
    | Sequence[Float[Tensor, "channels _frames _height _width"]],
    text: Float[Tensor, "clips text text_width"],
    times: Float[Tensor, " clips"],
    known_first: Bool[Tensor, " clips"] | None,
    generator: torch.Generator,
) -> Float[Tensor, ""]:
    """Return the mean squared error of the network's velocities, over all values that it is not shown already.

    Args:
        known_first: Clips whose first frame is shown.
        generator: Draws the noise, on the clips' device.
    """
    # 1. One form of a batch and of clips of any sizes: segments, each [clips, channels, frames, height, width].
    segments = [latents] if isinstance(latents, Tensor) else [clip.unsqueeze(0) for clip in latents]
    # Latents kept in 16 bits are widened.
    wide = torch.promote_types(segments[0].dtype, torch.float32)
    segments, times = [segment.to(wide) for segment in segments], times.to(wide)
    sizes = [len(segment) for segment in segments]
    # 2. Points between data and noise; a known first frame stays data.
    noise = [torch.randn(segment.shape, generator=generator, dtype=wide, device=segment.device) for segment in segments]
    points = list(map(interpolate, segments, noise, times.split(sizes)))
    is_learned = torch.ones_like(times) if known_first is None else 1 - known_first.to(times)
    frame_weights = is_learned.view(-1, 1, 1, 1, 1).split(sizes)
    for point, segment, weight in zip(points, segments, frame_weights, strict=True):
        point[:, :, :1] = torch.lerp(segment[:, :, :1], point[:, :, :1], weight)
    # 3. The network's velocities, in the form in which the latents came.
    shown = points[0] if isinstance(latents, Tensor) else [point.squeeze(0) for point in points]
    outputs = network(shown, times, text, known_first=known_first)
    velocities = [outputs] if isinstance(outputs, Tensor) else [output.unsqueeze(0) for output in outputs]
    # 4. Sums over all values and their number, so that large clips count as much as their values.
    total, count = times.new_zeros(()), times.new_zeros(())
    for velocity, segment, drawn, weight in zip(velocities, segments, noise, frame_weights, strict=True):
        squares = (velocity.to(wide) - velocity_target(segment, drawn)).square()
        first, rest = squares[:, :, :1], squares[:, :, 1:]
        total = total + rest.sum() + (weight * first).sum()
        count = count + rest.numel() + weight.sum() * first[0].numel()
    return total / count.clamp(min=1)


def validate_request(
    captions: Sequence[str],
    num_candidates: int,
    max_batch: int,
    guidance_scale: float,
    training: VideoDiTTrainingConfig,
) -> None:
    """Refuse what cannot be drawn; warn of guidance that training did not prepare.

    Raises:
        TypeError: If `captions` is one string.
        ValueError: If there is nothing to draw, or no room.
    """
    if isinstance(captions, str):
        raise TypeError(f"captions ({captions!r}) must be a sequence of strings; put one caption into a list")
    for name, value in (("captions", len(captions)), ("num_candidates", num_candidates), ("max_batch", max_batch)):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    if guidance_scale != 1 and training.caption_dropout == 0:
        warnings.warn(
            f"guidance_scale ({guidance_scale}) has no trained empty caption to move away from, "
            "since caption_dropout was 0 in training",
            stacklevel=3,
        )


def check_first_frame(
    pictures: UInt8[Tensor, "pictures 3 height width"],
    num_captions: int,
    size: tuple[int, int],
    patch_size: Grid,
    training: VideoDiTTrainingConfig,
) -> None:
    """Refuse first frames that do not fit; warns if training showed none.

    Raises:
        ValueError: If there is not one for each caption, of the clips' size, or tokens hold several frames.
    """
    if (len(pictures), *pictures.shape[2:]) != (num_captions, *size):
        raise ValueError(
            f"first_frame has shape {tuple(pictures.shape)}; give one picture for each of {num_captions} captions, "
            f"of the clips' height and width {size}"
        )
    if patch_size[0] != 1:
        raise ValueError(f"first_frame needs tokens of one frame, but patch_size is {patch_size}")
    if training.first_frame_share == 0:
        warnings.warn(
            "first_frame was never shown in training, since first_frame_share was 0; clips may not go on from it",
            stacklevel=4,
        )
