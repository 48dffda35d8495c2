"""What clips show in the course of training."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dalle.data.moving_shapes.data_module import MovingShapesDataModule
from lightning_dalle.data.moving_shapes.oracle import attribute_shares


class MotionCurve(Callback):
    """Logs at each validation what the oracle reads from clips of some validation captions, as `val/oracle_...`.

    Args:
        num_captions: One clip is drawn of each.
        num_steps: Num steps of the sampler.
        seed: Seeds the clips, the same at each validation.

    Raises:
        ValueError: If a count is below 1.
    """

    def __init__(self, num_captions: int = 32, num_steps: int = 20, guidance_scale: float = 1.5, seed: int = 0) -> None:
        for name, value in (("num_captions", num_captions), ("num_steps", num_steps)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        self.num_captions = num_captions
        self.num_steps = num_steps
        self.guidance_scale = guidance_scale
        self.seed = seed

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and read clips.

        Raises:
            TypeError: If the data are not `MovingShapesDataModule`, whose captions the oracle knows.
        """
        if trainer.sanity_checking:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, MovingShapesDataModule):
            raise TypeError(
                f"datamodule ({type(data).__name__}) must be MovingShapesDataModule, whose captions the oracle knows"
            )
        captions = sorted(set(data.captions("val")))
        captions = captions[:: max(1, len(captions) // self.num_captions)][: self.num_captions]
        clips = pl_module.generate(  # type: ignore[operator]
            captions,
            num_steps=self.num_steps,
            guidance_scale=self.guidance_scale,
            generator=torch.Generator().manual_seed(self.seed),
            progress=False,
        )
        shares = attribute_shares(clips[:, 0].cpu(), captions)
        pl_module.log_dict({f"val/oracle_{name}": share for name, share in shares.items()}, rank_zero_only=True)
