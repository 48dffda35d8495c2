"""How the transformers start."""

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
