"""A word to whoever asked for a precision that is slow where the Trainer runs."""

import torch
from lightning.pytorch import LightningModule

from lightning_dalle.ops.hardware import warn_if_slow

_DTYPES = {"bf16": torch.bfloat16, "16": torch.float16}


def warn_if_precision_is_slow(module: LightningModule) -> None:
    """Warn if the precision of the module's Trainer is much slower than 32 bits on its CPU; it is kept."""
    trainer = module.trainer
    dtype = _DTYPES.get(str(trainer.precision).partition("-")[0])
    if dtype is not None:
        warn_if_slow(dtype, trainer.strategy.root_device)
