"""Optimizers; no Lightning."""

from lightning_dalle.optim.adamw16 import AdamW16
from lightning_dalle.optim.joined_optimizer import JoinedOptimizer

__all__ = ["AdamW16", "JoinedOptimizer"]
