"""How a text-to-image transformer is trained: loss weights, optimizer and learning rate."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau

from lightning_dalle.lightning_modules.configuration import check_ranges
from lightning_dalle.models.sparse_transformer import SparseTransformer
from lightning_dalle.ops.schedules import CosineSchedule
from lightning_dalle.optim import AdamW16, muon_with_adamw


@dataclass(frozen=True, kw_only=True)
class TextToImageTrainingConfig:
    """Settings of `TextToImageModule`; the defaults are the paper's (Ramesh et al. 2021, section 2.2 and appendix B).

    Args:
        learning_rate: Reached after the warm-up.
        warmup_steps: Length of the linear warm-up.
        schedule: `plateau` halves the learning rate when the validation loss no longer falls (the paper); `cosine` lets
            it fall to 0 at `total_steps` (the small recipes, whose length is known).
        total_steps: Length of the `cosine` schedule, warm-up included; `plateau` has none.
        plateau_interval: Updates between two looks at the validation loss; validate as often (`val_check_interval`).
            How a plateau was recognised the paper does not say.
        plateau_patience: Looks without improvement before the learning rate is halved.
        plateau_halvings: Halvings at most.
        optimizer: `muon` takes torch's Muon (Jordan et al. 2024) for the matrices inside the layers, its steps as large
            as AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2), and AdamW for all else. The paper has AdamW
            alone; the small recipes learn more in as many updates with Muon.
        moments: `16bit` is the paper's `AdamW16`, which keeps those of gains, biases, embeddings and unembeddings in 32
            bits and clips the running variance at 5; `32bit` is torch's AdamW.
        text_loss_weight: Weight of the text's cross-entropy; the image's has the rest of 1.
        caption_dropout: Share of training captions replaced by padding, which guidance needs; the paper has none.
        image_token_noise: Share of the image tokens that training shows as random ones, and asks for the right ones;
            the paper has none. A model that always saw perfect beginnings trusts them more than the caption, and goes
            astray after the first unlucky token that it draws.
        kept_image_tokens: Images whose tokens are kept instead of encoded anew, where they repeat unaugmented.
        seed: Of the caption dropout, together with the update, batch and share of the data.

    Raises:
        ValueError: If a value is out of its range, or `total_steps` does not fit the schedule.
    """

    learning_rate: float = 4.5e-4
    warmup_steps: int = 5000
    schedule: Literal["plateau", "cosine"] = "plateau"
    total_steps: int | None = None
    plateau_interval: int = 5000
    plateau_patience: int = 2
    plateau_halvings: int = 5
    beta1: float = 0.9
    beta2: float = 0.96
    epsilon: float = 1e-8
    weight_decay: float = 4.5e-2
    optimizer: Literal["adamw", "muon"] = "adamw"
    moments: Literal["32bit", "16bit"] = "32bit"
    text_loss_weight: float = 0.125
    caption_dropout: float = 0.0
    image_token_noise: float = 0.0
    kept_image_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive=("learning_rate", "plateau_interval", "epsilon"),
            not_negative=(
                "warmup_steps",
                "plateau_patience",
                "plateau_halvings",
                "weight_decay",
                "kept_image_tokens",
            ),
            decays=("beta1", "beta2"),
            shares=("text_loss_weight", "caption_dropout", "image_token_noise"),
            choices={
                "schedule": ("plateau", "cosine"),
                "optimizer": ("adamw", "muon"),
                "moments": ("32bit", "16bit"),
            },
        )
        if (self.optimizer, self.moments) == ("muon", "16bit"):
            raise ValueError("moments ('16bit') are AdamW's; choose optimizer 'adamw', or moments '32bit'")
        if self.schedule == "plateau" and self.total_steps is not None:
            raise ValueError(f"total_steps ({self.total_steps}) has no effect on schedule 'plateau'; leave it out")
        if self.schedule == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"total_steps ({self.total_steps}) must exceed warmup_steps ({self.warmup_steps}) for schedule 'cosine'"
            )


def build_optimizer(network: SparseTransformer, training: TextToImageTrainingConfig) -> torch.optim.Optimizer:
    """The configured optimizer, whose weight decay spares gains, biases and embeddings.

    Raises:
        ValueError: If Muon, which needs whole matrices, gets sharded ones.
    """
    if training.optimizer == "adamw":
        return _adamw(network, training, list(network.named_parameters()))
    inner = {parameter for parameter in network.layers.parameters() if parameter.ndim == 2}
    named = list(network.named_parameters())
    others = _adamw(network, training, [(name, parameter) for name, parameter in named if parameter not in inner])
    matrices = [(name, parameter) for name, parameter in named if parameter in inner]
    return muon_with_adamw(matrices, others, training.weight_decay)


def _adamw(
    network: nn.Module, training: TextToImageTrainingConfig, parameters: list[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer:
    linear = {module.weight for module in network.modules() if isinstance(module, nn.Linear)}
    matrices = [(name, parameter) for name, parameter in parameters if parameter in linear]
    others = [(name, parameter) for name, parameter in parameters if parameter not in linear]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    settings: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (training.beta1, training.beta2),
        "eps": training.epsilon,
        "weight_decay": training.weight_decay,
    }
    if training.moments == "16bit":
        return AdamW16(groups, **settings, keep_32bit="embedding|head|norm|bias")
    # Not fused: Lightning refuses to clip the gradients of a fused optimizer under mixed precision.
    return torch.optim.AdamW(groups, **settings, foreach=True)


def build_schedulers(optimizer: torch.optim.Optimizer, training: TextToImageTrainingConfig, monitor: str) -> list[Any]:
    """Learning-rate schedulers with the mappings that Lightning configures them by."""
    warmup = training.warmup_steps
    if training.total_steps is not None:
        total = training.total_steps
        # A lambda, because a scheduler's checkpoint leaves out lambdas and would keep any other callable's attributes.
        cosine = LambdaLR(optimizer, lambda update: cosine_factor(update, warmup, total))
        return [{"scheduler": cosine, "interval": "step"}]
    plateau = ReduceLROnPlateau(
        optimizer,
        factor=0.5,
        patience=training.plateau_patience,
        min_lr=training.learning_rate / 2**training.plateau_halvings,
    )
    schedulers = [
        {"scheduler": plateau, "interval": "step", "frequency": training.plateau_interval, "monitor": monitor}
    ]
    if warmup > 0:
        # LinearLR multiplies the current value, and so does not undo a halving.
        ramp = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        schedulers.append({"scheduler": ramp, "interval": "step"})
    return schedulers


def cosine_factor(update: int, warmup_steps: int, total_steps: int) -> float:
    """Part of the learning rate in force at `update`: linear warm-up, then half a cosine period down to 0."""
    if update < warmup_steps:
        return (update + 1) / (warmup_steps + 1)
    return CosineSchedule(start=1.0, end=0.0, steps=total_steps - warmup_steps)(update - warmup_steps)
