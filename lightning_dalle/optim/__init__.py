"""Optimizers; no Lightning."""

from lightning_dalle.optim.adamw16 import AdamW16
from lightning_dalle.optim.joined_optimizer import JoinedOptimizer
from lightning_dalle.optim.muon import Muon, muon_with_adamw

__all__ = ["AdamW16", "JoinedOptimizer", "Muon", "muon_with_adamw"]
