"""A contrastive image-text model (CLIP, Radford et al. 2021), which ranks generated images by their caption."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from jaxtyping import Float, Int, UInt8
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import center_crop, resize

from lightning_dalle.lightning_modules.configuration import as_config, load_tokenizer, warn_if_precision_is_slow
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig, build_optimization
from lightning_dalle.models.contrastive import (
    ContrastiveConfig,
    OpenClipConfig,
    RepeatedCaptionClipLoss,
    append_end_of_text,
    build_open_clip,
    open_clip_tokenizer,
    pixel_statistics,
    read_model_config,
)
from lightning_dalle.models.modes import evaluation_mode

MAX_LOGIT_SCALE = math.log(100)
"""Upper end of the learned log-scale of the logits (Radford et al. 2021, section 2.5)."""


@dataclass(frozen=True, kw_only=True)
class ContrastiveTrainingConfig:
    """Settings of `ContrastiveModule`; the defaults are those of CLIP ViT-B (Radford et al. 2021, appendix F)."""

    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=5e-4, beta2=0.98, epsilon=1e-6, weight_decay=0.2, decay_embeddings=True
    )
    schedule: ScheduleConfig = ScheduleConfig(name="cosine", warmup_steps=2000, total_steps=390_625)


class ContrastiveModule(LightningModule):
    """Trains an open_clip model on the batches' `image` (uint8) and `caption` (strings), and scores images by captions.

    Its checkpoints are complete: they hold the network's configuration and our tokenizer, and load without the files
    that the module was made from. (A Hugging Face tokenizer, which some names bring, open_clip looks up again.)

    Logged under `train/`, `val/` and `test/`: `loss`, and `accuracy`, the share of images whose best caption of the
    batch is theirs; `train/logit_scale`.

    The gradient under DDP is that of one process on the gathered batch. Batch normalisation, in the network of our own,
    sees the images of its rank only, unless the Trainer is given `sync_batchnorm=True` (GPUs only).

    Args:
        network: Sizes of a network of our own, an open_clip model by name, or the path of a checkpoint of this module,
            which brings weights and tokenizer.
        tokenizer: Path of a tokenizer file, or its JSON text; None takes open_clip's own, for a network by name.

    Raises:
        ValueError: If the tokenizer is missing, does not fit the network's vocabulary, or comes beside a checkpoint's.
    """

    # open_clip has no types, and its models no common base.
    network: Any
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(
        self,
        network: ContrastiveConfig | OpenClipConfig | Mapping[str, Any] | str | Path,
        training: ContrastiveTrainingConfig | Mapping[str, Any] = ContrastiveTrainingConfig(),
        tokenizer: str | Path | None = None,
    ) -> None:
        super().__init__()
        checkpoint: Mapping[str, Any] = {}
        if isinstance(network, str | Path):
            checkpoint = _read_checkpoint(network, tokenizer)
            network, tokenizer = (checkpoint["hyper_parameters"][name] for name in ("network", "tokenizer"))
        self.training_config = as_config(ContrastiveTrainingConfig, training, "training")
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self.network, config = self._build(network)
        self.save_hyperparameters(
            {
                "network": dataclasses.asdict(config),
                "training": dataclasses.asdict(self.training_config),
                "tokenizer": None if self.tokenizer is None else self.tokenizer.to_json(),
            }
        )
        mean, std = pixel_statistics(self.network)
        self.register_buffer("pixel_mean", mean)
        self.register_buffer("pixel_std", std)
        self.loss = RepeatedCaptionClipLoss()
        if checkpoint:
            self.load_state_dict(checkpoint["state_dict"])

    def encode_images(
        self, images: UInt8[Tensor, "batch 3 height width"], max_batch: int = 256
    ) -> Float[Tensor, "batch features"]:
        """Return unit features in fp32, in evaluation mode and outside autocast.

        Args:
            images: Resized to the network's side along their shorter one and cropped to the middle square.
            max_batch: Images that are encoded together.

        Raises:
            TypeError: If the images are not uint8.
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images ({images.dtype}) must be uint8; clamp, round and convert them")
        with evaluation_mode(self), torch.autocast(self.device.type, enabled=False):
            chunks = [self._image_features(chunk.to(self.device)) for chunk in images.split(max_batch)]
        return torch.cat(chunks)

    def encode_captions(self, captions: Sequence[str], max_batch: int = 256) -> Float[Tensor, "batch features"]:
        """Return unit features in fp32, in evaluation mode and outside autocast.

        Raises:
            TypeError: If `captions` is one string.
        """
        if isinstance(captions, str):
            raise TypeError(f"captions ({captions!r}) must be a sequence of strings; put one caption into a list")
        tokens = self._tokenize(captions)
        with evaluation_mode(self), torch.autocast(self.device.type, enabled=False):
            chunks = [self._text_features(chunk) for chunk in tokens.split(max_batch)]
        return torch.cat(chunks)

    def score(
        self, images: UInt8[Tensor, "images 3 height width"], captions: Sequence[str]
    ) -> Float[Tensor, "images captions"]:
        """Return the cosine of each image with each caption, in fp32."""
        image_features, text_features = self.encode_images(images), self.encode_captions(captions)
        with torch.autocast(self.device.type, enabled=False):
            return image_features @ text_features.T

    def setup(self, stage: str) -> None:
        """Make the loss span all ranks, and warn where the Trainer's precision is slow."""
        warn_if_precision_is_slow(self)
        self.loss = RepeatedCaptionClipLoss(rank=self.global_rank, world_size=self.trainer.world_size)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """Return the configured optimizer and its schedule."""
        return build_optimization(self.network, self.training_config.optimizer, self.training_config.schedule)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Float[Tensor, ""]:
        """Return the contrastive loss of a batch."""
        self.log("train/logit_scale", self.network.logit_scale.exp())
        return self._loss(batch, "train")

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log loss and accuracy of a batch."""
        self._loss(batch, "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log loss and accuracy of a batch."""
        self._loss(batch, "test")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the logits' scale at or below 100, as CLIP does."""
        with torch.no_grad():
            self.network.logit_scale.clamp_(max=MAX_LOGIT_SCALE)

    def _loss(self, batch: Mapping[str, Any], stage: str) -> Tensor:
        text_tokens = self._tokenize(batch["caption"])
        loss, accuracy = self.loss(
            self._image_features(batch["image"]),
            self._text_features(text_tokens),
            self.network.logit_scale.exp(),
            text_tokens,
            self.network.logit_bias,
            self._text_features(self._tokenize(batch["negative_caption"])) if "negative_caption" in batch else None,
        )
        metrics = {f"{stage}/loss": loss, f"{stage}/accuracy": accuracy}
        self.log_dict(metrics, prog_bar=True, batch_size=len(text_tokens), sync_dist=stage != "train")
        return loss

    def _image_features(self, images: UInt8[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch features"]:
        size = self.network.visual.image_size
        side = size if isinstance(size, int) else size[0]
        pixels = images.float() / 255
        if images.shape[-2:] != (side, side):
            pixels = resize(pixels, [side], InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)
            pixels = center_crop(pixels, [side, side])
        pixels = (pixels - self.pixel_mean) / self.pixel_std
        # Autocast or a module in bf16 ends here: cosines of close candidates differ in the fourth digit.
        return normalize(self.network.encode_image(pixels.to(self.network.logit_scale.dtype)).float(), dim=-1)

    def _text_features(self, tokens: Int[Tensor, "batch text"]) -> Float[Tensor, "batch features"]:
        return normalize(self.network.encode_text(tokens).float(), dim=-1)

    def _tokenize(self, captions: Sequence[str]) -> Int[Tensor, "batch text"]:
        if self.tokenizer is None:
            return self._open_clip_tokenizer(list(captions)).to(self.device)
        tokens = self.tokenizer.encode(captions, self.network.context_length - 1)
        return append_end_of_text(tokens, end_of_text=self.tokenizer.vocabulary_size).to(self.device)

    def _build(self, network: Any) -> tuple[nn.Module, ContrastiveConfig | OpenClipConfig]:
        """Return the network, and its configuration as checkpoints carry it."""
        by_name = isinstance(network, OpenClipConfig) or (isinstance(network, Mapping) and "model_name" in network)
        if not by_name:
            config = as_config(ContrastiveConfig, network, "network")
            if self.tokenizer is None:
                raise ValueError("tokenizer (None) is needed for a network of our own; give the path of its file")
            return open_clip.CLIP(**config.model_config(self.tokenizer.vocabulary_size)), config
        named = as_config(OpenClipConfig, network, "network")
        model_config = read_model_config(named)
        network_size = model_config["text_cfg"].get("vocab_size")
        if self.tokenizer is None:
            self._open_clip_tokenizer = open_clip_tokenizer(named.model_name, model_config)
        elif network_size != self.tokenizer.vocabulary_size + 1:
            raise ValueError(
                f"tokenizer has {self.tokenizer.vocabulary_size} ids and the network {network_size}; it must have "
                "one more, the end of text; leave tokenizer out to take the network's own"
            )
        # The weights are in the state dict from here on, and the file they came from may not outlive it.
        carried = dataclasses.replace(named, pretrained=None, model_config=model_config)
        return build_open_clip(named), carried


def _read_checkpoint(path: str | Path, tokenizer: str | Path | None) -> Mapping[str, Any]:
    if tokenizer is not None:
        raise ValueError(f"tokenizer ({tokenizer}) has no effect beside that of the checkpoint {path}; leave it out")
    checkpoint: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint
