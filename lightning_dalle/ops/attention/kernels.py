"""Attention within one tile of queries and keys, or many small ones, forward and backward."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightning_dalle.ops.hardware import product_dtype

# Scores of one product: two buffers of a megabyte in float32.
_SCORES = 2**18
_LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class BlockMask:
    """Mask of the scores of a tile, and factors of its weights.

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
    """Return the block's own softmax attention, and the log-sum-exp of its scores.

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
    """Return a tile's share of the gradients of query, key and value; `output` and `log_sum_exp` are of the whole."""
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


def merge_weight(first: Float[Tensor, "..."], second: Float[Tensor, "..."]) -> Float[Tensor, "... 1"]:
    """Return the weight of the second of two tiles in their common softmax, given the log-sum-exps of both."""
    return (second - first).sigmoid().unsqueeze(-1)


def add_tile_gradients(
    inputs: Sequence[Float[Tensor, "tiles batch heads ..."]],
    totals: Sequence[Float[Tensor, "tiles batch heads ..."]],
    additive_mask: Float[Tensor, "1 1 queries keys"],
) -> None:
    """Add the gradients of many small tiles by batched products, some tiles at a time in buffers that are reused.

    With scores S = scale Q K^T + mask of a tile, weights W = exp(S - log-sum-exp of all keys), output O and its
    gradient dO of the whole,

        dV += W^T dO        dS = W * (dO V^T - rowsum(dO * O))        dQ += scale dS K        dK += scale dS^T Q

    as in FlashAttention (Dao et al. 2022, appendix B.2).

    Args:
        inputs: As of `attend_block_backward`: gradient of the output, query, key, value, output, log-sum-exp.
        totals: Gradients that are added to: of the queries, then of the keys piece by piece, then of the values in the
            same way. No view may overlap itself.
        additive_mask: 0 or -inf, for every tile.
    """
    (queries, keys), head_dim = additive_mask.shape[-2:], inputs[0].shape[-1]
    scale, num_pieces = head_dim**-0.5, len(totals) // 2
    # 1. Batches of at most so many tiles, along the longest of tiles, samples and heads.
    size = max(1, _SCORES // (queries * keys))
    longest = max(range(3), key=lambda dim: inputs[0].shape[dim])
    batches = zip(*(_batches(view, longest, size) for view in (*inputs, *totals)), strict=True)
    # 2. Buffers for the largest batch.
    most = min(size, inputs[0].shape[longest])
    shapes = (queries, keys), (queries, keys), (queries, head_dim), (keys, head_dim)
    buffers = [additive_mask.new_empty(most, *shape) for shape in shapes]
    with torch.autocast("cpu", enabled=False):
        for grad_output, query, key, value, output, log_sum_exp, grad_query, *grad_pieces in batches:
            grad_keys, grad_values = grad_pieces[:num_pieces], grad_pieces[num_pieces:]
            weights, grad_scores, share_of_query, share_of_key = (buffer[: len(query)] for buffer in buffers)
            # 3. W, as powers of 2: exp is slow where it gives 0.
            torch.sub(additive_mask[0], (log_sum_exp * _LOG2_E).unsqueeze_(-1), out=weights)
            weights.baddbmm_(query, key.mT, alpha=scale * _LOG2_E).exp2_()
            # 4. dV.
            _add(grad_values, torch.bmm(weights.mT, grad_output, out=share_of_key))
            # 5. dS.
            row_sums = (grad_output * output).sum(-1, keepdim=True)
            torch.bmm(grad_output, value.mT, out=grad_scores).sub_(row_sums).mul_(weights)
            # 6. dQ and dK.
            grad_query.add_(torch.bmm(grad_scores, key, out=share_of_query), alpha=scale)
            _add(grad_keys, torch.bmm(grad_scores.mT, query, out=share_of_key), alpha=scale)


def add_shares(totals: Sequence[Tensor], shares: Sequence[Tensor]) -> None:
    """Add gradients of query, key and value to totals in the order of `add_tile_gradients`."""
    num_pieces = len(totals) // 2
    totals[0].add_(shares[0])
    _add(totals[1 : 1 + num_pieces], shares[1])
    _add(totals[1 + num_pieces :], shares[2])


def _add(pieces: Sequence[Tensor], share: Tensor, alpha: float = 1) -> None:
    """Add rows of `share` to one piece after another."""
    for piece, part in zip(pieces, share.split(pieces[0].shape[-2], dim=-2), strict=True):
        piece.add_(part, alpha=alpha)


def _batches(view: Tensor, longest: int, size: int) -> list[Tensor]:
    """Three dimensions, the first of them `longest` of tiles, batch and heads, of which there are at most `size`."""
    rows = (row for outer in view.movedim(longest, 2).unbind(0) for row in outer.unbind(0))
    return [part for row in rows for part in row.split(size)]


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
