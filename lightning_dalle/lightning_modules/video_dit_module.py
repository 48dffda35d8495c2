"""Captions to clips with a diffusion transformer, trained by flow matching (Lipman et al. 2023; Wan Team 2025)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_dalle.distributed.context_parallel.plan import SequencePlan
from lightning_dalle.lightning_modules.configuration import as_config, data_parallel_rank, warn_if_precision_is_slow
from lightning_dalle.lightning_modules.optimization import build_optimization
from lightning_dalle.lightning_modules.video_dit_parts import (
    AutoencoderSource,
    CaptionEncoder,
    build_text_encoder,
    frozen_autoencoder,
    validate_agreement,
)
from lightning_dalle.lightning_modules.video_dit_training import (
    VideoDiTTrainingConfig,
    check_first_frame,
    flow_matching_loss,
    validate_request,
)
from lightning_dalle.models.text_encoders import TextEncoder, TextTowerConfig
from lightning_dalle.models.video_autoencoder import CausalVideoAutoencoder
from lightning_dalle.models.video_dit import VideoDiT, VideoDiTConfig
from lightning_dalle.ops.flow_matching import draw_times, resolution_shift, shift_times
from lightning_dalle.ops.random import keyed_generator
from lightning_dalle.ops.rope import Policies
from lightning_dalle.ops.sharded_sequence import sharded_sequences
from lightning_dalle.ops.token_sampling import keyed_uniforms
from lightning_dalle.sampling.flow_matching import Solver, candidate_keys, keyed_noise, sample_latents
from lightning_dalle.sampling.progress import token_progress

# Draws of a step that must not repeat each other.
_TIMES, _CAPTIONS, _FIRST_FRAMES, _NOISE = range(4)


class VideoDiTModule(LightningModule):
    """Trains a `VideoDiT` on captioned clips, and generates clips of captions.

    Batches are mappings with a `video` (uint8, a list where clips are of several sizes) and a `caption` (strings).
    Instead of them `latents` and `text_features` are used, where a batch has them. Checkpoints remember how positions
    were told, and refuse to be loaded by a module that tells them otherwise. They hold the weights of all parts, frozen
    ones too, the tokenizer, and the sizes of all parts but an encoder or autoencoder of your own, which
    `load_from_checkpoint` has to be given again, with any weights.

    Args:
        text_encoder: Sizes of a small encoder that is trained along, or a `TextEncoder`.
        tokenizer: Path of a tokenizer file, or its JSON text, for the small encoder.
        autoencoder: Autoencoder of the clips, kept frozen: path of a `VideoAutoencoderModule` checkpoint, or a
            `VideoAutoencoder`; None works on pixels. Sizes build one whose weights a checkpoint of this module is to
            bring.

    Raises:
        FileNotFoundError: If there is no such checkpoint or tokenizer.
        TypeError: If the encoder or autoencoder lacks a method.
        ValueError: If sizes of the parts do not agree, a tokenizer is missing or has no use, or a checkpoint is not
            one of an autoencoder.
    """

    def __init__(
        self,
        network: VideoDiTConfig | Mapping[str, Any],
        training: VideoDiTTrainingConfig | Mapping[str, Any],
        # The command line takes the first that fits, and a class to build is a mapping, too.
        text_encoder: TextTowerConfig | TextEncoder | Mapping[str, Any],
        tokenizer: str | Path | None = None,
        autoencoder: AutoencoderSource = None,
    ) -> None:
        super().__init__()
        network_config = as_config(VideoDiTConfig, network, "network")
        self.training_config = as_config(VideoDiTTrainingConfig, training, "training")
        self.autoencoder = frozen_autoencoder(autoencoder)
        self.text_encoder = build_text_encoder(text_encoder, tokenizer)
        saved: dict[str, Any] = {
            "network": dataclasses.asdict(network_config),
            "training": dataclasses.asdict(self.training_config),
        }
        if isinstance(self.text_encoder, CaptionEncoder):
            saved["text_encoder"] = dataclasses.asdict(self.text_encoder.tower.config)
            saved["tokenizer"] = self.text_encoder.tokenizer.to_json()
        if isinstance(self.autoencoder, CausalVideoAutoencoder):
            saved["autoencoder"] = dataclasses.asdict(self.autoencoder.config)
        self.save_hyperparameters(saved)
        self.network = VideoDiT(network_config)
        validate_agreement(network_config, self.training_config, self.text_encoder, self.autoencoder)

    def setup(self, stage: str) -> None:
        """Warn where the Trainer's precision is slow."""
        warn_if_precision_is_slow(self)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """Return the configured optimizer and its schedule."""
        return build_optimization(self, self.training_config.optimizer, self.training_config.schedule)

    def uncompressed_parameters(self) -> list[str]:
        """Return what turns patches into features and back, for strategies that compress gradients."""
        return ["network.patch_embedding.*", "network.final_layer.output.*"]

    def sequence_plan(self) -> SequencePlan:
        """Where strategies shard the sequence: blocks get local shards; all else, and captions, are whole."""
        sharded = {"hidden": 1, "cos": 1, "sin": 1, "modulation_index": 1}
        return SequencePlan(
            inputs={"network.trunk": sharded}, outputs={"network.trunk": 1}, num_heads=self.network.config.num_heads
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add how positions are told, and what is predicted."""
        checkpoint["positions"] = self._meanings()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights that learned other positions or outputs, which would load without a word and draw blurs.

        Raises:
            ValueError: If positions were told otherwise, or something else was predicted.
        """
        # Files that do not say what was predicted are from when there was no choice.
        trained, now = {"prediction": "velocity", **checkpoint["positions"]}, self._meanings()
        differing = [f"{name} {trained[name]} (here {now[name]})" for name in now if trained[name] != now[name]]
        if differing:
            raise ValueError(
                f"the checkpoint was trained with {', '.join(differing)}; load it with the settings it was trained "
                "with, and give policies to generate for other sizes"
            )

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Float[Tensor, ""]:
        """Return the loss of a batch, some of whose captions are dropped and first frames shown."""
        key = (self.training_config.seed, self.global_step, batch_idx, data_parallel_rank(self))
        text = self._text(batch)
        dropped = keyed_uniforms((*key, _CAPTIONS), len(text)) < self.training_config.caption_dropout
        text = text.masked_fill(dropped.to(text.device).view(-1, 1, 1), 0)
        known = None
        if self.training_config.first_frame_share > 0:
            known = keyed_uniforms((*key, _FIRST_FRAMES), len(text)) < self.training_config.first_frame_share
        return self._loss(batch, text, known if known is None else known.to(text.device), key, "train")

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log the loss of a batch, with the same times and noise at each validation."""
        self._loss(
            batch, self._text(batch), None, (self.training_config.seed, -1, batch_idx, data_parallel_rank(self)), "val"
        )

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        """Log the loss of a batch."""
        self._loss(
            batch, self._text(batch), None, (self.training_config.seed, -1, batch_idx, data_parallel_rank(self)), "test"
        )

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> UInt8[Tensor, "batch 1 3 frames height width"]:
        """Return one clip per caption of the batch."""
        seed = int(keyed_uniforms((self.training_config.seed, batch_idx, data_parallel_rank(self)), 1) * 2**53)
        return self.generate(batch["caption"], generator=torch.Generator().manual_seed(seed), progress=False)

    def generate(
        self,
        captions: Sequence[str],
        num_candidates: int = 1,
        *,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        policies: Policies | None = None,
        guidance_scale: float = 1.0,
        num_steps: int = 30,
        solver: Solver = "euler",
        first_frame: UInt8[Tensor, "first_frames 3 _height _width"] | None = None,
        generator: torch.Generator | None = None,
        max_batch: int = 32,
        progress: bool = True,
    ) -> UInt8[Tensor, "captions num_candidates 3 frames height width"]:
        """Draw clips of captions; a candidate does not depend on the other captions, nor on `max_batch`.

        Args:
            num_frames: None is the training's; so are `height` and `width`.
            policies: For time, height and width, how positions beyond the trained ones are told: kinds of
                `ops.rotary_scaling`, or its objects. Needed for clips larger than in training.
            guidance_scale: Above 1 clips follow their caption more closely; needs training with `caption_dropout`.
            num_steps: Steps from noise to data; `heun` looks at the network twice in each.
            first_frame: One picture per caption that its clips begin with; needs training with `first_frame_share`.
            generator: Source of the one seed that a call draws; None is torch's global one.
            max_batch: Candidates that are drawn together.
            progress: Show a progress bar, unless a Trainer is running.

        Raises:
            TypeError: If `captions` is one string.
            ValueError: If an argument is out of range.
        """
        sizes = zip((num_frames, height, width), self.training_config.clip_size, strict=True)
        frames, rows, columns = (trained if size is None else size for size, trained in sizes)
        validate_request(captions, num_candidates, max_batch, guidance_scale, self.training_config)
        latent_size = self.autoencoder.latent_grid(frames, rows, columns)
        self.network.token_grid(latent_size, policies)
        first = self._first_latents(first_frame, len(captions), (rows, columns))
        # Drawn before anything that depends on `max_batch`.
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**63 - 1, (), generator=generator, device=device))
        keys = candidate_keys(captions, num_candidates)
        clips = []
        with (
            torch.no_grad(),
            token_progress(len(keys) * num_steps, progress and not self._in_trainer(), "Drawing clips") as advance,
        ):
            text = self._encode_text(captions)
            for chunk in torch.arange(len(keys)).split(max_batch):
                caption_indices = chunk // num_candidates
                shape = (self.network.config.channels, *latent_size)
                latents = sample_latents(
                    self.network,
                    text[caption_indices.to(text.device)],
                    keyed_noise(seed, [keys[index] for index in chunk.tolist()], shape).to(self.device),
                    num_steps=num_steps,
                    solver=solver,
                    shift=self._shift(latent_size),
                    guidance_scale=guidance_scale,
                    policies=policies,
                    first=None if first is None else first[caption_indices.to(first.device)],
                    on_step=partial(advance, len(chunk)),
                )
                clips.append(self.autoencoder.decode(latents))
        return torch.cat(clips).unflatten(0, (len(captions), num_candidates))

    def _loss(
        self, batch: Mapping[str, Any], text: Tensor, known: Tensor | None, key: tuple[int, ...], stage: str
    ) -> Tensor:
        latents = self._latents(batch)
        shifts = torch.tensor([self._shift(clip.shape[1:]) for clip in latents], dtype=torch.float64)
        uniforms = keyed_uniforms((*key, _TIMES), len(shifts))
        times = shift_times(draw_times(uniforms, self.training_config.time_density), shifts)
        loss = flow_matching_loss(
            self.network,
            latents,
            text,
            times.to(self.device, torch.float32),
            known,
            keyed_generator((*key, _NOISE), self.device),
        )
        self.log(f"{stage}/loss", loss, prog_bar=True, batch_size=len(shifts), sync_dist=stage != "train")
        return loss

    def _latents(self, batch: Mapping[str, Any]) -> Tensor | list[Tensor]:
        if "latents" in batch:
            return batch["latents"]
        video = batch["video"]
        with torch.no_grad():
            if isinstance(video, Tensor):
                return self.autoencoder.encode(video)
            return [self.autoencoder.encode(clip.unsqueeze(0)).squeeze(0) for clip in video]

    def _text(self, batch: Mapping[str, Any]) -> Tensor:
        if "text_features" in batch:
            return batch["text_features"]
        return self._encode_text(batch["caption"])

    def _encode_text(self, captions: Sequence[str]) -> Tensor:
        # Captions are whole wherever clips are sharded.
        with sharded_sequences(None):
            return self.text_encoder.encode(list(captions))

    def _first_latents(self, picture: Tensor | None, num_captions: int, size: tuple[int, int]) -> Tensor | None:
        if picture is None:
            return None
        check_first_frame(picture, num_captions, size, self.network.config.patch_size, self.training_config)
        with torch.no_grad():
            return self.autoencoder.encode(picture.unsqueeze(2).to(self.device))

    def _shift(self, latent_size: Sequence[int]) -> float:
        base = math.prod(self.autoencoder.latent_grid(*self.training_config.clip_size))
        return resolution_shift(math.prod(latent_size), base, self.training_config.shift)

    def _meanings(self) -> dict[str, Any]:
        config = self.network.config
        return {**dataclasses.asdict(config.rotary), "patch_size": config.patch_size, "prediction": config.prediction}

    def _in_trainer(self) -> bool:
        return self._trainer is not None and self._trainer.state.status == TrainerStatus.RUNNING
