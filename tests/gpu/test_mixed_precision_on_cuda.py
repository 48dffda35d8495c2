"""Sixteen-bit formats, AdamW16 and scaled blocks on a CUDA device; all of it is skipped where there is none."""

import copy
import os

import pytest
import torch
from torch import nn

from lightning_dalle.ops.float_formats import FLOAT_0_6_10, FLOAT_1_6_9, SixteenBitFormat, decode, encode
from lightning_dalle.optim import AdamW16
from lightning_dalle.plugins.block_hooks import BlockHooks
from tests.unit.plugins.residual_network import ResidualNetwork

# Another device can be named to try the tests themselves where there is no CUDA.
DEVICE = os.environ.get("LIGHTNING_DALLE_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("float_format", [FLOAT_1_6_9, FLOAT_0_6_10], ids=["1-6-9", "0-6-10"])
def test_formats_are_those_of_the_cpu(float_format: SixteenBitFormat) -> None:
    codes = torch.arange(-(2**15), 2**15).to(torch.int16)
    values = decode(codes, float_format)
    on_device = decode(codes.to(DEVICE), float_format).cpu()
    torch.testing.assert_close(on_device, values, rtol=0, atol=0, equal_nan=True)
    finite = torch.randn(100_000) * torch.exp2(torch.randint(-75, 6, (100_000,)).float())
    assert torch.equal(encode(finite.to(DEVICE), float_format).cpu(), encode(finite, float_format))


def test_adamw16_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    here = nn.Parameter(torch.randn(300, 70))
    there = nn.Parameter(here.detach().to(DEVICE, copy=True))
    optimizers = [AdamW16([parameter], betas=(0.9, 0.96)) for parameter in (here, there)]
    for _ in range(5):
        here.grad = torch.randn(300, 70)
        there.grad = here.grad.to(DEVICE)
        for optimizer in optimizers:
            optimizer.step()
    # A moment may be rounded to the other side, which moves the update by a part of 2**-9 of the learning rate.
    torch.testing.assert_close(there.detach().cpu(), here.detach(), rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_gradients_of_scaled_blocks_are_those_of_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = ResidualNetwork(3, 16).to(DEVICE)
    reference = copy.deepcopy(network).double()
    for body in network.bodies:
        BlockHooks((body,), lambda: 3e9, lambda: dtype)
    inputs = torch.randn(32, 4, device=DEVICE)
    (1e-6 * network(inputs).square().mean()).backward()
    (1e-6 * reference(inputs.double()).square().mean()).backward()
    for ours, expected in zip(network.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert expected.grad is not None
        error = (ours.grad - expected.grad).norm() / expected.grad.norm()
        assert error < 4 * torch.finfo(dtype).eps
