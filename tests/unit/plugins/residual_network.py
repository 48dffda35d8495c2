"""A residual network whose gradients shrink by depth, as a LightningModule, and batches for it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Body(nn.Module):
    """One residual body: what is added to the identity path, small by a gain."""

    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.gain = gain

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(self.norm(hidden)))) * self.gain


class ResidualNetwork(nn.Module):
    """Bodies on an identity path, between an embedding and a head."""

    def __init__(self, depth: int, width: int, gains: list[float] | None = None) -> None:
        super().__init__()
        self.embed: Any = nn.Linear(4, width)
        self.bodies: Any = nn.ModuleList(Body(width, gain) for gain in gains or [1.0] * depth)
        self.head = nn.Linear(width, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for body in self.bodies:
            hidden = hidden + body(hidden)
        return self.head(hidden)


class ResidualModule(LightningModule):
    """Regression with plain SGD, whose steps show the gradients."""

    def __init__(self, depth: int = 3, width: int = 8, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.network = ResidualNetwork(depth, width)
        self.learning_rate = learning_rate
        self.losses: list[float] = []

    def gradient_blocks(self) -> dict[str, nn.Module]:
        return {f"body_{number}": body for number, body in enumerate(self.network.bodies)}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        inputs, targets = batch
        loss = (self.network(inputs) - targets).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def module(seed: int = 0, **changes: Any) -> ResidualModule:
    torch.manual_seed(seed)
    return ResidualModule(**changes)


def batches(count: int, size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count * size, 4, generator=generator)
    targets = torch.stack([inputs.prod(1), inputs.sum(1).sin()], 1)
    return DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=size)
