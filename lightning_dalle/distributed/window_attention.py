"""Exact attention of a pattern of limited reach: each process needs the text and little of the image of others.

What a ring would carry past all processes goes straight to those that see it, while they compute what they see of their
own. Backward the keys come again, and their gradients go home while the rest is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dalle.distributed.key_exchange import KeyExchange
from lightning_dalle.distributed.planned_attention import (
    AttentionResult,
    PositionalDropout,
    RunningSoftmax,
    accumulator_dtype,
)
from lightning_dalle.distributed.window_plan import WindowPlan


class WindowAttention(torch.autograd.Function):
    """Attention of [batch, heads, local, head_dim] to the keys that a plan says.

    Keeps what a fused kernel keeps of the local part: query, key, value, output and log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        exchange: KeyExchange,
        plan: WindowPlan,
        dropout: PositionalDropout | None,
    ) -> Tensor:
        """Joins the tiles by their log-sum-exps."""
        query, traffic = query.contiguous(), exchange.ring.traffic
        pair = torch.stack([key, value])
        softmax = RunningSoftmax.empty(query)
        fetched = exchange.fetch(pair)
        with traffic.computing():
            for tiles in (*plan.inner[0], *plan.inner[1]):
                softmax.add(tiles, query, pair, dropout)
        border = fetched.wait()
        with traffic.computing():
            for tiles in plan.outer:
                softmax.add(tiles, query, border, dropout)
        output, log_sum_exp = softmax.finished(query.dtype)
        ctx.exchange, ctx.plan, ctx.dropout = exchange, plan, dropout
        ctx.save_for_backward(query, pair, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Computes each tile's share with the log-sum-exp of the whole."""
        query, pair, output, log_sum_exp = ctx.saved_tensors
        exchange, plan, traffic = ctx.exchange, ctx.plan, ctx.exchange.ring.traffic
        fetched = exchange.fetch(pair)
        result = AttentionResult(query, output, log_sum_exp, grad_output.contiguous(), ctx.dropout)
        with traffic.computing():
            grad_query, grad_pair = (torch.zeros_like(each, dtype=accumulator_dtype(each)) for each in (query, pair))
            result.add_gradients(plan.inner[0], pair, grad_query, grad_pair)
        border = fetched.wait()
        with traffic.computing():
            grad_border = torch.zeros_like(border, dtype=grad_pair.dtype)
            result.add_gradients(plan.outer, border, grad_query, grad_border)
        brought_home = exchange.bring_home(grad_border, grad_pair)
        with traffic.computing():
            result.add_gradients(plan.inner[1], pair, grad_query, grad_pair)
        brought_home.add_to(grad_pair)
        grad_key, grad_value = grad_pair.to(pair.dtype).unbind(0)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None
