"""Online softmax over the tiles of a schedule, forward and backward: one engine for whole and sharded sequences.

A softmax over all keys is merged from softmaxes over some of them, each weighed by its share, which the log-sum-exps
of their scores tell (as in FlashAttention). The backward pass of a tile needs the log-sum-exp of the whole alone. So
tiles come in any order, and keys may arrive while others are computed. Where keys come from is up to the caller: from
the same process (`LocalAttention`), by a ring, or from the neighbours' halo.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dalle.ops.attention.kernels import (
    BlockMask,
    add_shares,
    add_tile_gradients,
    attend_block,
    attend_block_backward,
    merge_weight,
)
from lightning_dalle.ops.attention.patterns import AttentionPattern
from lightning_dalle.ops.attention.schedule import Tiles, whole_schedule
from lightning_dalle.ops.random import dropout_factors

CALL_ELEMENTS = 2**18
"""Elements of the queries that one call takes on the CPU, a megabyte of float32: large results cost more than calls."""
_PRODUCT_QUERIES = 64


@dataclass(frozen=True)
class PositionalDropout:
    """Dropout of attention weights by seed, sample, head and positions in the whole sequence, wherever they lie.

    Args:
        num_heads: Heads of the whole attention.
        first_head: The first of those that this process computes.
    """

    probability: float
    seed: int
    num_heads: int
    first_head: int = 0

    def factors(self, tiles: Tiles, query: Float[Tensor, "batch heads queries head_dim"]) -> Tensor:
        """Return what the attention weights are multiplied with, [tiles, batch, heads, queries, keys]."""
        batch, heads = query.shape[:2]
        samples = torch.arange(batch, device=query.device).view(1, -1, 1, 1, 1)
        in_sample = torch.arange(heads, device=query.device).view(1, 1, -1, 1, 1) + self.first_head
        sequences = samples * self.num_heads + in_sample
        return dropout_factors(self.probability, self.seed, sequences, *tiles.positions(query.device), query.dtype)


class OnlineSoftmax:
    """Attention to the keys seen so far.

    Args:
        query: [batch, heads, queries, head_dim], dense along `head_dim`.
        dtype: Number format of the output so far.

    Attributes:
        output: [batch, heads, queries, head_dim], 0 where no key was seen.
        log_sum_exp: Log sum exp of the scores so far, [batch, heads, queries]; -inf where no key was seen.
    """

    def __init__(self, query: Tensor, dtype: torch.dtype, dropout: PositionalDropout | None) -> None:
        self.query, self.dtype, self.dropout = query, dtype, dropout
        self.output = self.log_sum_exp = query.new_empty(0)
        self._started = self._may_be_empty = False

    def add(self, tiles: Tiles, key: Tensor, value: Tensor) -> None:
        """Attend to the keys of tiles, [batch, key_heads, keys, head_dim] of which they take some."""
        if not self._started and tiles.num_queries == self.query.shape[-2] and tiles.fully_masked is None:
            # One call whose result is kept as it comes.
            keys, values = (_for_each_head(tiles.keys(part), self.query)[0] for part in (key, value))
            output, self.log_sum_exp = attend_block(self.query, keys, values, mask=self._mask_of_one(tiles))
            self.output, self._started = output.to(self.dtype), True
            return
        if not self._started:
            self.output = torch.zeros_like(self.query, dtype=self.dtype, memory_format=torch.contiguous_format)
            single = torch.promote_types(self.dtype, torch.float32)
            self.log_sum_exp = self.output.new_full(self.query.shape[:-1], float("-inf"), dtype=single)
            self._started = self._may_be_empty = True
        queries = tiles.queries(self.query)
        inputs = queries, *(_for_each_head(tiles.keys(part), self.query) for part in (key, value))
        results = tiles.queries(self.output), tiles.queries(self.log_sum_exp, dim=-1)
        for mask, fully_masked, (*parts, output, total) in _calls(tiles, self.query, self.dropout, *inputs, *results):
            part, log_sum_exp = attend_block(*parts, mask=mask)
            if fully_masked is not None:
                # The fused kernel gives 0 for the logarithm of nothing.
                log_sum_exp = log_sum_exp.masked_fill(fully_masked, float("-inf"))
                part = part.masked_fill(fully_masked.unsqueeze(-1), 0)
            # Not -inf, whose difference with itself is not a number.
            before = total.clamp(min=torch.finfo(total.dtype).min) if self._may_be_empty else total
            output.lerp_(part.to(output.dtype), merge_weight(before, log_sum_exp).to(output.dtype))
            total.copy_(torch.logaddexp(total, log_sum_exp))

    def finished(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return output in `dtype` and log-sum-exp after the last key; a query that saw none gets 0 for both."""
        if self._may_be_empty:
            # All scores of a query that sees nothing are -inf: any finite number gives them weight 0.
            self.log_sum_exp.masked_fill_(self.log_sum_exp == float("-inf"), 0)
        return self.output.to(dtype), self.log_sum_exp

    def _mask_of_one(self, tiles: Tiles) -> BlockMask:
        factors = None if self.dropout is None else self.dropout.factors(tiles, self.query)[0]
        return BlockMask(tiles.additive(self.query.dtype), tiles.causal, factors)


