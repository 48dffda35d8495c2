"""The parts around a video diffusion transformer, and whether they fit together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.configuration import as_config, load_tokenizer
from lightning_dalle.lightning_modules.video_autoencoder_module import VideoAutoencoderModule
from lightning_dalle.lightning_modules.video_dit_training import VideoDiTTrainingConfig
from lightning_dalle.models.text_encoders import TextEncoder, TextTower, TextTowerConfig
from lightning_dalle.models.video_autoencoder import (
    CausalVideoAutoencoder,
    CausalVideoAutoencoderConfig,
    PixelAutoencoder,
    VideoAutoencoder,
)
from lightning_dalle.models.video_dit import VideoDiTConfig
from lightning_dalle.ops.patchify import token_grid

# The command line takes the first that fits, and a class to build is a mapping, too.
AutoencoderSource = VideoAutoencoder | CausalVideoAutoencoderConfig | Mapping[str, Any] | str | Path | None


class CaptionEncoder(nn.Module):
    """Default text encoder: a `CaptionTokenizer` and a small `TextTower`.

    Raises:
        ValueError: If the tower has no room for the tokenizer's words.
    """

    def __init__(self, config: TextTowerConfig, tokenizer: CaptionTokenizer) -> None:
        super().__init__()
        if tokenizer.vocabulary_size > config.vocabulary_size:
            raise ValueError(
                f"vocabulary_size ({config.vocabulary_size}) must be at least the tokenizer's "
                f"({tokenizer.vocabulary_size}); raise it or train a smaller tokenizer"
            )
        self.tokenizer = tokenizer
        self.tower = TextTower(config)

    @property
    def text_width(self) -> int:
        """Features of a token."""
        return self.tower.config.width

    def encode(self, captions: Sequence[str]) -> Float[Tensor, "captions text text_width"]:
        """Return the features of captions, with gradients."""
        tokens = self.tokenizer.encode(captions, self.tower.config.text_tokens)
        return self.tower(tokens.to(self.tower.embedding.weight.device))


def frozen_autoencoder(source: AutoencoderSource) -> VideoAutoencoder:
    """Return the autoencoder of a checkpoint, of given sizes, or the given one, without gradients; pixels for None.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        TypeError: If it lacks a method.
        ValueError: If the checkpoint is another's.
    """
    if source is None:
        return PixelAutoencoder()
    if isinstance(source, str | Path):
        autoencoder: VideoAutoencoder = _read_autoencoder(source)
    elif isinstance(source, CausalVideoAutoencoderConfig | Mapping):
        autoencoder = CausalVideoAutoencoder(as_config(CausalVideoAutoencoderConfig, source, "autoencoder"))
    else:
        autoencoder = source
    if not isinstance(autoencoder, VideoAutoencoder):
        raise TypeError(
            f"autoencoder ({type(autoencoder).__name__}) must have the methods of a VideoAutoencoder, or be the path "
            "of a checkpoint of a VideoAutoencoderModule"
        )
    # It keeps the mode of the rest: Lightning warns where modes differ.
    return autoencoder.requires_grad_(False) if isinstance(autoencoder, nn.Module) else autoencoder


def _read_autoencoder(path: str | Path) -> CausalVideoAutoencoder:
    wanted = f"autoencoder ({str(path)!r}) must be a checkpoint of a VideoAutoencoderModule"
    try:
        return VideoAutoencoderModule.load_from_checkpoint(path, map_location="cpu", weights_only=True).network
    except FileNotFoundError:
        raise FileNotFoundError(f"{wanted}, and does not exist") from None
    # Whatever files of others lack, or hold that is no tensor.
    except (AttributeError, KeyError, RuntimeError, TypeError, UnpicklingError, ValueError) as error:
        raise ValueError(f"{wanted}: {error}") from error


def build_text_encoder(
    source: TextTowerConfig | TextEncoder | Mapping[str, Any], tokenizer: str | Path | None
) -> TextEncoder:
    """Return a small encoder of the given sizes, or the given encoder.

    Raises:
        TypeError: If the encoder lacks a method.
        ValueError: If a tokenizer is missing, or has no use.
    """
    if isinstance(source, TextTowerConfig | Mapping):
        config = as_config(TextTowerConfig, source, "text_encoder")
        if tokenizer is None:
            raise ValueError("tokenizer must be a file for the small text encoder; see `lightning-dalle tokenizer`")
        return CaptionEncoder(config, load_tokenizer(tokenizer))
    if not isinstance(source, TextEncoder):
        raise TypeError(
            f"text_encoder ({type(source).__name__}) must be a TextTowerConfig, a mapping of its fields, or have the "
            "methods of a TextEncoder"
        )
    if tokenizer is not None:
        raise ValueError(f"tokenizer ({tokenizer}) has no use for an encoder of your own; leave it out")
    return source


def validate_agreement(
    network: VideoDiTConfig, training: VideoDiTTrainingConfig, text_encoder: TextEncoder, autoencoder: VideoAutoencoder
) -> None:
    """Refuse parts that do not fit together.

    Raises:
        ValueError: If channels, text features or grid differ, or first frames cannot be told from the rest.
    """
    if network.channels != autoencoder.latent_channels:
        raise ValueError(
            f"channels ({network.channels}) must be those of the autoencoder ({autoencoder.latent_channels})"
        )
    if network.text_width != text_encoder.text_width:
        raise ValueError(
            f"text_width ({network.text_width}) must be that of the text encoder ({text_encoder.text_width})"
        )
    grid = token_grid(autoencoder.latent_grid(*training.clip_size), network.patch_size)
    if grid != network.rotary.original_max_position_embeddings:
        raise ValueError(
            f"original_max_position_embeddings {network.rotary.original_max_position_embeddings} must be {grid}, "
            f"the tokens of clips of clip_size {training.clip_size}"
        )
    if training.first_frame_share > 0 and network.patch_size[0] != 1:
        raise ValueError(
            f"first_frame_share ({training.first_frame_share}) needs tokens of one frame, but patch_size is "
            f"{network.patch_size}"
        )
