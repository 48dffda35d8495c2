"""Training of the discrete VAE (section 2.1 and appendix A of the DALL-E paper)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.image import PeakSignalNoiseRatio
from torchvision.utils import make_grid

from lightning_dalle.evaluation.logging import log_image
from lightning_dalle.lightning_modules.configuration import as_config, warn_if_precision_is_slow
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig, build_optimization
from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.ops.dvae_losses import (
    dequantise,
    gumbel_noise,
    gumbel_softmax,
    kl_to_uniform,
    logit_laplace_log_density,
    map_pixels,
)
from lightning_dalle.ops.random import keyed_generator
from lightning_dalle.ops.schedules import CosineSchedule

NUM_LOGGED_IMAGES = 8
NUM_PATCH_IMAGES = 2048
EVALUATION_STEP = -1
"""Stands for the update in the key of validation noise, which is the same at each validation."""


@dataclass(frozen=True, kw_only=True)
class DiscreteVAETrainingConfig:
    """How a discrete VAE is trained; the defaults are the paper's (appendix A.2), the last three fields are not in it.

    Attributes:
        kl_weight: Beta, the weight of the KL divergence summed over the positions of an image.
        temperature: Temperature of the gumbel-softmax relaxation.
        dequantise: Train on pixels with uniform noise of one grey level, which bounds the density on flat image areas.
            The paper trains on the 8-bit values.
        patch_temperature: Patch temperature of the initial patch codebook, where the network has one.
        seed: Seeds the noise and the patch codebook.
    """

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-4, weight_decay=1e-4, decay_embeddings=True)
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", total_steps=1_200_000, final_learning_rate=1.25e-6)
    kl_weight: CosineSchedule = CosineSchedule(start=0.0, end=6.6, steps=5_000)
    temperature: CosineSchedule = CosineSchedule(start=1.0, end=1 / 16, steps=150_000)
    dequantise: bool = False
    patch_temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse temperatures that divide by zero."""
        for name, value in (
            ("temperature.start", self.temperature.start),
            ("temperature.end", self.temperature.end),
            ("patch_temperature", self.patch_temperature),
        ):
            if value <= 0:
                raise ValueError(f"{name} ({value}) must be above 0; the paper ends at 1/16")


