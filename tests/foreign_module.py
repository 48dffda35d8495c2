"""Somebody else's LightningModule: it shares nothing with the package but the method that the callbacks ask for."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
}
LIGHTNING_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Found . module.s. in eval mode at the start of training"),
]
CAPTIONS = ["dark", "grey", "light", "dark", "grey", "light"]


class Painter(LightningModule):
    """Paints noisy images around one grey level, which it learns; captions make them darker or lighter."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.5))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()
        self.learning_rate = learning_rate
        self.calls: list[dict[str, Any]] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return (self.dropout(batch["image"] / 255) - self.level).square().mean()

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        pass

    test_step = validation_step

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> int:
        return batch_idx

    def generate(
        self,
        captions: Sequence[str],
        num_candidates: int = 1,
        *,
        generator: torch.Generator | None = None,
        contrast: float = 0.3,
    ) -> Tensor:
        torch.rand(7)
        self.calls.append({"captions": list(captions), "level": self.level.item(), "training": self.training})
        noise = torch.rand(len(captions), num_candidates, 3, 8, 8, generator=generator, device=self.device)
        offsets = torch.tensor([{"dark": -0.3, "light": 0.3}.get(caption, 0.0) for caption in captions])
        levels = self.level + offsets.to(self.device).view(-1, 1, 1, 1, 1)
        return ((levels + contrast * (noise - 0.5)).clamp(0, 1) * 255).round().to(torch.uint8)


class Filmer(Painter):
    """Paints clips that flicker with the contrast."""

    def generate(self, captions: Sequence[str], num_candidates: int = 1, **options: Any) -> Tensor:
        frames = [super(Filmer, self).generate(captions, num_candidates, **options) for _ in range(3)]
        return torch.stack(frames, dim=3)


class MeanColour(nn.Module):
    """Three features of an image."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float().mean(dim=(2, 3))


class Brightness:
    """A scorer that likes light images; the caption counts for nothing."""

    def __init__(self) -> None:
        self.captions: list[str] = []

    def score(self, images: Tensor, captions: Sequence[str]) -> Tensor:
        self.captions += captions
        return images.double().mean(dim=(1, 2, 3)).unsqueeze(1).expand(-1, len(captions))


def painted_images(num_images: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_images, 3, 8, 8), generator=generator, dtype=torch.uint8)


def painted_loader(num_images: int = 6, batch_size: int = 2) -> DataLoader[Any]:
    data: Any = [
        {"image": image, "caption": CAPTIONS[number % len(CAPTIONS)]}
        for number, image in enumerate(painted_images(num_images))
    ]
    return DataLoader(data, batch_size=batch_size)


def filmed_clips(num_clips: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_clips, 3, 3, 8, 8), generator=generator, dtype=torch.uint8)


def filmed_loader(num_clips: int = 6, batch_size: int = 2) -> DataLoader[Any]:
    data: Any = [
        {"video": clip, "caption": CAPTIONS[number % len(CAPTIONS)]}
        for number, clip in enumerate(filmed_clips(num_clips))
    ]
    return DataLoader(data, batch_size=batch_size)


def fit(painter: LightningModule, callbacks: list[Any], **options: Any) -> Trainer:
    """Trains on three batches an epoch, with a validation after each."""
    settings = {**QUIET, "max_epochs": 1, "callbacks": callbacks, **options}
    trainer = Trainer(**settings)
    trainer.fit(painter, painted_loader(), painted_loader())
    return trainer
