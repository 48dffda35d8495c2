"""Attention that computes only what a pattern shows: the text block once, then tiles of the image grid.

Every block is attended by itself and joined to the others by its log-sum-exp, in one autograd function. It keeps what a
fused dense kernel keeps: query, key, value, output and log-sum-exp.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dalle.ops.attention_dropout import dropout_factors
from lightning_dalle.ops.attention_pattern import AttentionPattern
from lightning_dalle.ops.attention_tiles import AttentionTiles, tiles_of, window_mask
from lightning_dalle.ops.block_attention import (
    BlockMask,
    additive_mask,
    attend_block,
    attend_block_backward,
    share_of_second,
)


class StructuredAttention(torch.autograd.Function):
    """Attention of [batch, heads, length, head_dim] under a pattern, with dropout by a seed."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern, dropout: float, seed: int
    ) -> Tensor:
        """Attends block by block, each weighed by its share of the softmax."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        ctx.pattern, ctx.dropout, ctx.seed = pattern, dropout, seed
        first, *others = tiles_of(pattern)
        output, log_sum_exp = (part.squeeze(0) for part in _attend_tiles(ctx, first, query, key, value))
        for tiles in others:
            part, part_log_sum_exp = _attend_tiles(ctx, tiles, query, key, value)
            total = tiles.queries(log_sum_exp, dim=-1)
            tiles.queries(output).lerp_(part, share_of_second(total, part_log_sum_exp).to(part.dtype))
            total.copy_(torch.logaddexp(total, part_log_sum_exp))
        # Batch and heads of contiguous tensors fold into one dimension.
        ctx.save_for_backward(query, key, value, output, log_sum_exp.contiguous())
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Adds up the blocks' shares, each computed with the log-sum-exp of the whole."""
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        saved = (grad_output.contiguous(), query, key, value, output.contiguous(), log_sum_exp)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        first, *others = tiles_of(ctx.pattern)
        grad_query = _backward_tiles(ctx, first, saved, grad_key, grad_value).squeeze(0)
        for tiles in others:
            tiles.queries(grad_query).add_(_backward_tiles(ctx, tiles, saved, grad_key, grad_value))
        return grad_query, grad_key, grad_value, None, None, None


def _attend_tiles(ctx: Any, tiles: AttentionTiles, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Each tile's own attention and log-sum-exp, tiles first."""
    inputs = (_fold(part) for part in (tiles.queries(query), tiles.keys(key), tiles.keys(value)))
    output, log_sum_exp = attend_block(*inputs, mask=_mask(ctx, tiles, query))
    return _unfold(output, tiles, query), _unfold(log_sum_exp, tiles, query)


def _backward_tiles(
    ctx: Any, tiles: AttentionTiles, saved: tuple[Tensor, ...], grad_key: Tensor, grad_value: Tensor
) -> Tensor:
    """Adds the tiles' shares to the gradients of all keys and values, and gives those of their queries, tiles first."""
    grad_output, query, key, value, output, log_sum_exp = saved
    of_queries = (tiles.queries(grad_output), tiles.queries(query))
    of_result = (tiles.queries(output), tiles.queries(log_sum_exp, dim=-1))
    inputs = (_fold(part) for part in (*of_queries, tiles.keys(key), tiles.keys(value), *of_result))
    shares = attend_block_backward(*inputs, mask=_mask(ctx, tiles, query))
    grad_queries, grad_keys, grad_values = (_unfold(share, tiles, query) for share in shares)
    tiles.add_to_keys(grad_key, grad_keys)
    tiles.add_to_keys(grad_value, grad_values)
    return grad_queries


def _fold(tiles: Tensor) -> Tensor:
    """[tiles, batch, heads, ...] as the four dimensions of a kernel; of contiguous tensors it is a view."""
    return tiles.squeeze(0) if len(tiles) == 1 else tiles.flatten(1, 2)


def _unfold(folded: Tensor, tiles: AttentionTiles, like: Tensor) -> Tensor:
    return folded.unsqueeze(0) if tiles.count == 1 else folded.unflatten(1, like.shape[:2])


def _mask(ctx: Any, tiles: AttentionTiles, query: Tensor) -> BlockMask:
    additive = _additive_mask(ctx.pattern, tiles, query) if tiles.shown == "pattern" else None
    causal = tiles.shown == "causal"
    if ctx.dropout == 0:
        return BlockMask(additive, causal)
    batch, heads, length, _ = query.shape
    sequences = torch.arange(batch * heads, device=query.device).view(1, batch, heads, 1, 1)
    positions = torch.arange(length, device=query.device).view(1, 1, length, 1)
    pairs = tiles.queries(positions), tiles.keys(positions).mT
    return BlockMask(additive, causal, _fold(dropout_factors(ctx.dropout, ctx.seed, sequences, *pairs, query.dtype)))


def _additive_mask(pattern: AttentionPattern, tiles: AttentionTiles, like: Tensor) -> Tensor:
    first_key = tiles.key_start + pattern.reach - tiles.query_start
    mask = _additive_window_mask(pattern, like.device, like.dtype)
    return mask[:, :, : tiles.num_queries, first_key : first_key + tiles.num_keys]


@lru_cache(maxsize=32)
def _additive_window_mask(pattern: AttentionPattern, device: torch.device, dtype: torch.dtype) -> Tensor:
    mask = additive_mask(window_mask(pattern, device), dtype)
    return mask.view(1, 1, *mask.shape)
