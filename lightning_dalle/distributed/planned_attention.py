"""Attention of the queries of one process to the keys of one, block by block, forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dalle.distributed.attention_plan import PlannedBlock
from lightning_dalle.ops.attention_dropout import dropout_factors
from lightning_dalle.ops.block_attention import BlockMask, attend_block, attend_block_backward, share_of_second


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

    def factors(self, block: PlannedBlock, query: Tensor) -> Tensor:
        """What the attention weights of a block are multiplied with."""
        batch, heads = query.shape[:2]
        device = query.device
        samples = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        sequences = samples * self.num_heads + torch.arange(heads, device=device).view(-1, 1, 1) + self.first_head
        queries = torch.arange(block.queries.start, block.queries.stop, device=device).unsqueeze(-1)
        keys = torch.arange(block.keys.start, block.keys.stop, device=device)
        return dropout_factors(self.probability, self.seed, sequences, queries, keys, query.dtype)


@dataclass(frozen=True)
class RunningSoftmax:
    """Attention to the keys seen so far, at least in single precision.

    Attributes:
        output: [batch, heads, queries, head_dim].
        log_sum_exp: Of the scores so far, [batch, heads, queries]; -inf where no key was seen.
    """

    output: Tensor
    log_sum_exp: Tensor

    @classmethod
    def empty(cls, query: Tensor) -> "RunningSoftmax":
        """Before the first key."""
        output = torch.zeros_like(query, dtype=accumulator_dtype(query))
        return cls(output, output.new_full(query.shape[:-1], float("-inf")))

    def add(self, block: PlannedBlock, query: Tensor, pair: Tensor, dropout: PositionalDropout | None) -> None:
        """Attends to the keys of a block.

        Args:
            pair: Keys and values, [2, batch, key_heads, keys, head_dim].
        """
        queries = block.of_queries(query)
        key, value = _for_each_head(block.of_keys(pair), query)
        part, part_log_sum_exp = attend_block(queries, key, value, mask=_mask(block, queries, dropout))
        if block.blind is not None:
            # The fused kernel gives 0 for the logarithm of nothing.
            part_log_sum_exp = part_log_sum_exp.masked_fill(block.blind, float("-inf"))
            part = part.masked_fill(block.blind.unsqueeze(-1), 0)
        output, total = block.of_queries(self.output), block.of_queries(self.log_sum_exp, dim=-1)
        # Not -inf, whose difference with itself is not a number.
        share = share_of_second(total.clamp(min=torch.finfo(total.dtype).min), part_log_sum_exp)
        output.lerp_(part.to(output.dtype), share.to(output.dtype))
        total.copy_(torch.logaddexp(total, part_log_sum_exp))


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

    def backward(
        self, blocks: Sequence[PlannedBlock], pair: Tensor, grad_query: Tensor, dropout: PositionalDropout | None
    ) -> Tensor:
        """Adds the blocks' share to the gradient of the queries, and gives that of the pair of keys and values."""
        grad_pair = torch.zeros_like(pair, dtype=accumulator_dtype(pair))
        for block in blocks:
            queries = block.of_queries(self.query)
            key, value = _for_each_head(block.of_keys(pair), self.query)
            results = block.of_queries(self.output), block.of_queries(self.log_sum_exp, dim=-1)
            inputs = (block.of_queries(self.grad_output), queries, key, value, *results)
            shares = attend_block_backward(*inputs, mask=_mask(block, queries, dropout))
            block.of_queries(grad_query).add_(shares[0])
            for total, share in zip(block.of_keys(grad_pair), shares[1:], strict=True):
                # Query heads that share a key head lie side by side.
                total.add_(share.unflatten(1, (total.shape[1], -1)).sum(2, dtype=total.dtype))
        return grad_pair


def accumulator_dtype(tensor: Tensor) -> torch.dtype:
    """What sums over blocks are kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _for_each_head(pair: Tensor, query: Tensor) -> Tensor:
    groups = query.shape[1] // pair.shape[2]
    return pair if groups == 1 else pair.repeat_interleave(groups, dim=2)


def _mask(block: PlannedBlock, queries: Tensor, dropout: PositionalDropout | None) -> BlockMask:
    additive = None
    if block.hidden is not None:
        additive = queries.new_zeros(block.hidden.shape).masked_fill_(block.hidden, float("-inf"))
    return BlockMask(additive, block.causal, None if dropout is None else dropout.factors(block, queries))
