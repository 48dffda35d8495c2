"""Somebody else's LightningModule, which never heard of sharding, and runs of it on ranks."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_dalle.distributed.powersgd.config import PowerSGDConfig
from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from lightning_dalle.strategies import MeshStrategy, ShardedPowerSGDStrategy
from tests.foreign_module import QUIET

WIDTH = 10
ROWS = 16


class Block(nn.Module):
    """A residual block whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.fc2 = nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.fc2(self.fc1(self.norm(hidden)).relu())


class Toy(LightningModule):
    """Regression with tied weights, a frozen layer, a layer that is never used, and parameters of its own."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 0, depth: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters({"seed": seed})
        torch.manual_seed(seed)
        self.first = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.to(dtype)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(self.again(self.frozen(self.tied(hidden))) * self.gain)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def batches(num_batches: int, rank: int, world_size: int, dtype: torch.dtype, start: int = 0) -> DataLoader[Any]:
    """Return the rows of each batch that belong to a rank."""
    data: Any = []
    share = ROWS // world_size
    for number in range(start, start + num_batches):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
        targets = torch.stack([inputs.sum(1), inputs.prod(1), inputs[:, 0].sin(), inputs[:, 1].abs()], dim=1)
        mine = slice(rank * share, (rank + 1) * share)
        data.append((inputs[mine].to(dtype), targets[mine].to(dtype)))
    return DataLoader(data, batch_size=None)


def trainer_of(world_size: int, strategy: MeshStrategy | str, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        **QUIET,
        "devices": world_size,
        "strategy": strategy,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
        "max_epochs": 1,
        **options,
    }
    return Trainer(**settings)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, gathered from the ranks."""
    return whole_tensors(module.state_dict())


def powersgd_strategy(**settings: Any) -> ShardedPowerSGDStrategy:
    """Build the strategy from its own arguments and those of its `PowerSGDConfig` side by side."""
    names = {field.name for field in dataclasses.fields(PowerSGDConfig)}
    powersgd = PowerSGDConfig(**{name: value for name, value in settings.items() if name in names})
    return ShardedPowerSGDStrategy(
        powersgd=powersgd, **{name: value for name, value in settings.items() if name not in names}
    )


def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies, gathered from the ranks where those hold shards."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def fit_on_rank(
    rank: int,
    world_size: int,
    settings: dict[str, Any],
    num_batches: int = 6,
    dtype: torch.dtype = torch.float64,
    depth: int = 3,
    **options: Any,
) -> dict[str, Any]:
    """Train a toy on this rank's share and return what came of it."""
    os.environ["LOCAL_RANK"] = str(rank)
    module = Toy(dtype, depth=depth)
    strategy = powersgd_strategy(**settings)
    trainer = trainer_of(world_size, strategy, **options)
    loader = batches(num_batches, rank, world_size, dtype)
    trainer.fit(module, loader, loader)
    assert isinstance(strategy.gradients, PowerSGDGradients)
    return {
        "state": whole_state(module),
        "losses": module.losses,
        "plan": [matrix.name for matrix in strategy.gradients.compressor.plan.matrices],
        "sent": strategy.gradients.compressor.communication.bytes_sent,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def fit_alone(
    num_batches: int = 6, dtype: torch.dtype = torch.float64, depth: int = 3, **options: Any
) -> dict[str, Any]:
    """Train in one process, by Lightning alone."""
    module = Toy(dtype, depth=depth)
    loader = batches(num_batches, 0, 1, dtype)
    trainer_of(1, "auto", **options).fit(module, loader, loader)
    return {"state": whole_state(module), "losses": module.losses}
