"""A text-to-image module small enough for unit tests, and batches for it."""

import functools
from typing import Any

import torch

from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule
from lightning_dalle.lightning_modules.text_to_image_training import TextToImageTrainingConfig
from lightning_dalle.models.discrete_vae import DiscreteVAEConfig
from lightning_dalle.models.sparse_transformer import SparseTransformerConfig

VAE = DiscreteVAEConfig(image_size=16, codebook_size=16, hidden_width=8, num_groups=3, blocks_per_group=1)
NETWORK = SparseTransformerConfig(
    depth=3,
    num_heads=2,
    head_dim=8,
    text_tokens=8,
    text_vocabulary_size=280,
    grid_height=4,
    grid_width=4,
    image_vocabulary_size=16,
    convolution_kernel_size=3,
)
TRAINING = TextToImageTrainingConfig(
    optimizer=OptimizerConfig(learning_rate=1e-2, beta2=0.96, weight_decay=4.5e-2),
    schedule=ScheduleConfig(name="cosine", warmup_steps=2, total_steps=30),
    caption_dropout=0.25,
)
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


def tiny_module(std: float | None = None, **changes: Any) -> TextToImageModule:
    """Of `NETWORK`, `TRAINING` and `VAE` but for the changes; with a large `std` tokens depend on the caption."""
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "network": NETWORK,
        "training": TRAINING,
        "discrete_vae": VAE,
        "tokenizer": tokenizer_json(),
    }
    module = TextToImageModule(**{**parts, **changes})
    if std is not None:
        for parameter in module.network.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return module


def images(count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def loader(batches: int) -> torch.utils.data.DataLoader[Any]:
    rows = [{"image": image, "caption": CAPTIONS[0]} for image in images(2 * batches)]
    return torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
