"""Attention over the tiles of a pattern, forward and backward."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dalle.ops.attention.kernels import (
    BlockMask,
    additive_mask,
    attend_block,
    attend_block_backward,
    share_of_second,
)
from lightning_dalle.ops.attention.patterns import (
    CALL_ELEMENTS,
    AttentionPattern,
    AttentionTiles,
    tiles_of,
    window_mask,
    window_reach,
)
from lightning_dalle.ops.random import dropout_factors

# Scores of one product: two buffers of a megabyte in float32.
_SCORES = 2**18
_LOG2_E = 1 / math.log(2)


def add_tile_gradients(
    inputs: Sequence[Float[Tensor, "tiles batch heads ..."]],
    totals: Sequence[Float[Tensor, "tiles batch heads ..."]],
    additive_mask: Float[Tensor, "1 1 queries keys"],
) -> None:
    """Adds the tiles' shares to the gradients of queries, keys and values.

    Args:
        inputs: As of `attend_block_backward`: gradient of the output, query, key, value, output, log-sum-exp.
        totals: What is added to: the gradients of the queries, then those of the keys piece by piece, then those of
            the values in the same way. No view may overlap itself.
        additive_mask: 0 or -inf, for every tile.
    """
    (queries, keys), head_dim = additive_mask.shape[-2:], inputs[0].shape[-1]
    size = max(1, _SCORES // (queries * keys))
    longest = max(range(3), key=lambda dim: inputs[0].shape[dim])
    scale, num_pieces = head_dim**-0.5, len(totals) // 2
    most = min(size, inputs[0].shape[longest])
    shapes = (queries, keys), (queries, keys), (queries, head_dim), (keys, head_dim)
    buffers = [additive_mask.new_empty(most, *shape) for shape in shapes]
    batches = (_batches(view, longest, size) for view in (*inputs, *totals))
    with torch.autocast("cpu", enabled=False):
        for grad_output, query, key, value, output, log_sum_exp, grad_query, *pieces in zip(*batches, strict=True):
            weights, grad_scores, share_of_query, share_of_key = (buffer[: len(query)] for buffer in buffers)
            # Not exp, which is slow where it gives 0.
            torch.sub(additive_mask[0], (log_sum_exp * _LOG2_E).unsqueeze_(-1), out=weights)
            weights.baddbmm_(query, key.mT, alpha=scale * _LOG2_E).exp2_()
            _add(pieces[num_pieces:], torch.bmm(weights.mT, grad_output, out=share_of_key))
            inner = (grad_output * output).sum(-1, keepdim=True)
            torch.bmm(grad_output, value.mT, out=grad_scores).sub_(inner).mul_(weights)
            grad_query.add_(torch.bmm(grad_scores, key, out=share_of_query), alpha=scale)
            _add(pieces[:num_pieces], torch.bmm(grad_scores.mT, query, out=share_of_key), alpha=scale)


def add_shares(totals: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    """Adds gradients of query, key and value to totals in the order of `add_tile_gradients`."""
    num_pieces = len(totals) // 2
    totals[0].add_(shares[0])
    _add(totals[1 : 1 + num_pieces], shares[1])
    _add(totals[1 + num_pieces :], shares[2])


def _add(pieces: Sequence[Tensor], share: Tensor, alpha: float = 1) -> None:
    """Adds rows of `share` to one piece after another."""
    for piece, part in zip(pieces, share.split(pieces[0].shape[-2], dim=-2), strict=True):
        piece.add_(part, alpha=alpha)


def _batches(view: Tensor, longest: int, size: int) -> list[Tensor]:
    """Three dimensions, the first of them `longest` of tiles, batch and heads, of which there are at most `size`."""
    rows = (row for outer in view.movedim(longest, 2).unbind(0) for row in outer.unbind(0))
    return [part for row in rows for part in row.split(size)]


class StructuredAttention(torch.autograd.Function):
    """Attention of [batch, heads, length, head_dim] under a pattern, with dropout by a seed.

    Query, key and value come as three tensors, or stacked in one, whose gradient is one too.
    """

    @staticmethod
    def forward(ctx: Any, pattern: AttentionPattern, dropout: float, seed: int, *inputs: Tensor) -> Tensor:
        """Attends block by block, each weighed by its share of the softmax."""
        ctx.pattern, ctx.dropout, ctx.seed = pattern, dropout, seed
        inputs = tuple(_dense_in_heads(each) for each in inputs)
        query, key, value = parts_of(inputs)
        first, *others = tiles_of(pattern)
        keys, values = (first.keys(part).squeeze(0) for part in (key, value))
        output, log_sum_exp = attend_block(query, keys, values, mask=_mask_of_first(ctx, first, query))
        for tiles in others:
            views = tiles.queries(query), tiles.keys(key), tiles.keys(value)
            totals = tiles.queries(output), tiles.queries(log_sum_exp, dim=-1)
            for mask, (*parts, outputs, total) in _calls(ctx, tiles, *views, *totals):
                part, part_log_sum_exp = attend_block(*parts, mask=mask)
                outputs.lerp_(part, share_of_second(total, part_log_sum_exp).to(part.dtype))
                total.copy_(torch.logaddexp(total, part_log_sum_exp))
        ctx.save_for_backward(output, log_sum_exp, *inputs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Adds up the blocks' shares, each computed with the log-sum-exp of the whole."""
        output, log_sum_exp, *inputs = ctx.saved_tensors
        query, key, value = parts_of(inputs)
        grad_output = _dense_in_heads(grad_output)
        first, *others = tiles_of(ctx.pattern)
        keys, values = (first.keys(part).squeeze(0) for part in (key, value))
        of_first = grad_output, query, keys, values, output, log_sum_exp
        shares = attend_block_backward(*of_first, mask=_mask_of_first(ctx, first, query))
        gradients = _gradients_of_first(inputs, shares)
        grad_query, grad_key, grad_value = parts_of(gradients)
        for tiles in others:
            of_queries = tiles.queries(grad_output), tiles.queries(query)
            of_result = tiles.queries(output), tiles.queries(log_sum_exp, dim=-1)
            views = *of_queries, tiles.keys(key), tiles.keys(value), *of_result
            totals = tiles.queries(grad_query), *tiles.key_pieces(grad_key), *tiles.key_pieces(grad_value)
            if query.device.type == "cpu" and ctx.dropout == 0:
                add_tile_gradients(views, totals, _additive_mask(ctx.pattern, tiles, query))
                continue
            for mask, parts in _calls(ctx, tiles, *views, *totals):
                add_shares(parts[len(views) :], attend_block_backward(*parts[: len(views)], mask=mask))
        return None, None, None, *gradients


