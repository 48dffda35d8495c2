"""Optimizers; no Lightning."""

from lightning_dalle.optim.adamw16 import AdamW16

__all__ = ["AdamW16"]
