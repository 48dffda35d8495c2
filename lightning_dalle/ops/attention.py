"""The one entry point of attention: every model calls `attend` for a whole sequence, a `KeyValueCache` to decode."""

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.ops.attention_pattern import AttentionPattern
from lightning_dalle.ops.block_attention import additive_mask
from lightning_dalle.ops.packed_segments import PackedSegments
from lightning_dalle.ops.sequence_cut import current_cut
from lightning_dalle.ops.structured_attention import StructuredAttention

MASKED_LENGTH = 192
"""Sequences up to this length are attended in one call under a mask, which is faster there than several small calls."""


def attend(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    value: Float[Tensor, "batch heads keys head_dim"],
    pattern: AttentionPattern | PackedSegments,
    *,
    dropout: float = 0.0,
    dropout_seed: int = 0,
) -> Float[Tensor, "batch heads queries head_dim"]:
    """Softmax attention of a whole sequence under `pattern`, scores scaled by `head_dim ** -0.5`.

    Within `sequences_cut`, of this process's positions to those of all processes; `pattern` is still that of the whole.
    Text and image keys share one softmax (paper, section 2.2). Of all but short sequences, only what the pattern
    shows is computed, and no score or mask of the whole is built. Gradients flow once: they cannot be differentiated
    again.

    Args:
        dropout: Probability that an attention weight is dropped after the softmax; the rest grows by 1 / (1 - dropout).
        dropout_seed: Decides, with the positions in batch, head and sequence alone, which weights are dropped.

    Raises:
        ValueError: If the sequence does not have the pattern's length, or `dropout` is no probability below 1, or
            wanted of packed segments, which have none.
    """
    if isinstance(pattern, PackedSegments) and dropout != 0:
        raise ValueError(f"dropout ({dropout}) must be 0 for packed segments, which have none")
    if current_cut() is None:
        _check_lengths(query, key, pattern)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout ({dropout}) must be in [0, 1)")
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.requires_grad:
        # The fused CPU kernel's backward is slower in bf16 than in fp32.
        with torch.autocast("cpu", enabled=False):
            inputs = query.float(), key.float(), value.float()
            return _attend(*inputs, pattern, dropout, dropout_seed).to(query.dtype)
    return _attend(query, key, value, pattern, dropout, dropout_seed)


def _check_lengths(query: Tensor, key: Tensor, pattern: AttentionPattern | PackedSegments) -> None:
    if isinstance(pattern, PackedSegments):
        pattern.check_lengths(query.shape[-2], key.shape[-2])
    elif query.shape[-2] != pattern.length:
        raise ValueError(
            f"query has {query.shape[-2]} positions, but the pattern has {pattern.length} "
            f"(text_length {pattern.text_length} + {pattern.height} x {pattern.width}); "
            "use pattern.with_height for a prefix"
        )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: AttentionPattern | PackedSegments,
    dropout: float,
    dropout_seed: int,
) -> Tensor:
    cut = current_cut()
    if cut is not None:
        return cut.attend(query, key, value, pattern, dropout, dropout_seed)
    if isinstance(pattern, PackedSegments):
        return pattern.attend(query, key, value)
    if (pattern.kind in ("full", "causal") or pattern.height == 0) and dropout == 0:
        # torch's fused kernels skip the future themselves.
        return scaled_dot_product_attention(query, key, value, is_causal=pattern.kind != "full")
    if pattern.length <= MASKED_LENGTH and dropout == 0:
        mask = _additive_mask(pattern, query.device, query.dtype)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask)
    attended: Tensor = StructuredAttention.apply(query, key, value, pattern, dropout, dropout_seed)
    return attended


@lru_cache(maxsize=32)
def _additive_mask(pattern: AttentionPattern, device: torch.device, dtype: torch.dtype) -> Tensor:
    return additive_mask(pattern.mask(device), dtype)
