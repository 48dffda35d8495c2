"""Trains the toy on two processes, for whoever starts it; as a program it keeps the parameters in the named file."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.distributed.toy_module import Toy, batches, powersgd_strategy, trainer_of, whole_state

NUM_BATCHES = 3
FULL_RANK: dict[str, Any] = {"shard_size": 1, "matrix_approximation_rank": 99, "min_compression_rate": 0.0}


class LaunchedToy(Toy):
    """Learns only in `fit` which rank it is."""

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(NUM_BATCHES, self.global_rank, self.trainer.world_size, torch.float64)

    val_dataloader = train_dataloader


def main() -> None:
    module = LaunchedToy(depth=1)
    trainer = trainer_of(2, powersgd_strategy(**FULL_RANK))
    trainer.fit(module)
    state = whole_state(module)
    if trainer.is_global_zero:
        torch.save(state, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
