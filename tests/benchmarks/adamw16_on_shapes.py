"""The small transformer of the shapes recipe: validation loss with moments in 32 and in 16 bits.

python -m tests.benchmarks.adamw16_on_shapes --updates 300
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from tests.benchmarks.shapes_transformer import QUIET, prepare, shapes, transformer


def _train(folder: Path, updates: int, batch_size: int, moments: str) -> dict[str, float]:
    module, data = transformer(folder, updates, moments=moments), shapes(folder, batch_size)
    trainer = Trainer(**QUIET, devices=1, max_steps=updates, limit_val_batches=0, gradient_clip_val=1.0)
    start = time.perf_counter()
    trainer.fit(module, data)
    (validated,) = Trainer(**QUIET, devices=1).validate(module, data, verbose=False)
    return {"seconds": time.perf_counter() - start} | validated


def main() -> None:
    """Train both and print the metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for moments in ("32bit", "16bit"):
            metrics = _train(folder, arguments.updates, arguments.batch_size, moments)
            print(moments, {key: round(value, 4) for key, value in metrics.items()}, flush=True)


if __name__ == "__main__":
    main()