class CodebookUse(Metric):
    """Number of distinct codes used and the perplexity exp(entropy) of their frequencies, over all ranks.

    Args:
        codebook_size: K; ids are in 0..K-1.

    Example:
        >>> metric = CodebookUse(codebook_size=8)
        >>> metric.update(torch.tensor([[0, 1], [0, 1]]))
        >>> metric.compute()
        {'codes_used': tensor(2.), 'code_perplexity': tensor(2.)}
    """

    full_state_update = False
    counts: Int[Tensor, " codes"]

    def __init__(self, codebook_size: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(codebook_size, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, ids: Int[Tensor, "..."]) -> None:
        """Count the codes of a batch."""
        self.counts += torch.bincount(ids.flatten(), minlength=len(self.counts))

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        """Return `codes_used` and `code_perplexity`."""
        frequencies = self.counts / self.counts.sum()
        entropy = torch.special.entr(frequencies).sum()
        return {"codes_used": (self.counts > 0).sum().float(), "code_perplexity": entropy.exp()}


class DiscreteVAEModule(LightningModule):
    """Maximises the evidence lower bound of a `DiscreteVAE` with relaxed codes.

    Batches are mappings with an `"image"` of `uint8` pixels, shaped (batch, 3, image_size, image_size).
    Logged under `train/`, `val/` or `test/`:

    - `elb_relaxed`: nats per pixel value, with relaxed codes and a KL weight of 1.
    - `elb_hard`: the same with codes sampled from the encoder's distribution, the true bound (evaluation only).
    - `kl`: from the uniform prior, in nats per position, at most ln K.
    - `loss`, `temperature`, `kl_weight`: as trained (training only).
    - `psnr`: of `decode(encode(images))` in dB (evaluation only).
    - `codes_used`, `code_perplexity`: over the evaluation set (evaluation only).

    Args:
        network: Sizes.
        training: Schedules.
    """

    def __init__(
        self,
        network: DiscreteVAEConfig | Mapping[str, Any] = DiscreteVAEConfig(),
        training: DiscreteVAETrainingConfig | Mapping[str, Any] = DiscreteVAETrainingConfig(),
    ) -> None:
        super().__init__()
        network_config = as_config(DiscreteVAEConfig, network, "network")
        self.training_config = as_config(DiscreteVAETrainingConfig, training, "training")
        self.save_hyperparameters(
            {"network": dataclasses.asdict(network_config), "training": dataclasses.asdict(self.training_config)}
        )
        # Convolutions train 1.5 times as fast on a CPU in this layout; the values of the weights are the same.
        self.network = DiscreteVAE(network_config).to(memory_format=torch.channels_last)
        self.psnr = PeakSignalNoiseRatio(data_range=255.0)
        self.codebook_use = CodebookUse(network_config.codebook_size)

    def encode(
        self, images: UInt8[Tensor, "batch 3 height width"] | Float[Tensor, "batch 3 height width"]
    ) -> Int[Tensor, "batch tokens"]:
        """Return the most probable codes; see `DiscreteVAE.encode`."""
        return self.network.encode(images)

    def decode(self, ids: Int[Tensor, "batch tokens"]) -> UInt8[Tensor, "batch 3 height width"]:
        """Return the images of codes; see `DiscreteVAE.decode`."""
        return self.network.decode(ids)

    def setup(self, stage: str) -> None:
        """Warn where the Trainer's precision is slow."""
        warn_if_precision_is_slow(self)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """Return the configured optimizer and its schedule."""
        return build_optimization(self.network, self.training_config.optimizer, self.training_config.schedule)

    def on_fit_start(self) -> None:
        """Initialise the patch codebook from training images, unless a checkpoint has brought one.

        Raises:
            ValueError: If there are no training images to take, since no LightningDataModule was given.
        """
        if not self.network.needs_patch_codebook:
            return
        data: LightningDataModule | None = getattr(self.trainer, "datamodule", None)
        if data is None:
            raise ValueError(
                "patch_codebook (True) is initialised from the images of a LightningDataModule and none was given; "
                "call module.network.initialise_patch_codebook(images) before fit"
            )
        if self.trainer.is_global_zero:
            training = self.training_config
            self.network.initialise_patch_codebook(
                _first_images(data), temperature=training.patch_temperature, seed=training.seed
            )
        # Ranks see different shards: all of them take what rank 0 found.
        state = self.trainer.strategy.broadcast(self.network.state_dict(), src=0)
        self.network.load_state_dict(state)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Float[Tensor, ""]:
        """Return the negative bound with the KL weighted, per pixel value."""
        images = batch["image"]
        training = self.training_config
        temperature, kl_weight = training.temperature(self.global_step), training.kl_weight(self.global_step)
        generator = self._generator(self.global_step, batch_idx)
        mapped = map_pixels(images)
        logits = self.network.encode_logits(mapped)
        codes = gumbel_softmax(logits, temperature, gumbel_noise(logits, generator))
        target = dequantise(mapped, generator) if training.dequantise else mapped
        log_density = self._log_density(target, codes)
        kl = kl_to_uniform(logits).mean()
        loss = (kl_weight * kl - log_density) / images[0].numel()
        elb = (log_density - kl) / images[0].numel()
        self.log_dict({"train/elb_relaxed": elb, "train/kl": kl / logits[0, 0].numel()})
        self.log_dict({"train/temperature": temperature, "train/kl_weight": kl_weight})
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Evaluate a batch and log the reconstructions of the first one."""
        self._evaluate(batch["image"], batch_idx, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Evaluate a batch and log the reconstructions of the first one."""
        self._evaluate(batch["image"], batch_idx, "test")

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> Int[Tensor, "batch tokens"]:
        """Return the codes of a batch."""
        return self.encode(batch["image"])

    def on_validation_epoch_start(self) -> None:
        """Forget the last set."""
        self._reset_metrics()

    def on_test_epoch_start(self) -> None:
        """Forget the last set."""
        self._reset_metrics()

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the whole set."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the whole set."""
        self._log_metrics("test")

    def _evaluate(self, images: UInt8[Tensor, "batch 3 height width"], batch_idx: int, stage: str) -> None:
        mapped = map_pixels(images)
        logits = self.network.encode_logits(mapped)
        noise = gumbel_noise(logits, self._generator(EVALUATION_STEP, batch_idx))
        temperature = self.training_config.temperature(self.global_step)
        kl = kl_to_uniform(logits).mean()
        bounds = {
            "relaxed": self._log_density(mapped, gumbel_softmax(logits, temperature, noise)) - kl,
            "hard": self._log_density(mapped, (logits + noise).argmax(dim=1)) - kl,
        }
        per_value = {f"{stage}/elb_{name}": bound / images[0].numel() for name, bound in bounds.items()}
        self.log_dict({**per_value, f"{stage}/kl": kl / logits[0, 0].numel()}, sync_dist=True, batch_size=len(images))
        ids = logits.argmax(dim=1).flatten(1)
        reconstructions = self.decode(ids)
        self.psnr.update(reconstructions.float(), images.float())
        self.codebook_use.update(ids)
        if batch_idx == 0 and self.trainer.is_global_zero and not self.trainer.sanity_checking:
            pairs = torch.cat([images[:NUM_LOGGED_IMAGES], reconstructions[:NUM_LOGGED_IMAGES]])
            grid = make_grid(pairs, nrow=min(len(images), NUM_LOGGED_IMAGES))
            log_image(self.trainer.loggers, f"{stage}/reconstructions", grid, self.global_step)

    def _log_density(
        self,
        mapped: Float[Tensor, "batch 3 height width"],
        codes: Float[Tensor, "batch codes grid_height grid_width"] | Int[Tensor, "batch grid_height grid_width"],
    ) -> Float[Tensor, ""]:
        """Return ln p(x | codes) in nats, summed over an image and averaged over the batch."""
        mu, log_scale = self.network.decode_maps(codes)
        return logit_laplace_log_density(mapped, mu, log_scale).sum(dim=(1, 2, 3)).mean()

    def _generator(self, step: int, batch_idx: int) -> torch.Generator:
        return keyed_generator((self.training_config.seed, step, batch_idx, self.global_rank), self.device)

    def _log_metrics(self, stage: str) -> None:
        self.log(f"{stage}/psnr", self.psnr.compute(), prog_bar=True)
        self.log_dict({f"{stage}/{name}": value for name, value in self.codebook_use.compute().items()})

    def _reset_metrics(self) -> None:
        # At the start and not at the end: `fit` cannot add to the inference tensors that `validate` leaves.
        self.psnr.reset()
        self.codebook_use.reset()


def _first_images(data: LightningDataModule) -> UInt8[Tensor, "batch 3 height width"]:
    """Return about `NUM_PATCH_IMAGES` training images, or all where there are fewer."""
    images: list[Tensor] = []
    for batch in data.train_dataloader():
        images.append(batch["image"])
        if sum(map(len, images)) >= NUM_PATCH_IMAGES:
            break
    return torch.cat(images)