def parts_of(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, given the three, or the one of which they are views."""
    query, key, value = tensors if len(tensors) == 3 else tensors[0].unbind(0)
    return query, key, value


def _gradients_of_first(inputs: Sequence[Tensor], shares: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the inputs, of which the first tile gives that of every query, and of keys and values from 0 on."""
    gradients = [torch.empty_like(each) for each in inputs[-2:]]
    if len(inputs) == 3:
        gradients.insert(0, shares[0])
    for total, share in zip(parts_of(gradients), shares, strict=True):
        if total is not share:
            seen, rest = total.tensor_split([share.shape[-2]], dim=-2)
            seen.copy_(share)
            rest.zero_()
    return gradients


def _dense_in_heads(tensor: Tensor) -> Tensor:
    """What kernels and tiles take: any strides but along `head_dim`."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _calls(ctx: Any, tiles: AttentionTiles, *views: Tensor) -> Iterator[tuple[BlockMask, Sequence[Tensor]]]:
    """The masks and the parts of views [tiles, batch, heads, ...] that one call after another takes."""
    queries = views[0]
    mask = _mask(ctx, tiles, queries)
    factors = (_dropout_factors(ctx, tiles, queries),) if ctx.dropout else ()
    size = max(1, CALL_ELEMENTS // queries[0, 0].numel())
    for parts in zip(*(_parts(view, size) for view in (*views, *factors)), strict=True):
        if ctx.dropout:
            mask = replace(mask, dropout_factors=parts[-1])
        yield mask, parts[: len(views)]


def _parts(view: Tensor, size: int) -> list[Tensor]:
    """Four dimensions for the fused kernel, of which the first has at most `size`; other devices take all at once."""
    if view.device.type != "cpu":
        return [view]
    of_tiles = view.unbind(0 if view.shape[0] < view.shape[1] else 1)
    return [part for each in of_tiles for part in each.split(size)]


def _mask_of_first(ctx: Any, first: AttentionTiles, query: Tensor) -> BlockMask:
    """The first tile is one call: all queries, in four dimensions."""
    factors = _dropout_factors(ctx, first, query.unsqueeze(0)).squeeze(0) if ctx.dropout else None
    return replace(_mask(ctx, first, query), dropout_factors=factors)


def _mask(ctx: Any, tiles: AttentionTiles, like: Tensor) -> BlockMask:
    additive = _additive_mask(ctx.pattern, tiles, like) if tiles.shown == "pattern" else None
    return BlockMask(additive, tiles.shown == "causal")


def _dropout_factors(ctx: Any, tiles: AttentionTiles, queries: Tensor) -> Tensor:
    """Factors [tiles, batch, heads, queries, keys]."""
    batch, heads = queries.shape[1:3]
    sequences = torch.arange(batch * heads, device=queries.device).view(1, batch, heads, 1, 1)
    positions = torch.arange(ctx.pattern.length, device=queries.device).view(1, 1, -1, 1)
    pairs = tiles.queries(positions), tiles.keys(positions).mT
    return dropout_factors(ctx.dropout, ctx.seed, sequences, *pairs, queries.dtype)


def _additive_mask(pattern: AttentionPattern, tiles: AttentionTiles, like: Tensor) -> Tensor:
    """What the pattern shows of each of the tiles, [1, 1, queries, keys]."""
    if tiles.shown == "pattern":
        first_key = tiles.key_start + window_reach(pattern) - tiles.query_start
        mask = _additive_window_mask(pattern, like.device, like.dtype)
        return mask[:, :, : tiles.num_queries, first_key : first_key + tiles.num_keys]
    return _additive_causal_mask(tiles.num_queries, like.device, like.dtype)


@lru_cache(maxsize=32)
def _additive_window_mask(pattern: AttentionPattern, device: torch.device, dtype: torch.dtype) -> Tensor:
    mask = additive_mask(window_mask(pattern, device), dtype)
    return mask.view(1, 1, *mask.shape)


@lru_cache(maxsize=32)
def _additive_causal_mask(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    mask = additive_mask(torch.ones(length, length, dtype=torch.bool, device=device).tril_(), dtype)
    return mask.view(1, 1, *mask.shape)
