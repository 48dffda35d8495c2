"""Rows of all ranks on every rank."""

import torch
from jaxtyping import Shaped
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.functional import pad


def gather_rows(trainer: Trainer, rows: Shaped[Tensor, "rows width"]) -> Shaped[Tensor, "all_rows width"]:
    """Return the rows of rank 0, then those of rank 1 and so on; all ranks must call it.

    Ranks may have different numbers of rows; one without any may bring [0, 0].
    """
    if trainer.world_size == 1:
        return rows
    shape = torch.tensor(rows.shape, device=rows.device)
    shapes = trainer.strategy.all_gather(shape)
    most_rows, width = shapes.max(dim=0).values.tolist()
    # Collectives take equal sizes only.
    padded = pad(rows, (0, width - rows.shape[1], 0, most_rows - rows.shape[0]))
    gathered = trainer.strategy.all_gather(padded)
    return torch.cat([part[:count] for part, count in zip(gathered, shapes[:, 0].tolist(), strict=True)])
