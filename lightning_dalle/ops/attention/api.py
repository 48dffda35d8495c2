"""Attention of whole or sharded sequences, by one entry point."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_dalle.ops.attention.kernels import additive_mask, fused_forward_dtype
from lightning_dalle.ops.attention.online_softmax import LocalAttention, parts_of
from lightning_dalle.ops.attention.packing import PackedSegments
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.sharded_sequence import current_shard

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

    Within `sharded_sequences`, of the positions of this process to those of all; `pattern` is still that of the whole.
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
    return _attend((query, key, value), pattern, dropout, dropout_seed)


def attend_projected(
    query_key_value: Float[Tensor, "batch length parts heads head_dim"],
    pattern: AttentionPattern | PackedSegments,
    *,
    dropout: float = 0.0,
    dropout_seed: int = 0,
) -> Float[Tensor, "batch heads length head_dim"]:
    """`attend` of the three parts of one projection, whose gradient is written into one block where it is structured.

    Of parts that were taken before, autograd has to copy three gradients into a fourth tensor of the size of all.

    Args:
        query_key_value: What a linear layer gives, unflattened: parts 0, 1 and 2 are query, key and value.
        dropout: As for `attend`, like all else.

    Raises:
        ValueError: If there are not three parts, or as for `attend`.
    """
    if query_key_value.dim() != 5 or query_key_value.shape[2] != 3:
        raise ValueError(
            f"query_key_value has shape {tuple(query_key_value.shape)}; it must be [batch, length, 3, heads, head_dim]"
        )
    return _attend((query_key_value.permute(2, 0, 3, 1, 4),), pattern, dropout, dropout_seed)


def _attend(
    inputs: Sequence[Tensor], pattern: AttentionPattern | PackedSegments, dropout: float, dropout_seed: int
) -> Tensor:
    """Attend from query, key and value, or from the one tensor in which they are stacked."""
    if isinstance(pattern, PackedSegments) and dropout != 0:
        raise ValueError(f"dropout ({dropout}) must be 0 for packed segments, which have none")
    if current_shard() is None:
        _check_lengths(inputs, pattern)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout ({dropout}) must be in [0, 1)")
    first = inputs[0]
    number_format = _number_format(first)
    if number_format == first.dtype:
        return _attend_in_type(inputs, pattern, dropout, dropout_seed)
    with torch.autocast("cpu", enabled=False):
        wide = [each.to(number_format) for each in inputs]
        return _attend_in_type(wide, pattern, dropout, dropout_seed).to(first.dtype)


def _number_format(tensor: Tensor) -> torch.dtype:
    """Return the format in which attention is computed, whatever autocast or the caller chose for its inputs."""
    if tensor.device.type == "cpu" and tensor.requires_grad and tensor.dtype in (torch.bfloat16, torch.float16):
        # The fused CPU kernel's backward is slower in 16 bits than in 32, on CPUs with instructions for them too.
        return torch.float32
    # Keys are sent in their own format; the process that computes with them widens it.
    return tensor.dtype if current_shard() is not None else fused_forward_dtype(tensor.dtype, tensor.device)


def _check_lengths(inputs: Sequence[Tensor], pattern: AttentionPattern | PackedSegments) -> None:
    length = inputs[0].shape[-2]
    if isinstance(pattern, PackedSegments):
        pattern.check_lengths(length, inputs[-1].shape[-2])
    elif length != pattern.length:
        raise ValueError(
            f"{'query' if len(inputs) == 3 else 'query_key_value'} has {length} positions, but the pattern has "
            f"{pattern.length} (text_length {pattern.text_length} + {pattern.height} x {pattern.width}); "
            "use pattern.with_height for a prefix"
        )


def _attend_in_type(
    inputs: Sequence[Tensor], pattern: AttentionPattern | PackedSegments, dropout: float, dropout_seed: int
) -> Tensor:
    shard = current_shard()
    if shard is not None:
        return shard.attend(*parts_of(inputs), pattern, dropout, dropout_seed)
    if isinstance(pattern, PackedSegments):
        return pattern.attend(*parts_of(inputs))
    if (pattern.kind in ("full", "causal") or pattern.height == 0) and dropout == 0:
        # torch's fused kernels skip the future themselves.
        return scaled_dot_product_attention(*parts_of(inputs), is_causal=pattern.kind != "full")
    if pattern.length <= MASKED_LENGTH and dropout == 0:
        mask = _additive_mask(pattern, inputs[0].device, inputs[0].dtype)
        return scaled_dot_product_attention(*parts_of(inputs), attn_mask=mask)
    attended: Tensor = LocalAttention.apply(pattern, dropout, dropout_seed, *inputs)
    return attended


@lru_cache(maxsize=32)
def _additive_mask(pattern: AttentionPattern, device: torch.device, dtype: torch.dtype) -> Tensor:
    return additive_mask(pattern.mask(device), dtype)
