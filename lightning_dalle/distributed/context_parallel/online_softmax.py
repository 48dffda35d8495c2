"""Online softmax over the blocks of a schedule."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dalle.distributed.context_parallel.schedule import PlannedBlock, PlannedTiles
from lightning_dalle.ops.attention.kernels import (
    BlockMask,
    additive_mask,
    attend_block,
    attend_block_backward,
    share_of_second,
)
from lightning_dalle.ops.attention.structured import add_shares, add_tile_gradients
from lightning_dalle.ops.random import dropout_factors

Planned = PlannedBlock | PlannedTiles
"""What is computed in one call."""


@dataclass(frozen=True)
class PositionalDropout:
    """Dropout of attention weights by seed, sample, head and positions in the whole sequence, wherever they lie.

    Args:
        num_heads: Of the whole attention.
        first_head: The first of those that this process computes.
    """

    probability: float
    seed: int
    num_heads: int
    first_head: int = 0

    def factors(self, block: Planned, query: Tensor) -> Tensor:
        """What the attention weights of a block are multiplied with; `query` is that of all blocks."""
        batch, heads = query.shape[:2]
        device = query.device
        samples = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        sequences = samples * self.num_heads + torch.arange(heads, device=device).view(-1, 1, 1) + self.first_head
        pairs = block.positions(device)
        return dropout_factors(self.probability, self.seed, block.of_sequences(sequences), *pairs, query.dtype)


@dataclass(frozen=True)
class OnlineSoftmax:
    """Attention to the keys seen so far, at least in single precision.

    Attributes:
        output: [batch, heads, queries, head_dim].
        log_sum_exp: Of the scores so far, [batch, heads, queries]; -inf where no key was seen.
    """

    output: Tensor
    log_sum_exp: Tensor

    @classmethod
    def empty(cls, query: Tensor) -> "OnlineSoftmax":
        """Before the first key."""
        output = torch.zeros_like(query, dtype=accumulator_dtype(query))
        return cls(output, output.new_full(query.shape[:-1], float("-inf")))

    def add(self, block: Planned, query: Tensor, pair: Tensor, dropout: PositionalDropout | None) -> None:
        """Attends to the keys of a block.

        Args:
            pair: Keys and values, [2, batch, key_heads, keys, head_dim].
        """
        queries = block.of_queries(query)
        keys, values = _for_each_head(block.of_keys(pair), queries)
        results = block.of_queries(self.output), block.of_queries(self.log_sum_exp, dim=-1)
        for mask, (*inputs, output, total) in _calls(block, query, dropout, queries, keys, values, *results):
            part, part_log_sum_exp = attend_block(*inputs, mask=mask)
            if block.blind is not None:
                # The fused kernel gives 0 for the logarithm of nothing.
                part_log_sum_exp = part_log_sum_exp.masked_fill(block.blind, float("-inf"))
                part = part.masked_fill(block.blind.unsqueeze(-1), 0)
            # Not -inf, whose difference with itself is not a number.
            share = share_of_second(total.clamp(min=torch.finfo(total.dtype).min), part_log_sum_exp)
            output.lerp_(part.to(output.dtype), share.to(output.dtype))
            total.copy_(torch.logaddexp(total, part_log_sum_exp))

    def finished(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output in `dtype` and log-sum-exp after the last key; a query that saw none gets 0 for both."""
        # All scores of a query that sees nothing are -inf: any finite number gives them weight 0.
        log_sum_exp = self.log_sum_exp.masked_fill_(self.log_sum_exp == float("-inf"), 0)
        return self.output.to(dtype), log_sum_exp


@dataclass(frozen=True)
class AttentionResult:
    """What a backward pass needs beside keys and values; all of the whole softmax.

    Attributes:
        log_sum_exp: Finite; 0 where a query sees no key at all.
    """

    query: Tensor
    output: Tensor
    log_sum_exp: Tensor
    grad_output: Tensor
    dropout: PositionalDropout | None

    def add_gradients(self, blocks: Iterable[Planned], pair: Tensor, grad_query: Tensor, grad_pair: Tensor) -> None:
        """Adds the blocks' shares to the gradients of the queries, and of a pair of keys and values."""
        for block in blocks:
            if isinstance(block, PlannedTiles) and self._is_product(block):
                self._add_products(block, pair, grad_query, grad_pair)
            else:
                self._add_fused(block, pair, grad_query, grad_pair)

    def _is_product(self, block: PlannedTiles) -> bool:
        """Whether batched products are faster than the fused kernel, and as exact."""
        small = block.tiles.count > 1 or block.hidden is not None
        plain = self.dropout is None and self.query.dtype in (torch.float32, torch.float64)
        return small and plain and self.query.device.type == "cpu"

    def _add_products(self, block: PlannedTiles, pair: Tensor, grad_query: Tensor, grad_pair: Tensor) -> None:
        tiles, groups = block.tiles, self.query.shape[1] // pair.shape[2]
        for_queries = (self.grad_output, self.query, self.output, grad_query)
        log_sum_exp = tiles.queries(self.log_sum_exp, dim=-1)
        pieces = [piece for total in grad_pair for piece in tiles.key_pieces(total)]
        mask = block.additive_mask(self.query)
        for member in range(groups):
            # Query heads that share a key head lie side by side.
            heads = (slice(None), slice(None), slice(member, None, groups))
            grad_output, query, output, total = (tiles.queries(tensor)[heads] for tensor in for_queries)
            inputs = grad_output, query, *map(tiles.keys, pair), output, log_sum_exp[heads]
            add_tile_gradients(inputs, (total, *pieces), mask)

    def _add_fused(self, block: Planned, pair: Tensor, grad_query: Tensor, grad_pair: Tensor) -> None:
        queries = block.of_queries(self.query)
        keys, values = _for_each_head(block.of_keys(pair), queries)
        result = block.of_queries(self.output), block.of_queries(self.log_sum_exp, dim=-1)
        inputs = block.of_queries(self.grad_output), queries, keys, values, *result
        pieces = [piece for total in grad_pair for piece in block.key_pieces(total)]
        views = *inputs, block.of_queries(grad_query), *pieces
        for mask, parts in _calls(block, self.query, self.dropout, *views):
            of_query, *of_keys = attend_block_backward(*parts[: len(inputs)], mask=mask)
            totals = parts[len(inputs) :]
            add_shares(totals, (of_query, *(_by_key_heads(share, totals[1]) for share in of_keys)))


def accumulator_dtype(tensor: Tensor) -> torch.dtype:
    """What sums over blocks are kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _for_each_head(pair: Tensor, queries: Tensor) -> Tensor:
    groups = queries.shape[1] // pair.shape[2]
    return pair if groups == 1 else pair.repeat_interleave(groups, dim=2)


def _by_key_heads(share: Tensor, total: Tensor) -> Tensor:
    """The sum over query heads that share a key head, which lie side by side."""
    groups = share.shape[1] // total.shape[1]
    return share if groups == 1 else share.unflatten(1, (-1, groups)).sum(2, dtype=total.dtype)


def _calls(
    block: Planned, query: Tensor, dropout: PositionalDropout | None, *views: Tensor
) -> Iterator[tuple[BlockMask, list[Tensor]]]:
    """The masks and the parts of views, queries first, that one call after another takes."""
    additive = None if block.hidden is None else additive_mask(~block.hidden, query.dtype)
    factors = None if dropout is None else dropout.factors(block, query)
    size = block.call_size(views[0])
    for start in range(0, len(views[0]), size):
        some = slice(start, start + size)
        mask = BlockMask(additive, block.causal, None if factors is None else factors[some])
        yield mask, [view[some] for view in views]
