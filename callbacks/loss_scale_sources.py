"""One view on the loss scales of a run, whichever precision plugin has them."""

from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import Optimizer

from lightning_dalle.callbacks.protocols import PerBlockScaled

WHOLE_MODULE = "module"


class LossScaleSource(Protocol):
    """Scales of blocks, or one scale of the whole module."""

    def blocks(self) -> dict[str, tuple[nn.Module, ...]]:
        """Return the modules of each block, in order."""
        ...

    def scales(self) -> dict[str, float]:
        """Return the scale of each block."""
        ...

    def changes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return how often each scale grew and was divided."""
        ...

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the update that is about to happen will not; asked in `on_before_optimizer_step`."""
        ...

    def loss_factor(self) -> float:
        """Return what the loss is multiplied by before its backward pass."""
        ...

    def after_batch(self) -> None:
        """Look at what changed."""
        ...

    def use_bfloat16(self) -> None:
        """Give up float16."""
        ...


class BlockScales:
    """The scales of a plugin that has one per block."""

    def __init__(self, plugin: PerBlockScaled) -> None:
        self._plugin = plugin

    def blocks(self) -> dict[str, tuple[nn.Module, ...]]:
        """Return the plugin's."""
        return self._plugin.blocks

    def scales(self) -> dict[str, float]:
        """Return the plugin's."""
        return self._plugin.loss_scales()

    def changes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return what the plugin counted."""
        return self._plugin.scale_changes()

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """As the plugin has decided."""
        return self._plugin.update_is_skipped

    def loss_factor(self) -> float:
        """Return 1: the loss is not scaled."""
        return 1.0

    def after_batch(self) -> None:
        """Nothing to do: the plugin counts."""

    def use_bfloat16(self) -> None:
        """From the next forward pass on."""
        self._plugin.use_dtype("bfloat16")


class GlobalScale:
    """The one scale of torch's GradScaler, whose changes are seen by comparing."""

    def __init__(self, plugin: MixedPrecision, pl_module: LightningModule) -> None:
        self._plugin, self._module = plugin, pl_module
        self._scale = self._current()
        self._growths = self._divisions = 0

    def _current(self) -> float:
        return 1.0 if self._plugin.scaler is None else self._plugin.scaler.get_scale()

    def blocks(self) -> dict[str, tuple[nn.Module, ...]]:
        """Return one, the whole module."""
        return {WHOLE_MODULE: (self._module,)}

    def scales(self) -> dict[str, float]:
        """Return the scaler's scale; 1 once it was given up."""
        return {WHOLE_MODULE: self._scale}

    def changes(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return those seen so far."""
        return {WHOLE_MODULE: self._growths}, {WHOLE_MODULE: self._divisions}

    def is_skipped(self, optimizer: Optimizer) -> bool:
        """As the scaler found when it unscaled the gradients."""
        if self._plugin.scaler is None:
            return False
        found: dict[Any, torch.Tensor] = self._plugin.scaler._found_inf_per_device(optimizer)
        return any(bool(value.item()) for value in found.values())

    def loss_factor(self) -> float:
        """Return the scale itself."""
        return self._current()

    def after_batch(self) -> None:
        """Compare the scale with that of the batch before."""
        scale = self._current()
        self._growths += scale > self._scale
        self._divisions += scale < self._scale
        self._scale = scale

    def use_bfloat16(self) -> None:
        """Autocast to bfloat16, without a scaler."""
        self._plugin.precision, self._plugin.scaler = "bf16-mixed", None
        self._scale = 1.0


def loss_scale_source(trainer: Trainer, pl_module: LightningModule) -> LossScaleSource:
    """Return the source that fits the Trainer's precision plugin.

    Raises:
        TypeError: If that plugin scales no loss.
    """
    plugin = trainer.precision_plugin
    if isinstance(plugin, PerBlockScaled):
        return BlockScales(plugin)
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        return GlobalScale(plugin, pl_module)
    raise TypeError(
        f"LossScaleMonitor found no loss scale in {type(plugin).__name__} ({plugin.precision}); "
        "use Trainer(plugins=PerBlockGradientScaling()) or Trainer(precision='16-mixed'), or leave the monitor out"
    )
