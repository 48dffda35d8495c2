"""The same weights on all processes before training, whatever each of them drew."""

import torch
from torch import distributed, nn


@torch.no_grad()
def share_first_weights(module: nn.Module, device: torch.device) -> None:
    """Give all processes the parameters and buffers of the first; all of them must call it.

    Tensors become contiguous, as messages and matrices of gradients need them. Those that are yet to be materialised
    are left alone.

    Args:
        device: Where messages travel, one that the world's backend serves.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_meta:
            continue
        tensor.data = tensor.data.contiguous()
        weights = tensor.detach().to(device)
        distributed.broadcast(weights, 0)
        tensor.copy_(weights)
