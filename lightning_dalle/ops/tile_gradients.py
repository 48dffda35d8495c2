"""Gradients of many small tiles of attention on the CPU, in batched products of views and in buffers that are reused.

The fused kernel takes longer: it fills fresh memory with every call, and leaves it to another pass to add up what
belongs to the same keys.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

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
