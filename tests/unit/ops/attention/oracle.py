"""Attention as its definition says, with every score in one matrix."""

import math

import torch

from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from lightning_dalle.ops.random import dropout_factors

KINDS: tuple[PatternKind, ...] = ("row", "column", "convolution", "causal", "full")
DECODABLE_KINDS: tuple[PatternKind, ...] = ("row", "column", "convolution", "causal")

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(
    pattern: AttentionPattern, dtype: torch.dtype = torch.float64, batch: int = 2, heads: int = 3, head_dim: int = 4
) -> Triple:
    """Query, key and value in the layout of a fused projection."""
    torch.manual_seed(0)
    projected = torch.randn(batch, pattern.length, 3, heads, head_dim, dtype=dtype)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: AttentionPattern,
    dropout: float = 0.0,
    dropout_seed: int = 0,
) -> torch.Tensor:
    """A plain softmax under the pattern's mask."""
    batch, heads, length, head_dim = query.shape
    scores = query @ key.transpose(-1, -2) / math.sqrt(head_dim)
    weights = scores.masked_fill(~pattern.mask(), -math.inf).softmax(-1)
    sequences = torch.arange(batch * heads).view(batch, heads, 1, 1)
    positions = torch.arange(length)
    pairs = positions.unsqueeze(1), positions
    return (weights * dropout_factors(dropout, dropout_seed, sequences, *pairs, weights.dtype)) @ value
