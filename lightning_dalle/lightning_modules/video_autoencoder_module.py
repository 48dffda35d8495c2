"""Training of a causal video autoencoder on the pixels of clips."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, UInt8
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics.image import PeakSignalNoiseRatio
from torchvision.utils import make_grid

from lightning_dalle.evaluation.logging import log_image
from lightning_dalle.lightning_modules.configuration import as_config, warn_if_precision_is_slow
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig, build_optimization
from lightning_dalle.models.video_autoencoder import (
    CausalVideoAutoencoder,
    CausalVideoAutoencoderConfig,
    PixelAutoencoder,
)
from lightning_dalle.ops.random import keyed_generator


@dataclass(frozen=True, kw_only=True)
class VideoAutoencoderTrainingConfig:
    """How a video autoencoder is trained.

    Attributes:
        latent_noise: Deviation of the Gaussian noise on the latents, which have a mean square of 1: what a diffusion
            model gets wrong by as much still decodes.
        seed: Seeds the noise.

    Raises:
        ValueError: If `latent_noise` is negative.
    """

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, beta2=0.99)
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", total_steps=2_000, final_learning_rate=1e-5)
    latent_noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a negative deviation."""
        if self.latent_noise < 0:
            raise ValueError(f"latent_noise ({self.latent_noise}) must be at least 0")


class VideoAutoencoderModule(LightningModule):
    """Minimises the mean squared error of the pixels of a `CausalVideoAutoencoder`; a `VideoAutoencoder` once trained.

    Batches are mappings with a `video`, uint8 [batch, 3, frames, height, width], of a size that `latent_grid` takes.
    Logged: `train/loss`, of pixels in [-1, 1], and `val/psnr` or `test/psnr` in dB, of `decode(encode(video))` over all
    pixels of the set.

    Args:
        network: Sizes.
        training: Optimizer, schedule and noise.
    """

    def __init__(
        self,
        network: CausalVideoAutoencoderConfig | Mapping[str, Any] = CausalVideoAutoencoderConfig(),
        training: VideoAutoencoderTrainingConfig | Mapping[str, Any] = VideoAutoencoderTrainingConfig(),
    ) -> None:
        super().__init__()
        network_config = as_config(CausalVideoAutoencoderConfig, network, "network")
        self.training_config = as_config(VideoAutoencoderTrainingConfig, training, "training")
        self.save_hyperparameters(
            {"network": dataclasses.asdict(network_config), "training": dataclasses.asdict(self.training_config)}
        )
        self.network = CausalVideoAutoencoder(network_config)
        self.psnr = PeakSignalNoiseRatio(data_range=255.0)

    @property
    def latent_channels(self) -> int:
        """Channels of the latents."""
        return self.network.latent_channels

    def latent_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return the sizes of the latents of a clip; see `CausalVideoAutoencoder.latent_grid`."""
        return self.network.latent_grid(frames, height, width)

    def encode(self, video: UInt8[Tensor, "batch 3 frames height width"]) -> Float[Tensor, "batch channels t h w"]:
        """Return the latents of clips; see `CausalVideoAutoencoder.encode`."""
        return self.network.encode(video)

    def decode(self, latents: Float[Tensor, "batch channels t h w"]) -> UInt8[Tensor, "batch 3 frames height width"]:
        """Return the clips of latents; see `CausalVideoAutoencoder.decode`."""
        return self.network.decode(latents)

    def setup(self, stage: str) -> None:
        """Warn where the Trainer's precision is slow."""
        warn_if_precision_is_slow(self)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """Return the configured optimizer and its schedule."""
        return build_optimization(self.network, self.training_config.optimizer, self.training_config.schedule)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Float[Tensor, ""]:
        """Return the error of pixels decoded from noisy latents."""
        pixels = PixelAutoencoder().encode(batch["video"])
        latents = self.network.encode_pixels(pixels)
        key = (self.training_config.seed, self.global_step, batch_idx, self.global_rank)
        generator = keyed_generator(key, self.device)
        noise = torch.randn(latents.shape, generator=generator, device=latents.device)
        decoded = self.network.decode_pixels(latents + self.training_config.latent_noise * noise)
        # Not the absolute error: where most pixels are white, white everywhere is a trap for it.
        loss = (decoded - pixels).square().mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Measure the reconstructions of a batch, and log those of the first clip."""
        self._evaluate(batch["video"], batch_idx, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Measure the reconstructions of a batch, and log those of the first clip."""
        self._evaluate(batch["video"], batch_idx, "test")

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> Float[Tensor, "batch channels t h w"]:
        """Return the latents of a batch."""
        return self.encode(batch["video"])

    def on_validation_epoch_start(self) -> None:
        """Forget the last set."""
        self.psnr.reset()

    def on_test_epoch_start(self) -> None:
        """Forget the last set."""
        self.psnr.reset()

    def on_validation_epoch_end(self) -> None:
        """Log the metric of the whole set."""
        self.log("val/psnr", self.psnr.compute(), prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Log the metric of the whole set."""
        self.log("test/psnr", self.psnr.compute(), prog_bar=True)

    def _evaluate(self, video: UInt8[Tensor, "batch 3 frames height width"], batch_idx: int, stage: str) -> None:
        reconstructions = self.decode(self.encode(video))
        self.psnr.update(reconstructions.float(), video.float())
        if batch_idx == 0 and self.trainer.is_global_zero and not self.trainer.sanity_checking:
            frames = torch.cat([video[0].transpose(0, 1), reconstructions[0].transpose(0, 1)])
            grid = make_grid(frames, nrow=video.shape[2])
            log_image(self.trainer.loggers, f"{stage}/reconstructions", grid, self.global_step)
