"""The small transformer of the shapes recipe with its data, for comparisons of two trainings by their validation loss.

The tokens are those of a discrete VAE that is trained for a moment only: what counts is the difference between runs
that see the same batches. Image tokens are kept, so that nearly all time goes to the transformer.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything

from lightning_dalle import (
    CaptionedShapesDataModule,
    CaptionTokenizer,
    DiscreteVAEConfig,
    DiscreteVAEModule,
    SparseTransformerConfig,
    TextToImageModule,
)
from lightning_dalle.lightning_modules.optimization import OptimizerConfig, ScheduleConfig
from lightning_dalle.lightning_modules.text_to_image_training import TextToImageTrainingConfig

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
NUM_TRAIN = 2_000


def prepare(folder: Path) -> None:
    """Train tokenizer and discrete VAE and keep them in the folder."""
    shapes = CaptionedShapesDataModule(num_train=NUM_TRAIN, num_val=64, batch_size=32)
    CaptionTokenizer.train(shapes.captions("train"), 512).save(folder / "tokenizer.json")
    seed_everything(0, verbose=False)
    config = DiscreteVAEConfig(
        image_size=40,
        codebook_size=192,
        hidden_width=16,
        num_groups=3,
        blocks_per_group=1,
        decoder_input_width=32,
        min_log_scale=-2.0,
        patch_codebook=True,
    )
    trainer = Trainer(**QUIET, max_steps=40, limit_val_batches=0)
    trainer.fit(DiscreteVAEModule(config, {"dequantise": True}), shapes)
    trainer.save_checkpoint(folder / "vae.ckpt", weights_only=True)


def transformer(folder: Path, updates: int, moments: Any = "32bit") -> TextToImageModule:
    """Of the recipe's size, always with the same weights."""
    seed_everything(0, verbose=False)
    network = SparseTransformerConfig(
        depth=4,
        num_heads=3,
        head_dim=64,
        text_tokens=12,
        text_vocabulary_size=512,
        grid_height=10,
        grid_width=10,
        image_vocabulary_size=192,
    )
    settings = TextToImageTrainingConfig(
        optimizer=OptimizerConfig(learning_rate=2e-3, beta2=0.96, weight_decay=4.5e-2, moments=moments),
        schedule=ScheduleConfig(name="cosine", warmup_steps=updates // 20, total_steps=updates),
        kept_image_tokens=2 * NUM_TRAIN,
    )
    return TextToImageModule(network, settings, folder / "vae.ckpt", folder / "tokenizer.json")


def shapes(folder: Path, batch_size: int) -> CaptionedShapesDataModule:
    """Training images, and others for validation."""
    return CaptionedShapesDataModule(
        num_train=NUM_TRAIN,
        num_val=256,
        batch_size=batch_size,
        tokenizer=folder / "tokenizer.json",
        text_tokens=12,
        bpe_dropout=0.0,
    )
