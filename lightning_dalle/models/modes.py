"""Initial weights of linear layers, and modules put into evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@torch.no_grad()
def draw_normal_weights(network: nn.Module) -> None:
    """Draw N(0, 0.02) weights of embeddings and linear layers; biases become 0, norms plain."""
    for module in network.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode without gradients, and every part of it back into its own mode afterwards.

    ``module.train()`` would not do: it also wakes the parts that are kept frozen in evaluation mode.

    Example:
        >>> layer = nn.Dropout()
        >>> with evaluation_mode(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
