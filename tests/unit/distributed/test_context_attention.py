"""Attention of a process alone: what it refuses, and grouped heads."""

import pytest
import torch

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from lightning_dalle.distributed.context_parallel.mask import SequenceMask
from tests.distributed.sequences import LENGTH, MASKS, inputs, plain_attention


@pytest.mark.parametrize("name", sorted(MASKS))
def test_a_process_alone_computes_plain_attention(name: str) -> None:
    tensors = inputs(4, 2)
    query, key, value = (tensor.clone().requires_grad_() for tensor in tensors[:3])
    output = ContextAttention(SequenceLayout(LENGTH, 1), MASKS[name])(query, key, value)
    results = [output, *torch.autograd.grad(output, (query, key, value), tensors[3])]
    torch.testing.assert_close(results, plain_attention(MASKS[name], tensors), rtol=0, atol=1e-13)


def test_plan_is_made_once() -> None:
    attention = ContextAttention(SequenceLayout(LENGTH, 1), MASKS["row"])
    first = attention(*inputs(2, 2)[:3])
    assert torch.equal(attention(*inputs(2, 2)[:3]), first)
    assert len(attention._plans) == 1


def test_what_does_not_fit_is_refused() -> None:
    layout, mask = SequenceLayout(8, 1), SequenceMask()
    attention = ContextAttention(layout, mask)
    query, key = torch.zeros(1, 4, 8, 2), torch.zeros(1, 3, 8, 2)
    with pytest.raises(ValueError, match="query has 4 heads, which must be a multiple of the key's 3"):
        attention(query, key, key)
    with pytest.raises(ValueError, match=r"query has 4 positions, but this rank holds 8; cut the sequence with layout"):
        attention(*[query[:, :, :4]] * 3)
    with pytest.raises(ValueError, match=r"dropout \(1\) must be in \[0, 1\)"):
        attention(query, query, query, dropout=1)
    with pytest.raises(ValueError, match="layout has 2 ranks, but ring_group has 1 and ulysses_group 1"):
        ContextAttention(SequenceLayout(8, 2), mask)
    with pytest.raises(ValueError, match=f"document_ids has {LENGTH} positions, but the sequence has length 8"):
        ContextAttention(layout, MASKS["document_ids"])
