"""The small transformer of the shapes recipe on 2 x 2 ranks: validation loss with whole and with compressed gradients.

    python -m tests.benchmarks.powersgd_on_shapes --updates 400

Both runs see the same batches. The tokens are those of a discrete VAE that is trained for a moment only; what counts
here is the difference between the runs.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_dalle import (
    CaptionedShapes,
    CaptionTokenizer,
    DiscreteVAEConfig,
    DiscreteVAEModule,
    ShardedPowerSGDStrategy,
    SparseTransformerConfig,
    TextToImageModule,
)
from lightning_dalle.lightning_modules.text_to_image_training import TextToImageTraining
from tests.ranks import run_ranks

RANKS = 4
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _train_on_rank(
    rank: int, folder: Path, updates: int, batch_size: int, settings: dict[str, Any]
) -> dict[str, float]:
    os.environ["LOCAL_RANK"] = str(rank)
    seed_everything(0, verbose=False)
    module = TextToImageModule(
        SparseTransformerConfig(
            depth=4,
            num_heads=3,
            head_dim=64,
            text_tokens=12,
            text_vocabulary_size=512,
            grid_height=10,
            grid_width=10,
            image_vocabulary_size=192,
        ),
        TextToImageTraining(learning_rate=2e-3, warmup_updates=20, schedule="cosine", total_updates=updates),
        discrete_vae=folder / "vae.ckpt",
        tokenizer=folder / "tokenizer.json",
    )
    data = CaptionedShapes(
        num_train=50_000,
        num_val=512,
        batch_size=batch_size // RANKS,
        tokenizer=folder / "tokenizer.json",
        text_tokens=12,
        bpe_dropout=0.0,
    )
    strategy = ShardedPowerSGDStrategy(shard_size=2, **settings)
    trainer = Trainer(
        **QUIET, devices=RANKS, strategy=strategy, max_steps=updates, limit_val_batches=0, gradient_clip_val=1.0
    )
    start = time.perf_counter()
    trainer.fit(module, data)
    assert strategy.gradients is not None
    figures = {"rate": strategy.gradients.compressor.traffic.rate, "seconds": time.perf_counter() - start}
    trainer.limit_val_batches = 1.0
    (validated,) = Trainer(**QUIET, devices=RANKS, strategy=ShardedPowerSGDStrategy(shard_size=2)).validate(
        module, data, verbose=False
    )
    return figures | validated


def main() -> None:
    """Train both and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of the compressed runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = CaptionedShapes(num_train=2_000, num_val=64, batch_size=32)
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
        runs: dict[str, dict[str, Any]] = {"whole": {"uncompressed_steps": arguments.updates}}
        runs |= {f"rank {rank}": {"rank": rank} for rank in arguments.ranks}
        for label, settings in runs.items():
            figures = run_ranks(
                _train_on_rank, RANKS, folder, arguments.updates, arguments.batch_size, settings, timeout=7200
            )[0]
            print(label, {key: round(value, 4) for key, value in figures.items()}, flush=True)


if __name__ == "__main__":
    main()
