"""Attention of a process alone on a device, against the CPU; all of it is skipped where there is no CUDA."""

import os

import pytest
import torch

from lightning_dalle.distributed.context_parallel.attention import ContextAttention
from lightning_dalle.distributed.context_parallel.layout import SequenceLayout
from tests.distributed.sequences import LENGTH, MASKS, inputs, plain_attention

# Another device can be named to try the tests themselves where there is no CUDA.
DEVICE = os.environ.get("LIGHTNING_DALLE_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["causal", "row", "padding_in_front"])
def test_a_device_computes_what_the_cpu_does(name: str) -> None:
    tensors = inputs(4, 2)
    query, key, value = (tensor.to(DEVICE).requires_grad_() for tensor in tensors[:3])
    output = ContextAttention(SequenceLayout(LENGTH, 1), MASKS[name])(query, key, value)
    results = [output, *torch.autograd.grad(output, (query, key, value), tensors[3].to(DEVICE))]
    for mine, expected in zip(results, plain_attention(MASKS[name], tensors), strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=0, atol=1e-12)