@dataclass(frozen=True)
class OnlineSoftmaxBackward:
    """Backward pass of an online softmax: everything that a tile needs beside its keys and values.

    Attributes:
        log_sum_exp: Finite; 0 where a query sees no key at all.
    """

    query: Tensor
    output: Tensor
    log_sum_exp: Tensor
    grad_output: Tensor
    dropout: PositionalDropout | None

    def of_all_queries(self, tiles: Tiles, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, keys and values of one tile that has every query."""
        keys, values = (tiles.keys(part).squeeze(0) for part in (key, value))
        factors = None if self.dropout is None else self.dropout.factors(tiles, self.query)[0]
        mask = BlockMask(tiles.additive(self.query.dtype), tiles.causal, factors)
        inputs = self.grad_output, self.query, keys, values, self.output, self.log_sum_exp
        return attend_block_backward(*inputs, mask=mask)

    def add(self, tiles: Tiles, key: Tensor, value: Tensor, *, gradients: Sequence[Tensor]) -> None:
        """Add the tiles' shares to the gradients of queries, keys and values."""
        if self._is_product(tiles):
            self._add_products(tiles, key, value, *gradients)
        else:
            self._add_blocks(tiles, key, value, *gradients)

    def _is_product(self, tiles: Tiles) -> bool:
        """Return whether batched products are faster than the fused kernel, and as exact.

        | tiles                                      | dropout, 16 bits, CUDA | else     |
        | ------------------------------------------ | ---------------------- | -------- |
        | several, or few queries under one mask     | blocks                 | products |
        | one large, or a mask for each sample       | blocks                 | blocks   |
        """
        of_pattern = tiles.masked is not None and len(tiles.masked) == 1 and tiles.num_queries <= _PRODUCT_QUERIES
        plain = self.dropout is None and self.query.dtype in (torch.float32, torch.float64)
        return (tiles.count > 1 or of_pattern) and plain and self.query.device.type == "cpu"

    def _add_products(
        self, tiles: Tiles, key: Tensor, value: Tensor, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> None:
        """Add shares by products of many small tiles at once."""
        log_sum_exp = tiles.queries(self.log_sum_exp, dim=-1)
        of_queries = [tiles.queries(part) for part in (self.grad_output, self.query, self.output, grad_query)]
        of_keys = tiles.keys(key), tiles.keys(value)
        pieces = *tiles.key_pieces(grad_key), *tiles.key_pieces(grad_value)
        additive = tiles.additive_pairs(self.query)
        group_size = self.query.shape[1] // key.shape[1]
        for member in range(group_size):
            # Query heads that share a key head lie side by side.
            grad_output, query, output, total = (part[:, :, member::group_size] for part in of_queries)
            inputs = grad_output, query, *of_keys, output, log_sum_exp[:, :, member::group_size]
            add_tile_gradients(inputs, (total, *pieces), additive)

    def _add_blocks(
        self, tiles: Tiles, key: Tensor, value: Tensor, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor
    ) -> None:
        """Add shares by one kernel call after another."""
        keys, values = (_for_each_head(tiles.keys(part), self.query) for part in (key, value))
        result = tiles.queries(self.output), tiles.queries(self.log_sum_exp, dim=-1)
        inputs = tiles.queries(self.query), tiles.queries(self.grad_output), keys, values, *result
        totals = tiles.queries(grad_query), *tiles.key_pieces(grad_key), *tiles.key_pieces(grad_value)
        for mask, _, parts in _calls(tiles, self.query, self.dropout, *inputs, *totals):
            query, grad_output, *others = parts[: len(inputs)]
            of_query, *of_keys = attend_block_backward(grad_output, query, *others, mask=mask)
            of_call = parts[len(inputs) :]
            add_shares(of_call, (of_query, *(_by_key_heads(share, of_call[1]) for share in of_keys)))


class LocalAttention(torch.autograd.Function):
    """Attention of [batch, heads, length, head_dim] of one process under a pattern, with dropout by a seed.

    Query, key and value come as three tensors, or stacked in one, whose gradient is one too.
    """

    @staticmethod
    def forward(ctx: Any, pattern: AttentionPattern, dropout: float, seed: int, *inputs: Tensor) -> Tensor:
        """Attend to one batch of tiles after another."""
        inputs = tuple(_dense_in_heads(each) for each in inputs)
        query, key, value = parts_of(inputs)
        ctx.dropout = PositionalDropout(dropout, seed, query.shape[1]) if dropout else None
        ctx.schedule = whole_schedule(pattern, query.device)
        softmax = OnlineSoftmax(query, query.dtype, ctx.dropout)
        for tiles in ctx.schedule:
            softmax.add(tiles, key, value)
        output, log_sum_exp = softmax.finished(query.dtype)
        ctx.save_for_backward(output, log_sum_exp, *inputs)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the tiles' shares; the first tile, which has every query, gives where they start."""
        output, log_sum_exp, *inputs = ctx.saved_tensors
        query, key, value = parts_of(inputs)
        softmax = OnlineSoftmaxBackward(query, output, log_sum_exp, _dense_in_heads(grad_output), ctx.dropout)
        first, *others = ctx.schedule
        gradients = _gradients_of_first(inputs, softmax.of_all_queries(first, key, value))
        for tiles in others:
            softmax.add(tiles, key, value, gradients=parts_of(gradients))
        return None, None, None, *gradients


def parts_of(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, given the three, or the one of which they are views."""
    query, key, value = tensors if len(tensors) == 3 else tensors[0].unbind(0)
    return query, key, value


def accumulator_dtype(tensor: Tensor) -> torch.dtype:
    """Return the number format that sums over keys of several processes are kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _gradients_of_first(inputs: Sequence[Tensor], shares: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of the inputs; the first tile gives that of every query, and of keys and values from 0 on."""
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
    """Return what kernels and tiles take: any strides but along `head_dim`."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _for_each_head(part: Float[Tensor, "tiles batch key_heads keys head_dim"], query: Tensor) -> Tensor:
    """Return the key of each query head; query heads side by side share one."""
    group_size = query.shape[1] // part.shape[2]
    return part if group_size == 1 else part.repeat_interleave(group_size, dim=2)


def _by_key_heads(share: Tensor, total: Tensor) -> Tensor:
    """Return the sum over query heads that share a key head."""
    group_size = share.shape[-3] // total.shape[-3]
    return share if group_size == 1 else share.unflatten(-3, (-1, group_size)).sum(-3, dtype=total.dtype)


def _calls(
    tiles: Tiles, query: Tensor, dropout: PositionalDropout | None, *views: Tensor
) -> Iterator[tuple[BlockMask, Tensor | None, Sequence[Tensor]]]:
    """Yield mask, fully masked queries, and the parts of views [tiles, batch, heads, ...] that one call takes.

    The fused kernel of the CPU has four dimensions: a call takes some of the tiles of a sample, or some of the samples
    of a tile. Other devices take all at once.
    """
    additive, fully_masked = tiles.additive(query.dtype), tiles.fully_masked
    factors = None if dropout is None else dropout.factors(tiles, query)
    if query.device.type != "cpu":
        yield BlockMask(additive, tiles.causal, factors), fully_masked, views
        return
    num_tiles, batch = views[0].shape[:2]
    size = max(1, CALL_ELEMENTS // views[0][0, 0].numel())
    along_batch = num_tiles < batch
    for outer in range(num_tiles if along_batch else batch):
        for start in range(0, batch if along_batch else num_tiles, size):
            some = slice(start, start + size)
            index = (outer, some) if along_batch else (some, outer)
            # A mask for each sample is that of a single tile.
            by_sample = additive is not None and len(additive) > 1
            rows = (some if along_batch else slice(outer, outer + 1)) if by_sample else slice(None)
            mask = BlockMask(
                None if additive is None else additive[rows],
                tiles.causal,
                None if factors is None else factors[index],
            )
            yield mask, None if fully_masked is None else fully_masked[rows], [view[index] for view in views]
