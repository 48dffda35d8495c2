"""Attention within one block of queries and keys, forward and backward."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_dalle.ops.hardware import product_dtype


@dataclass(frozen=True)
class BlockMask:
    """What scales and hides the scores of a block.

    Args:
        additive: 0 or -inf, added to the scores, in the query's dtype; every query must see a key.
        causal: The block's query i sees its keys 0..i alone.
        dropout_factors: What attention weights are multiplied with after the softmax: 0, or 1 / (1 - dropout).
    """

    additive: Float[Tensor, "#batch #heads queries keys"] | None = None
    causal: bool = False
    dropout_factors: Float[Tensor, "batch heads queries keys"] | None = None


def fused_forward_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """Return the number format in which the fused forward pass is fast.

    On CPUs without instructions for it the kernel reads bfloat16 about as fast as float32, and a copy in float32 would
    cost more than it saves. Its float16, its backward pass and plain products are slow there.
    """
    return dtype if dtype == torch.bfloat16 else product_dtype(dtype, device)


def additive_mask(attends: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """0 where a query attends, else -inf: what the fused kernels take without a conversion per call.

    A mask first built while sampling in inference mode can still be used by a backward pass later.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill_(~attends, float("-inf"))


def attend_block(
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    value: Float[Tensor, "batch heads keys head_dim"],
    *,
    mask: BlockMask,
) -> tuple[Float[Tensor, "batch heads queries head_dim"], Float[Tensor, "batch heads queries"]]:
    """The block's own softmax attention, and the log-sum-exp of its scores.

    Fused on the CPU without dropout, where the tensors may overlap in memory but must be dense along `head_dim`; else
    in plain operations, which were not run on CUDA. On a CPU that multiplies 16 bits slowly it is computed in 32.
    """
    number_format = (fused_forward_dtype if _is_fused(query, mask) else product_dtype)(query.dtype, query.device)
    if number_format != query.dtype:
        wide = (each.to(number_format) for each in (query, key, value))
        with torch.autocast("cpu", enabled=False):
            output, log_sum_exp = attend_block(*wide, mask=_mask_in(mask, number_format))
        return output.to(query.dtype), log_sum_exp
    if _is_fused(query, mask):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, log_sum_exp = fused(query, key, value, 0.0, mask.causal, attn_mask=mask.additive)
        return output, log_sum_exp
    scores = _scores(query, key, mask)
    log_sum_exp = scores.logsumexp(-1)
    weights = _dropped((scores - log_sum_exp.unsqueeze(-1)).exp_(), mask)
    return weights.to(value.dtype) @ value, log_sum_exp


def attend_block_backward(
    grad_output: Float[Tensor, "batch heads queries head_dim"],
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch heads keys head_dim"],
    value: Float[Tensor, "batch heads keys head_dim"],
    output: Float[Tensor, "batch heads queries head_dim"],
    log_sum_exp: Float[Tensor, "batch heads queries"],
    *,
    mask: BlockMask,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's share of the gradients of query, key and value; `output` and `log_sum_exp` are those of the whole."""
    number_format = product_dtype(query.dtype, query.device)
    if number_format != query.dtype:
        wide = (each.to(number_format) for each in (grad_output, query, key, value, output, log_sum_exp))
        with torch.autocast("cpu", enabled=False):
            gradients = attend_block_backward(*wide, mask=_mask_in(mask, number_format))
        grad_query, grad_key, grad_value = (each.to(query.dtype) for each in gradients)
        return grad_query, grad_key, grad_value
    if _is_fused(query, mask):
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        inputs = (grad_output, query, key, value, output, log_sum_exp)
        grad_query, grad_key, grad_value = fused(*inputs, 0.0, mask.causal, attn_mask=mask.additive)
        return grad_query, grad_key, grad_value
    weights = (_scores(query, key, mask) - log_sum_exp.unsqueeze(-1)).exp_()
    grad_weights = _dropped((grad_output @ value.transpose(-1, -2)).to(weights.dtype), mask)
    # The sum over all keys of weight times gradient, dropout included, needs no other block.
    inner = (grad_output * output).sum(-1, keepdim=True, dtype=weights.dtype)
    grad_scores = ((grad_weights - inner) * weights * query.shape[-1] ** -0.5).to(query.dtype)
    grad_value = _dropped(weights, mask).to(value.dtype).transpose(-1, -2) @ grad_output
    return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, grad_value


def share_of_second(first: Float[Tensor, "..."], second: Float[Tensor, "..."]) -> Float[Tensor, "... 1"]:
    """The weight of the second of two blocks in their joint softmax, given the log-sum-exps of both."""
    return (second - first).sigmoid().unsqueeze(-1)


def _is_fused(query: Tensor, mask: BlockMask) -> bool:
    return query.device.type == "cpu" and mask.dropout_factors is None


def _mask_in(mask: BlockMask, dtype: torch.dtype) -> BlockMask:
    return mask if mask.additive is None else replace(mask, additive=mask.additive.to(dtype))


def _scores(query: Tensor, key: Tensor, mask: BlockMask) -> Tensor:
    """Scaled and masked scores, at least in float32."""
    scores = query @ key.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * query.shape[-1] ** -0.5
    if mask.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(hidden, float("-inf"))
    return scores if mask.additive is None else scores + mask.additive


def _dropped(weights: Tensor, mask: BlockMask) -> Tensor:
    return weights if mask.dropout_factors is None else weights * mask.dropout_factors
