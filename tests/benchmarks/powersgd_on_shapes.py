"""Validation loss of the shapes recipe's small transformer on 2 x 2 ranks, with and without compressed gradients.

python -m tests.benchmarks.powersgd_on_shapes --updates 300

Other compressed runs than that of the default, which starts uncompressed and has a warm Q, are named as
`--compressed matrix_approximation_rank=15 matrix_approximation_rank=15,warm_start=true`. At rank 15 a process saves
85 % of the matrices of layers, which is how the paper counts. Of all gradients it saves less, since embeddings and
unembeddings are not compressed, which are much of a small network. The optimizer is AdamW, since Muon needs unsharded
matrices.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_dalle.distributed.powersgd.gradients import PowerSGDGradients
from tests.benchmarks.shapes_transformer import QUIET, prepare, shapes, transformer
from tests.distributed.toy_module import powersgd_strategy
from tests.ranks import run_ranks

RANKS = 4
DEFAULT = "matrix_approximation_rank=15,warm_start=true,start_powersgd_iter=30"


class _Curve(Callback):
    """Prints the validation loss whenever there is one."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            losses = {name: round(float(value), 4) for name, value in trainer.callback_metrics.items() if "val" in name}
            seconds = round(time.perf_counter() - self.start)
            print(self.label, {"update": trainer.global_step, "seconds": seconds, **losses}, flush=True)


def _train_on_rank(
    rank: int, folder: Path, label: str, updates: int, batch_size: int, settings: dict[str, Any]
) -> dict[str, float]:
    os.environ["LOCAL_RANK"] = str(rank)
    module, data = transformer(folder, updates), shapes(folder, batch_size // RANKS)
    strategy = powersgd_strategy(shard_size=2, **settings)
    trainer = Trainer(
        **QUIET,
        devices=RANKS,
        strategy=strategy,
        max_steps=updates,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=updates // 5,
        gradient_clip_val=1.0,
        callbacks=[_Curve(label)],
    )
    trainer.fit(module, data)
    assert isinstance(strategy.gradients, PowerSGDGradients)
    compressor = strategy.gradients.compressor
    sent = sum(matrix.num_sent for matrix in compressor.plan.matrices)
    return {
        "rate of all": compressor.communication.compression_rate,
        "rate of matrices": 1 - sent / sum(matrix.rows * matrix.columns for matrix in compressor.plan.matrices),
    }


def _settings(text: str) -> dict[str, Any]:
    return {name: yaml.safe_load(value) for name, _, value in (pair.partition("=") for pair in text.split(","))}


def main() -> None:
    """Train all and print compression rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    parser.add_argument("--compressed", nargs="*", default=[DEFAULT], help="settings of the strategy, by run")
    parser.add_argument("--without-uncompressed", action="store_true", help="leave out the uncompressed run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        runs: dict[str, dict[str, Any]] = {}
        if not arguments.without_uncompressed:
            runs["uncompressed"] = {"start_powersgd_iter": arguments.updates}
        runs |= {text: _settings(text) for text in arguments.compressed}
        for label, settings in runs.items():
            work = (folder, label, arguments.updates, arguments.batch_size, settings)
            rates = run_ranks(_train_on_rank, RANKS, *work, timeout=7200)[0]
            print(label, {key: round(value, 4) for key, value in rates.items()}, flush=True)


if __name__ == "__main__":
    main()
