"""Float16 under one global scale and under one per block, on a residual network whose gradients shrink by depth.

python -m tests.benchmarks.block_scaling --updates 500

The identity path passes gradients on multiplied by DAMPING before each of 24 blocks, so the first block's are about
1e-11 of the last one's, while forward every block counts alike and Adam does not mind the size of a gradient.
"""

import argparse
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_dalle.plugins import PerBlockGradientScaling
from tests.unit.plugins.residual_network import TRAINER, Body

DEPTH, WIDTH, BATCH, DAMPING = 24, 16, 64, 0.35
# Updates with a learning rate of 0, in which both kinds of scales find their place; the moments begin after them.
SETTLING = 20
Mode = Literal["float32", "global", "per block"]


class _Damped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * DAMPING


class ShrinkingGradients(LightningModule):
    """Regression on a noisy teacher, with the losses and the shares of zero gradients by block."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.updates = updates
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.bodies = nn.ModuleList(Body(WIDTH, DEPTH**-0.5) for _ in range(DEPTH))
        self.losses: list[float] = []
        self.zero_shares: list[list[float]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == SETTLING:
            self.trainer.optimizers[0].state.clear()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.embed(batch[0])
        for body in self.bodies:
            hidden = _Damped.apply(hidden)
            hidden = hidden + body(hidden)
        loss = (self.head(hidden).float() - batch[1]).square().mean()
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [torch.cat([item.grad.flatten() for item in body.parameters()]) for body in self.bodies]
        if all(gradient.isfinite().all() for gradient in gradients):
            self.zero_shares.append([(gradient == 0).double().mean().item() for gradient in gradients])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-3, betas=(0.9, 0.99), eps=1e-30)
        length = self.updates - SETTLING
        schedule = LambdaLR(optimizer, lambda update: 0.0 if update < SETTLING else 1 - (update - SETTLING) / length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def _precision(mode: Mode) -> Precision:
    if mode == "float32":
        return Precision()
    if mode == "global":
        return MixedPrecision("16-mixed", "cpu")
    # Wider bounds and quicker divisions than the paper's, since it has thousands of updates to find each scale.
    return PerBlockGradientScaling(
        Body, initial_scale=2.0**44, max_scale=2.0**44, min_scale=1.0, backoff_factor=16.0, backoff_interval=1
    )


def train(mode: Mode, updates: int) -> ShrinkingGradients:
    """Fit the same network on the same batches."""
    torch.manual_seed(0)
    module = ShrinkingGradients(updates)
    teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
    inputs = torch.randn(updates * BATCH, 8)
    targets = 3 * teacher(inputs) + 0.1 * torch.randn(updates * BATCH, 4)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)
    Trainer(**{**TRAINER, "max_steps": updates, "plugins": _precision(mode)}).fit(module, loader)
    return module


def main() -> None:
    """Print losses in windows of 50 updates and the largest share of zero gradients of any block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--modes", nargs="+", choices=get_args(Mode), default=get_args(Mode))
    arguments = parser.parse_args()
    updates = arguments.updates + SETTLING
    torch.set_num_threads(1)
    for mode in arguments.modes:
        module = train(mode, updates)
        losses = torch.tensor(module.losses[SETTLING:]).split(50)
        worst = torch.tensor(module.zero_shares).mean(0).max().item()
        skipped = updates - len(module.zero_shares)
        print(f"{mode}: {skipped} skipped updates; share of zero gradients in the worst block {worst:.2%}; losses")
        print("  " + " ".join(f"{part.mean():.5f}" for part in losses), flush=True)


if __name__ == "__main__":
    main()
