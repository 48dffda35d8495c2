"""A video module small enough for unit tests, and batches for it."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.lightning_modules.video_dit_module import VideoDiTModule
from lightning_dalle.lightning_modules.video_dit_training import VideoDiTTrainingConfig
from lightning_dalle.models.text_encoders import TextTowerConfig
from lightning_dalle.models.video_dit import VideoDiTConfig
from lightning_dalle.ops.rope import RotaryGridConfig

NETWORK = VideoDiTConfig(
    depth=2,
    num_heads=2,
    head_dim=16,
    feed_forward_width=64,
    channels=3,
    patch_size=(1, 4, 4),
    text_width=16,
    time_features=16,
    rotary=RotaryGridConfig(original_max_position_embeddings=(4, 2, 2)),
)
TRAINING = VideoDiTTrainingConfig(
    clip_size=(4, 8, 8),
    optimizer=OptimizerConfig(learning_rate=1e-2, beta2=0.99),
    schedule=ScheduleConfig(warmup_steps=2),
    caption_dropout=0.25,
    first_frame_share=0.5,
)
TEXT = TextTowerConfig(depth=1, num_heads=1, head_dim=16, text_tokens=8, vocabulary_size=280)
CAPTIONS = ["a red diamond", "a blue square", "two green stars"]
TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@functools.cache
def tokenizer_json() -> str:
    return CaptionTokenizer.train(CAPTIONS, vocabulary_size=280).to_json()


def tiny_module(std: float | None = None, **changes: Any) -> VideoDiTModule:
    """Of `NETWORK`, `TRAINING` and `TEXT` but for the changes; with a large `std` clips depend on the caption."""
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "network": NETWORK,
        "training": TRAINING,
        "text_encoder": TEXT,
        "tokenizer": tokenizer_json(),
    }
    module = VideoDiTModule(**{**parts, **changes})
    if std is not None:
        for parameter in module.network.parameters():
            nn.init.normal_(parameter, std=std)
    return module


class LengthEncoder(nn.Module):
    """A foreign text encoder: the length of each caption, times learned numbers."""

    text_width = 16

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def encode(self, captions: list[str]) -> Tensor:
        lengths = torch.tensor([len(caption) for caption in captions], dtype=torch.float32)
        return lengths.view(-1, 1, 1) / 10 * self.scale


class HalvingAutoencoder(nn.Module):
    """A foreign autoencoder that halves height and width."""

    latent_channels = 12

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def latent_grid(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        if height % 2 or width % 2:
            raise ValueError(f"height ({height}) and width ({width}) must be even")
        return frames, height // 2, width // 2

    def encode(self, video: Tensor) -> Tensor:
        frames = video.transpose(1, 2).float() / 127.5 - 1
        return nn.functional.pixel_unshuffle(frames, 2).transpose(1, 2) * self.scale

    def decode(self, latents: Tensor) -> Tensor:
        frames = nn.functional.pixel_shuffle(latents.transpose(1, 2) / self.scale, 2).transpose(1, 2)
        return ((frames + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def clips(count: int = 3, size: tuple[int, int, int] = (4, 8, 8)) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator)


def loader(batches: int) -> torch.utils.data.DataLoader[Any]:
    rows = [{"video": clip, "caption": CAPTIONS[index % 3]} for index, clip in enumerate(clips(2 * batches))]
    return torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
