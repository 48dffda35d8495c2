"""Optimizer and learning-rate schedule of every module: one pair of configurations, one builder."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau

from lightning_dalle.lightning_modules.configuration import check_ranges
from lightning_dalle.ops.schedules import CosineSchedule
from lightning_dalle.optim import AdamW16, muon_with_adamw

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer of a module.

    Weight decay is for the weights of linear and convolutional layers. Gains, biases, embeddings and other free
    parameters have none; with `decay_embeddings` every parameter of two or more dimensions has it, as in CLIP.

    Args:
        name: `muon` takes Muon (Jordan et al. 2024) for the matrices inside lists of layers, its steps as large as
            AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2), and AdamW for all else.
        learning_rate: At its highest; the schedule says when.
        moments: `16bit` is the DALL-E paper's `AdamW16`, which keeps those of gains, biases, embeddings and
            unembeddings in 32 bits and clips the running variance at 5; `32bit` is torch's AdamW.

    Raises:
        ValueError: If a value is out of its range, or `moments` does not fit the optimizer.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay_embeddings: bool = False
    moments: Literal["32bit", "16bit"] = "32bit"

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive=("learning_rate", "epsilon"),
            not_negative=("weight_decay",),
            decays=("beta1", "beta2"),
            choices={"name": ("adamw", "muon"), "moments": ("32bit", "16bit")},
        )
        if (self.name, self.moments) == ("muon", "16bit"):
            raise ValueError("moments ('16bit') are AdamW's; choose name 'adamw', or moments '32bit'")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Schedule of a learning rate, in optimizer steps.

    Args:
        name: After the warm-up `constant` stays, `cosine` falls along half a cosine period, and `plateau` halves when
            the validation loss no longer falls (Ramesh et al. 2021).
        warmup_steps: Length of the linear warm-up.
        total_steps: Length of `cosine`, warm-up included; the others have none.
        final_learning_rate: What `cosine` ends at, and keeps.
        plateau_interval: Steps between two looks at the validation loss; validate as often (`val_check_interval`). How
            a plateau was recognised the paper does not say.
        plateau_patience: Looks without improvement before the learning rate is halved.
        plateau_halvings: Halvings at most.

    Raises:
        ValueError: If a value is out of its range, or does not fit the schedule.
    """

    name: Literal["constant", "cosine", "plateau"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    final_learning_rate: float = 0.0
    plateau_interval: int = 5000
    plateau_patience: int = 2
    plateau_halvings: int = 5

    def __post_init__(self) -> None:
        check_ranges(
            self,
            positive=("plateau_interval",),
            not_negative=("warmup_steps", "final_learning_rate", "plateau_patience", "plateau_halvings"),
            choices={"name": ("constant", "cosine", "plateau")},
        )
        if self.name == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"total_steps ({self.total_steps}) must exceed warmup_steps ({self.warmup_steps}) for schedule 'cosine'"
            )
        if self.name != "cosine":
            unused = {"total_steps": self.total_steps is not None, "final_learning_rate": self.final_learning_rate > 0}
            for name, is_set in unused.items():
                if is_set:
                    raise ValueError(
                        f"{name} ({getattr(self, name)}) has no effect on schedule {self.name!r}; leave it out, or "
                        "choose name 'cosine'"
                    )


def build_optimization(
    module: nn.Module, optimizer: OptimizerConfig, schedule: ScheduleConfig, monitor: str = "val/loss"
) -> tuple[list[torch.optim.Optimizer], list[Any]]:
    """Return the optimizer of what is trained in a module, with its schedulers, as `configure_optimizers` does.

    Args:
        monitor: Logged loss that `plateau` looks at.

    Raises:
        ValueError: If Muon, which needs whole matrices, gets sharded ones.
    """
    built = build_optimizer(module, optimizer)
    return [built], build_schedulers(built, optimizer, schedule, monitor)


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer of what is trained in a module.

    Raises:
        ValueError: If Muon, which needs whole matrices, gets sharded ones.
    """
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if config.name == "adamw":
        return _adamw(module, trained, config)
    linear = {part.weight for part in module.modules() if isinstance(part, nn.Linear)}
    # Lists of layers hold what is inside; what leads in and out stands beside them.
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    inner = {parameter for layers in lists for parameter in layers.parameters()} & linear
    others = _adamw(module, [pair for pair in trained if pair[1] not in inner], config)
    return muon_with_adamw([pair for pair in trained if pair[1] in inner], others, config.weight_decay)


def _adamw(module: nn.Module, parameters: Named, config: OptimizerConfig) -> torch.optim.Optimizer:
    decayed = _decayed(module, config)
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in parameters if pair[1] in decayed]},
        {"params": [pair for pair in parameters if pair[1] not in decayed], "weight_decay": 0.0},
    ]
    # torch takes an empty group for one without names.
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
        "weight_decay": config.weight_decay,
    }
    if config.moments == "16bit":
        return AdamW16(groups, **settings, keep_32bit="embedding|head|norm|bias")
    # Not fused: Lightning refuses to clip the gradients of a fused optimizer under mixed precision.
    return torch.optim.AdamW(groups, **settings, foreach=True)


def _decayed(module: nn.Module, config: OptimizerConfig) -> set[nn.Parameter]:
    """Return the parameters that have weight decay; see `OptimizerConfig`."""
    if config.decay_embeddings:
        return {parameter for parameter in module.parameters() if parameter.ndim > 1}
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    weights = {part.weight for part in module.modules() if isinstance(part, layers)}
    return {parameter for parameter in module.parameters() if parameter in weights}


def build_schedulers(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, schedule: ScheduleConfig, monitor: str = "val/loss"
) -> list[dict[str, Any]]:
    """Return learning-rate schedulers with the mappings that Lightning configures them by."""
    if schedule.name == "plateau":
        return _plateau(optimizer, config, schedule, monitor)
    # A lambda, because a scheduler's checkpoint leaves out lambdas and would keep any other callable's attributes.
    scheduler = LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, schedule))
    return [{"scheduler": scheduler, "interval": "step"}]


def learning_rate_factor(step: int, config: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """Return the part of the learning rate in force at a step under `constant` or `cosine`."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.total_steps is None:
        return 1.0
    end = schedule.final_learning_rate / config.learning_rate
    cosine = CosineSchedule(start=1.0, end=end, steps=schedule.total_steps - schedule.warmup_steps)
    return cosine(step - schedule.warmup_steps)


def _plateau(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, schedule: ScheduleConfig, monitor: str
) -> list[dict[str, Any]]:
    plateau = ReduceLROnPlateau(
        optimizer,
        factor=0.5,
        patience=schedule.plateau_patience,
        min_lr=config.learning_rate / 2**schedule.plateau_halvings,
    )
    schedulers: list[dict[str, Any]] = [
        {"scheduler": plateau, "interval": "step", "frequency": schedule.plateau_interval, "monitor": monitor}
    ]
    if schedule.warmup_steps > 0:
        # LinearLR multiplies the current value, and so does not undo a halving.
        ramp = LinearLR(optimizer, start_factor=1 / (schedule.warmup_steps + 1), total_iters=schedule.warmup_steps)
        schedulers.append({"scheduler": ramp, "interval": "step"})
    return schedulers
