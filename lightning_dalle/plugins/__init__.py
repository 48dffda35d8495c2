"""Plugins of the Trainer."""

from lightning_dalle.plugins.gradient_blocks import HasGradientBlocks
from lightning_dalle.plugins.gradient_scales import GradientScales
from lightning_dalle.plugins.per_block_gradient_scaling import PerBlockGradientScaling

__all__ = ["GradientScales", "HasGradientBlocks", "PerBlockGradientScaling"]
