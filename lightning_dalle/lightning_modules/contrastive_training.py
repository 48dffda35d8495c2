"""How a contrastive model is trained: optimizer and learning rate."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_dalle.lightning_modules.configuration import check_ranges
from lightning_dalle.lightning_modules.text_to_image_training import cosine_factor


@dataclass(frozen=True, kw_only=True)
class ContrastiveTrainingConfig:
    """Settings of `ContrastiveModule`; the defaults are those of CLIP ViT-B (Radford et al. 2021, appendix F).

    Args:
        learning_rate: Reached after the warm-up.
        warmup_steps: Length of the linear warm-up.
        total_steps: Where half a cosine period has taken the learning rate to 0, warm-up included.
        weight_decay: Of matrices and convolutions; gains, biases and the logit scale are spared.

    Raises:
        ValueError: If a value is out of its range.
    """

    learning_rate: float = 5e-4
    warmup_steps: int = 2000
    total_steps: int = 390_625
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-6
    weight_decay: float = 0.2

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive=("learning_rate", "epsilon"),
            not_negative=("warmup_steps", "weight_decay"),
            decays=("beta1", "beta2"),
        )
        if self.total_steps <= self.warmup_steps:
            raise ValueError(f"total_steps ({self.total_steps}) must exceed warmup_steps ({self.warmup_steps})")


def build_contrastive_optimizer(network: nn.Module, training: ContrastiveTrainingConfig) -> OptimizerLRSchedulerConfig:
    """AdamW and its schedule, as `configure_optimizers` returns them."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1]},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        weight_decay=training.weight_decay,
    )
    schedule = LambdaLR(optimizer, lambda update: cosine_factor(update, training.warmup_steps, training.total_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
