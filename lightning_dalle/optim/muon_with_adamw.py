"""Muon for the matrices inside a network, AdamW for the rest."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer

from lightning_dalle.optim.joined_optimizer import JoinedOptimizer


def muon_with_adamw(
    matrices: Sequence[tuple[str, Parameter]], others: Optimizer, weight_decay: float
) -> JoinedOptimizer:
    """Join torch's Muon (Jordan et al. 2024) with an AdamW of torch or of this package, whose learning rate it takes.

    Its steps are as large as AdamW's usually are (Liu et al. 2025, arXiv 2502.16982, section 2.2), so that one learning
    rate fits both.

    Args:
        matrices: With their names; of the layers inside, without embeddings and unembeddings.
        others: Of all other parameters, with names too.

    Raises:
        ValueError: If a matrix is sharded: Muon needs whole ones.
    """
    sharded = [name for name, parameter in matrices if isinstance(parameter, DTensor)]
    if sharded:
        raise ValueError(
            f"optimizer ('muon') needs whole matrices, but {sharded[0]} is sharded; choose optimizer 'adamw'"
        )
    muon = torch.optim.Muon(
        matrices, lr=others.defaults["lr"], weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return JoinedOptimizer(muon, others)
