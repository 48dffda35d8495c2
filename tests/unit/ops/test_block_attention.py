"""Blocks joined by their log-sum-exps against one softmax, and plain operations against the fused kernel."""

import pytest
import torch

from lightning_dalle.ops.block_attention import BlockMask, attend_block, attend_block_backward, share_of_second

QUERIES, KEYS = 7, 5


def _tensors(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 4, dtype=torch.float64, generator=generator) for length in lengths]


def _additive() -> torch.Tensor:
    hidden = torch.rand(1, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.4
    hidden[..., 0] = False
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill_(hidden, float("-inf"))


@pytest.mark.parametrize("masked", ["additive", "causal", "not"])
def test_plain_operations_equal_the_fused_kernel(masked: str) -> None:
    additive, causal = (_additive() if masked == "additive" else None), masked == "causal"
    fused = BlockMask(additive, causal)
    # Factors of 1 change nothing but the way of computation.
    plain = BlockMask(additive, causal, torch.ones(2, 3, QUERIES, KEYS, dtype=torch.float64))
    query, key, value, grad_output = _tensors(QUERIES, KEYS, KEYS, QUERIES)
    results = [attend_block(query, key, value, mask=mask) for mask in (fused, plain)]
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=0)
    # Output and log-sum-exp of a larger softmax that the block is part of.
    output, log_sum_exp = results[0][0] * 0.5, results[0][1] + 1
    gradients = [
        attend_block_backward(grad_output, query, key, value, output, log_sum_exp, mask=mask) for mask in (fused, plain)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-12, rtol=0)


def test_two_blocks_make_one_softmax_forward_and_backward() -> None:
    query, key, value, grad_output = _tensors(QUERIES, 9, 9, QUERIES)
    whole, log_sum_exp = attend_block(query, key, value, mask=BlockMask())
    halves = slice(0, 4), slice(4, 9)
    parts = [attend_block(query, key[:, :, half], value[:, :, half], mask=BlockMask()) for half in halves]
    joined = parts[0][0].lerp(parts[1][0], share_of_second(parts[0][1], parts[1][1]))
    torch.testing.assert_close(joined, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.logaddexp(parts[0][1], parts[1][1]), log_sum_exp, atol=1e-12, rtol=0)
    expected = attend_block_backward(grad_output, query, key, value, whole, log_sum_exp, mask=BlockMask())
    shares = [
        attend_block_backward(grad_output, query, key[:, :, h], value[:, :, h], whole, log_sum_exp, mask=BlockMask())
        for h in halves
    ]
    joined_gradients = shares[0][0] + shares[1][0], *(torch.cat([shares[0][i], shares[1][i]], 2) for i in (1, 2))
    torch.testing.assert_close(joined_gradients, expected, atol=1e-12, rtol=0)
