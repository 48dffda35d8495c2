"""Captions to images with a transformer over the tokens of a frozen discrete VAE (Ramesh et al. 2021, section 2.2)."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_dalle.distributed.context_parallel.plan import SequencePlan
from lightning_dalle.lightning_modules.configuration import (
    as_config,
    data_parallel_rank,
    load_tokenizer,
    warn_if_precision_is_slow,
)
from lightning_dalle.lightning_modules.discrete_vae_module import DiscreteVAEModule
from lightning_dalle.lightning_modules.optimization import build_optimization
from lightning_dalle.lightning_modules.text_to_image_training import ImageTokenCache, TextToImageTrainingConfig
from lightning_dalle.models.discrete_vae import DiscreteVAE, DiscreteVAEConfig
from lightning_dalle.models.sparse_transformer import SparseTransformer, SparseTransformerConfig
from lightning_dalle.ops.random import keyed_generator
from lightning_dalle.ops.sharded_sequence import sequence_mean
from lightning_dalle.ops.token_sampling import keyed_uniforms, replace_tokens
from lightning_dalle.sampling.autoregressive import decode_image_tokens
from lightning_dalle.sampling.progress import token_progress


class TextToImageModule(LightningModule):
    """Trains a `SparseTransformer` on captions and image tokens, and generates images of captions.

    Batches are mappings with an `image` (uint8) and a `caption` (strings). The `text_tokens` of a data module that has
    the tokenizer, and so BPE dropout, are used instead of the captions. Checkpoints are complete: they also hold the
    tokenizer and the frozen discrete VAE, of which nothing reaches the optimizer.

    Args:
        discrete_vae: The frozen image tokenizer: path of a `DiscreteVAEModule` checkpoint, or a network, as
            `load_openai_discrete_vae` gives it. A configuration builds one whose weights a checkpoint of this module is
            to bring.
        tokenizer: Path of a tokenizer file, or its JSON text.

    Raises:
        ValueError: If grid, codebook or vocabulary of the parts do not agree.
    """

    def __init__(
        self,
        network: SparseTransformerConfig | Mapping[str, Any],
        training: TextToImageTrainingConfig | Mapping[str, Any],
        discrete_vae: str | Path | DiscreteVAEConfig | Mapping[str, Any] | DiscreteVAE,
        tokenizer: str | Path,
    ) -> None:
        super().__init__()
        network_config = as_config(SparseTransformerConfig, network, "network")
        self.training_config = as_config(TextToImageTrainingConfig, training, "training")
        # It keeps the mode of the rest: nothing in it depends on that, and Lightning warns where modes differ.
        self.discrete_vae = _load_discrete_vae(discrete_vae).requires_grad_(False)
        self.tokenizer = load_tokenizer(tokenizer)
        _validate_agreement(network_config, self.discrete_vae.config, self.tokenizer.vocabulary_size)
        self.save_hyperparameters(
            {
                "network": dataclasses.asdict(network_config),
                "training": dataclasses.asdict(self.training_config),
                "discrete_vae": dataclasses.asdict(self.discrete_vae.config),
                "tokenizer": self.tokenizer.to_json(),
            }
        )
        self.network = SparseTransformer(network_config)
        self._image_token_cache = ImageTokenCache(self.training_config.kept_image_tokens)

    def setup(self, stage: str) -> None:
        """Warn where the Trainer's precision is slow."""
        warn_if_precision_is_slow(self)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """Return the configured optimizer and its schedule."""
        return build_optimization(self.network, self.training_config.optimizer, self.training_config.schedule)

    def uncompressed_parameters(self) -> list[str]:
        """Return the unembeddings, for strategies that compress gradients."""
        return ["network.text_head.*", "network.image_head.*"]

    def gradient_blocks(self) -> dict[str, tuple[nn.Module, ...]]:
        """Residual blocks of the network, which `PerBlockGradientScaling` asks for."""
        return self.network.gradient_blocks()

    def sequence_plan(self) -> SequencePlan:
        """Where strategies shard the sequence: layers, heads and losses get local shards, embeddings all of it."""
        config = self.network.config
        return SequencePlan(
            inputs={"network.layers.0": {"hidden": 1}},
            length=config.pattern(0).length,
            num_heads=config.num_heads,
        )

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Float[Tensor, ""]:
        """Return the weighted loss of a batch, some of whose captions and image tokens are disturbed."""
        text_tokens, image_tokens = self._text_tokens(batch), self._image_tokens(batch)
        key = (self.training_config.seed, self.global_step, batch_idx, data_parallel_rank(self))
        dropped = keyed_uniforms(key, len(text_tokens)) < self.training_config.caption_dropout
        text_tokens = text_tokens.masked_fill(dropped.to(text_tokens.device).unsqueeze(1), 0)
        shown = image_tokens
        if self.training_config.image_token_noise > 0:
            noise, codes = self.training_config.image_token_noise, self.network.config.image_vocabulary_size
            shown = replace_tokens(image_tokens, noise, codes, keyed_generator(key, self.device))
        return self._loss(text_tokens, image_tokens, "train", shown)

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log the losses of a batch."""
        self._loss(self._text_tokens(batch), self._image_tokens(batch), "val")

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log the losses of a batch."""
        self._loss(self._text_tokens(batch), self._image_tokens(batch), "test")

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> UInt8[Tensor, "batch 1 3 height width"]:
        """Return one image per caption of the batch."""
        seed = int(keyed_uniforms((self.training_config.seed, batch_idx, data_parallel_rank(self)), 1) * 2**53)
        return self.generate(batch["caption"], generator=torch.Generator().manual_seed(seed), progress=False)

    def generate(
        self,
        captions: Sequence[str],
        num_candidates: int = 1,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        guidance_scale: float = 1.0,
        prime: UInt8[Tensor, "primes 3 height width"] | Float[Tensor, "primes 3 height width"] | None = None,
        prime_rows: int | None = None,
        generator: torch.Generator | None = None,
        max_batch: int = 128,
        progress: bool = True,
    ) -> UInt8[Tensor, "captions num_candidates 3 height width"]:
        """Draw images of captions; a candidate does not depend on the other captions, nor on `max_batch`.

        Args:
            guidance_scale: Above 1 images follow their caption more closely; needs training with `caption_dropout`.
            prime: One image per caption, uint8 or floating point in [0, 1], whose top the generated images keep.
            prime_rows: Rows of the token grid that are kept; None is the paper's 15 of 32.
            generator: Source of the one seed that a call draws; None is torch's global one.
            max_batch: Candidates that are decoded together.
            progress: Show a progress bar, unless a Trainer is running.

        Raises:
            TypeError: If `captions` is one string.
            ValueError: If an argument is out of range.
        """
        if isinstance(captions, str):
            raise TypeError(f"captions ({captions!r}) must be a sequence of strings; put one caption into a list")
        if guidance_scale != 1 and self.training_config.caption_dropout == 0:
            warnings.warn(
                f"guidance_scale ({guidance_scale}) has no trained empty caption to move away from, "
                "since caption_dropout was 0 in training",
                stacklevel=2,
            )
        prime_tokens = self._prime_tokens(prime, prime_rows, len(captions))
        text_tokens = self.tokenizer.encode(captions, self.network.config.text_tokens).to(self.device)
        to_draw = self.network.config.image_tokens - (0 if prime_tokens is None else prime_tokens.shape[1])
        with token_progress(len(captions) * num_candidates * to_draw, progress and not self._in_trainer()) as advance:
            tokens = decode_image_tokens(
                self.network,
                text_tokens,
                num_candidates=num_candidates,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                guidance_scale=guidance_scale,
                prime_tokens=prime_tokens,
                generator=generator,
                max_batch=max_batch,
                on_tokens=advance,
            )
        images = [self.discrete_vae.decode(chunk) for chunk in tokens.flatten(0, 1).split(max_batch)]
        return torch.cat(images).unflatten(0, (len(captions), num_candidates))

    def _loss(self, text_tokens: Tensor, image_tokens: Tensor, stage: str, shown: Tensor | None = None) -> Tensor:
        """Cross-entropies of text and image, each over its own number of tokens; padding is no target.

        Args:
            shown: The image tokens that the network sees, if others than those that it is asked for.
        """
        text_logits, image_logits = self.network(text_tokens, image_tokens if shown is None else shown)
        text, image = self.network.own_tokens(text_tokens, image_tokens)
        text_sum = cross_entropy(text_logits.flatten(0, 1), text.flatten(), ignore_index=0, reduction="sum")
        text_loss = sequence_mean(text_sum, (text != 0).sum())
        image_sum = cross_entropy(image_logits.flatten(0, 1), image.flatten(), reduction="sum")
        image_loss = sequence_mean(image_sum, image_sum.new_tensor(image.numel(), dtype=torch.long))
        weight = self.training_config.text_loss_weight
        loss = weight * text_loss + (1 - weight) * image_loss
        losses = {f"{stage}/loss": loss, f"{stage}/text_loss": text_loss, f"{stage}/image_loss": image_loss}
        self.log_dict(losses, prog_bar=True, batch_size=len(image_tokens), sync_dist=stage != "train")
        return loss

    def _text_tokens(self, batch: Mapping[str, Any]) -> Int[Tensor, "batch text"]:
        if "text_tokens" in batch:
            return batch["text_tokens"]
        return self.tokenizer.encode(batch["caption"], self.network.config.text_tokens).to(self.device)

    def _image_tokens(self, batch: Mapping[str, Any]) -> Int[Tensor, "batch image"]:
        return self._image_token_cache.encode(self.discrete_vae, batch["image"])

    def _prime_tokens(self, prime: Tensor | None, prime_rows: int | None, num_captions: int) -> Tensor | None:
        config = self.network.config
        if prime is None:
            if prime_rows is not None:
                raise ValueError(f"prime_rows ({prime_rows}) has no effect without prime; give images or leave it out")
            return None
        if len(prime) != num_captions:
            raise ValueError(f"prime has {len(prime)} images for {num_captions} captions; give one per caption")
        rows = max(1, config.grid_height * 15 // 32) if prime_rows is None else prime_rows
        if not 1 <= rows < config.grid_height:
            raise ValueError(f"prime_rows ({rows}) must be in 1..{config.grid_height - 1}: some rows are left to draw")
        return self.discrete_vae.encode(prime.to(self.device))[:, : rows * config.grid_width]

    def _in_trainer(self) -> bool:
        return self._trainer is not None and self._trainer.state.status == TrainerStatus.RUNNING


def _load_discrete_vae(source: str | Path | DiscreteVAEConfig | Mapping[str, Any] | DiscreteVAE) -> DiscreteVAE:
    if isinstance(source, DiscreteVAE):
        return source
    if isinstance(source, str | Path):
        try:
            return DiscreteVAEModule.load_from_checkpoint(source, map_location="cpu", weights_only=True).network
        except FileNotFoundError:
            raise FileNotFoundError(
                f"discrete_vae ({str(source)!r}) does not exist; it must be a checkpoint of a DiscreteVAEModule"
            ) from None
    return DiscreteVAE(as_config(DiscreteVAEConfig, source, "discrete_vae"))


def _validate_agreement(
    network: SparseTransformerConfig, discrete_vae: DiscreteVAEConfig, vocabulary_size: int
) -> None:
    grid = discrete_vae.grid_size
    if (network.grid_height, network.grid_width) != (grid, grid):
        raise ValueError(
            f"grid_height ({network.grid_height}) and grid_width ({network.grid_width}) must be {grid}, "
            f"the grid of the discrete VAE (image_size {discrete_vae.image_size})"
        )
    if network.image_vocabulary_size != discrete_vae.codebook_size:
        raise ValueError(
            f"image_vocabulary_size ({network.image_vocabulary_size}) must equal the discrete VAE's codebook_size "
            f"({discrete_vae.codebook_size})"
        )
    if vocabulary_size > network.text_vocabulary_size:
        raise ValueError(
            f"text_vocabulary_size ({network.text_vocabulary_size}) must be at least the tokenizer's "
            f"vocabulary_size ({vocabulary_size}); raise it or train a smaller tokenizer"
        )
