"""How a video diffusion transformer is trained: clips, times of noise, optimizer and learning rate."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_dalle.lightning_modules.configuration import check_ranges
from lightning_dalle.lightning_modules.text_to_image_training import cosine_factor
from lightning_dalle.ops.flow_matching import TimestepDensity
from lightning_dalle.optim import muon_with_adamw


@dataclass(frozen=True, kw_only=True)
class VideoDiTTrainingConfig:
    """Settings of `VideoDiTModule`.

    Args:
        clip_size: Frames, height and width in pixels of the largest training clips; `generate` draws clips of it unless
            told otherwise.
        learning_rate: Reached after the linear warm-up.
        total_steps: Length of the cosine on which the learning rate falls to 0, warm-up included; None leaves it.
        optimizer: `muon` takes Muon for the matrices inside the layers of network and text encoder, and AdamW for all
            else (`optim.muon_with_adamw`).
        weight_decay: Of matrices; gains, biases and embeddings have none.
        time_density: Of training times between data (0) and noise (1).
        shift: Moves the times of clips of `clip_size` towards noise, in training and sampling; those of others by the
            root of their size to it (`ops.flow_matching.resolution_shift`).
        caption_dropout: Share of training captions that are replaced by none, which guidance needs.
        first_frame_share: Share of training clips whose first frame is shown as it is, which `first_frame` needs.
        seed: Of noise, times and dropout, together with update, batch and rank.

    Raises:
        ValueError: If a value is out of its range.
    """

    clip_size: tuple[int, int, int]
    learning_rate: float = 1e-4
    warmup_steps: int = 1000
    total_steps: int | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    weight_decay: float = 0.0
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
            positive=("learning_rate", "epsilon", "shift"),
            not_negative=("warmup_steps", "weight_decay"),
            decays=("beta1", "beta2"),
            shares=("caption_dropout", "first_frame_share"),
            choices={"optimizer": ("adamw", "muon"), "time_density": get_args(TimestepDensity)},
        )
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps ({self.total_steps}) must exceed warmup_steps ({self.warmup_steps}), "
                "or be left out for a learning rate that stays"
            )


def build_optimizer(module: nn.Module, training: VideoDiTTrainingConfig) -> torch.optim.Optimizer:
    """The configured optimizer over what is trained, whose weight decay spares all but the weights of linear layers.

    Raises:
        ValueError: If Muon, which needs whole matrices, gets sharded ones.
    """
    linear = {part.weight for part in module.modules() if isinstance(part, nn.Linear)}
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    matrices = [(name, parameter) for name, parameter in trained if parameter in linear]
    # Lists of layers hold what is inside; what leads in and out stands beside them.
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    inner = {parameter for layers in lists for parameter in layers.parameters()} if training.optimizer == "muon" else {}
    groups: list[dict[str, Any]] = [
        {"params": [(name, parameter) for name, parameter in matrices if parameter not in inner]},
        {"params": [pair for pair in trained if pair[1] not in linear], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        weight_decay=training.weight_decay,
        # Not fused: Lightning refuses to clip the gradients of a fused optimizer under mixed precision.
        foreach=True,
    )
    if training.optimizer == "adamw":
        return adamw
    of_layers = [(name, parameter) for name, parameter in matrices if parameter in inner]
    return muon_with_adamw(of_layers, adamw, training.weight_decay)


def build_scheduler(optimizer: torch.optim.Optimizer, training: VideoDiTTrainingConfig) -> dict[str, Any]:
    """The learning-rate scheduler with the mapping that Lightning configures it by."""
    warmup, total = training.warmup_steps, training.total_steps

    def factor(update: int) -> float:
        if total is None:
            return min(1.0, (update + 1) / (warmup + 1))
        return cosine_factor(update, warmup, total)

    # A function, because a scheduler's checkpoint leaves out functions and would keep any other callable's attributes.
    return {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}
