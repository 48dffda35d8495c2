"""Optimizers; no Lightning."""

from lightning_dalle.optim.adamw16 import AdamW16
from lightning_dalle.optim.muon import ChainedOptimizer, Muon, muon_with_adamw

__all__ = ["AdamW16", "ChainedOptimizer", "Muon", "muon_with_adamw"]
