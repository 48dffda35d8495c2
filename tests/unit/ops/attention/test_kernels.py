"""Blocks merged by their log-sum-exps against one softmax, and plain operations against the fused kernel."""

import pytest
import torch

from lightning_dalle.ops import hardware
from lightning_dalle.ops.attention.kernels import BlockMask, attend_block, attend_block_backward, merge_weight

QUERIES, KEYS = 7, 5


def _tensors(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 4, dtype=torch.float64, generator=generator) for length in lengths]


def _additive() -> torch.Tensor:
    masked_pairs = torch.rand(1, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.4
    masked_pairs[..., 0] = False
    return torch.zeros(masked_pairs.shape, dtype=torch.float64).masked_fill_(masked_pairs, float("-inf"))


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
    merged = parts[0][0].lerp(parts[1][0], merge_weight(parts[0][1], parts[1][1]))
    torch.testing.assert_close(merged, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.logaddexp(parts[0][1], parts[1][1]), log_sum_exp, atol=1e-12, rtol=0)
    expected = attend_block_backward(grad_output, query, key, value, whole, log_sum_exp, mask=BlockMask())
    shares = [
        attend_block_backward(grad_output, query, key[:, :, h], value[:, :, h], whole, log_sum_exp, mask=BlockMask())
        for h in halves
    ]
    merged_gradients = shares[0][0] + shares[1][0], *(torch.cat([shares[0][i], shares[1][i]], 2) for i in (1, 2))
    torch.testing.assert_close(merged_gradients, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", ["additive", "dropout"])
def test_where_16_bits_are_slow_a_block_is_that_of_float32_rounded_once(
    monkeypatch: pytest.MonkeyPatch, masked: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(hardware, "_cpu_multiplies_fast", lambda dtype: False)
    query, key, value, grad_output = low = [tensor.to(dtype) for tensor in _tensors(QUERIES, KEYS, KEYS, QUERIES)]
    wide_query, wide_key, wide_value, wide_grad_output = (tensor.float() for tensor in low)
    mask, wide_mask = BlockMask(_additive().to(dtype)), BlockMask(_additive().float())
    if masked == "dropout":
        kept = torch.rand(2, 3, QUERIES, KEYS, generator=torch.Generator().manual_seed(2)) < 0.5
        mask = wide_mask = BlockMask(dropout_factors=2.0 * kept)
    expected, log_sum_exp = attend_block(wide_query, wide_key, wide_value, mask=wide_mask)
    with torch.autocast("cpu", dtype):
        output, _ = attend_block(query, key, value, mask=mask)
        gradients = attend_block_backward(grad_output, query, key, value, output, log_sum_exp, mask=mask)
    # The fused kernel's forward pass alone is fast in bfloat16 on any CPU.
    is_wide = masked == "dropout" or dtype == torch.float16
    assert torch.equal(output, expected.to(dtype)) == is_wide
    of_whole = output.float(), log_sum_exp
    shares = attend_block_backward(wide_grad_output, wide_query, wide_key, wide_value, *of_whole, mask=wide_mask)
    torch.testing.assert_close(gradients, tuple(share.to(dtype) for share in shares), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_16_bits_are_fast_a_block_is_computed_in_them(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(hardware, "_cpu_multiplies_fast", lambda dtype: True)
    query, key, value = low = [tensor.to(dtype) for tensor in _tensors(QUERIES, KEYS, KEYS)]
    wide_query, wide_key, wide_value = (tensor.float() for tensor in low)
    output, log_sum_exp = attend_block(query, key, value, mask=BlockMask())
    assert not torch.equal(output, attend_block(wide_query, wide_key, wide_value, mask=BlockMask())[0].to(dtype))
    gradient = attend_block_backward(output, query, key, value, output, log_sum_exp, mask=BlockMask())[0]
    wide = output.float()
    share = attend_block_backward(wide, wide_query, wide_key, wide_value, wide, log_sum_exp, mask=BlockMask())[0]
    assert not torch.equal(gradient, share.to(dtype))
