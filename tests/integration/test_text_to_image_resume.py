"""A text-to-image training that is killed at any step and resumed ends as if nothing had happened."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dalle.data.shapes.data_module import CaptionedShapesDataModule
from lightning_dalle.data.tokenizer import CaptionTokenizer
from lightning_dalle.lightning_modules.text_to_image_module import TextToImageModule

EPOCHS, BATCHES = 3, 5
SAVED_EVERY, KILLED_AT = 3, 8
NETWORK = {
    "depth": 2,
    "num_heads": 2,
    "head_dim": 8,
    "text_tokens": 24,
    "text_vocabulary_size": 300,
    "grid_height": 6,
    "grid_width": 6,
    "image_vocabulary_size": 16,
    "convolution_kernel_size": 3,
}
TRAINING = {
    "optimizer": {"learning_rate": 1e-2},
    "schedule": {"warmup_steps": 3, "plateau_interval": 5},
    "caption_dropout": 0.3,
}
COSINE = {**TRAINING, "schedule": {"name": "cosine", "warmup_steps": 3, "total_steps": EPOCHS * BATCHES}}
DISCRETE_VAE = {"image_size": 24, "codebook_size": 16, "hidden_width": 8, "num_groups": 3, "blocks_per_group": 1}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Curve(Callback):
    """Writes each loss to a file, without rounding, and kills the process if told to."""

    def __init__(self, path: Path, killed_at: int | None = None) -> None:
        self.path, self.killed_at = path, killed_at

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step} {outputs['loss'].item().hex()} {rate.hex()}\n")
        if trainer.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, curve: str, training: dict[str, Any], killed_at: int | None = None, resume_from: Path | None = None
) -> None:
    """Trains from a seed of its own, so that nothing a resumed run needs can come from the global random state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = CaptionTokenizer.train(CaptionedShapesDataModule(num_train=50).captions("train"), vocabulary_size=300)
    tokenizer.save(folder / "tokenizer.json")
    module = TextToImageModule(NETWORK, training, DISCRETE_VAE, folder / "tokenizer.json")
    if resume_from is not None:
        torch.manual_seed(1)
        module.network.reset_parameters()
    data = CaptionedShapesDataModule(
        image_size=24,
        num_train=4 * BATCHES,
        num_val=4,
        batch_size=4,
        tokenizer=folder / "tokenizer.json",
        text_tokens=24,
        bpe_dropout=0.1,
        num_workers=0,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        gradient_clip_val=4.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=SAVED_EVERY),
            Curve(folder / curve, killed_at),
        ],
    )
    trainer.fit(module, data, ckpt_path=resume_from, weights_only=True)
    torch.save(module.state_dict(), folder / f"{curve}.weights")


def _assert_continues(whole: Path, resumed: Path, first_step: int) -> None:
    lines = whole.read_text().splitlines()
    assert len({line.split()[1] for line in lines}) == len(lines) == EPOCHS * BATCHES
    assert resumed.read_text().splitlines() == lines[first_step:]
    expected, weights = torch.load(f"{whole}.weights"), torch.load(f"{resumed}.weights")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_text_to_image_killed_in_mid_epoch_resumes_on_the_same_curve(tmp_path: Path) -> None:
    (tmp_path / "uninterrupted").mkdir()
    train(tmp_path / "uninterrupted", "whole", TRAINING)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=train, args=(tmp_path, "killed", TRAINING, KILLED_AT))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    saved = SAVED_EVERY * (KILLED_AT // SAVED_EVERY)
    train(tmp_path, "resumed", TRAINING, resume_from=tmp_path / "checkpoints" / f"step={saved}.ckpt")

    killed, whole = tmp_path / "killed", tmp_path / "uninterrupted" / "whole"
    assert killed.read_text().splitlines() == whole.read_text().splitlines()[:KILLED_AT]
    _assert_continues(whole, tmp_path / "resumed", saved)


def test_cosine_schedule_resumes_on_the_same_curve(tmp_path: Path) -> None:
    train(tmp_path, "whole", COSINE)
    train(tmp_path, "resumed", COSINE, resume_from=tmp_path / "checkpoints" / f"step={SAVED_EVERY}.ckpt")
    _assert_continues(tmp_path / "whole", tmp_path / "resumed", SAVED_EVERY)
