"""Optimizers; no Lightning."""

from lightning_dalle.optim.adamw16 import AdamW16
from lightning_dalle.optim.joined_optimizer import JoinedOptimizer
from lightning_dalle.optim.muon_with_adamw import muon_with_adamw

__all__ = ["AdamW16", "JoinedOptimizer", "muon_with_adamw"]
