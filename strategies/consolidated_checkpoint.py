"""One file of a checkpoint that is a folder of shards."""

import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint


def consolidate_checkpoint(folder: str | Path, file: str | Path) -> None:
    """Write the file that `load_from_checkpoint` reads on one device, from a folder that a sharded strategy wrote.

    Needs no process group and as much memory as the file has bytes. Optimizer states come along; the residual of
    compressed gradients, which only training in several machines has a use for, does not.

    Raises:
        FileNotFoundError: If the folder is no such checkpoint.
    """
    folder = Path(folder)
    if not (folder / "meta.pt").is_file():
        raise FileNotFoundError(f"folder ({folder}) must be a checkpoint of shards, with a file meta.pt, and is none")
    checkpoint: dict[str, Any] = _load_distributed_checkpoint(folder)
    # Lightning's name for each is optimizer_0, optimizer_1 and so on.
    num_optimizers = sum(re.fullmatch(r"optimizer_\d+", name) is not None for name in checkpoint)
    states = [checkpoint.pop(f"optimizer_{number}") for number in range(num_optimizers)]
    torch.save({**checkpoint, "optimizer_states": states}, file)
