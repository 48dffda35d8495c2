"""Tiles taken a few at a time, in buffers that are reused, against all at once."""

import pytest
import torch

from lightning_dalle.ops.attention import kernels, online_softmax
from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from tests.unit.ops.attention.oracle import masked_attention, random_inputs

SPARSE_KINDS: tuple[PatternKind, ...] = ("row", "column", "convolution")
# Image rows enough for several tiles, of which a rest is left over.
HEIGHT, WIDTH = 23, 9


def _gradients(pattern: AttentionPattern, batch: int, heads: int, dropout: float = 0.0) -> list[torch.Tensor]:
    inputs = random_inputs(pattern, batch=batch, heads=heads)
    output = attend(*inputs, pattern, dropout=dropout)
    weights = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad(output, inputs, weights)]


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 9), (11, 2)])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_however_many_tiles_one_call_takes_the_gradients_are_the_same(
    kind: PatternKind, dropout: float, batch: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = AttentionPattern(kind, 7, HEIGHT, WIDTH, 5)
    expected = _gradients(pattern, batch, heads, dropout)
    for elements in (1, 5000):
        monkeypatch.setattr(online_softmax, "CALL_ELEMENTS", elements)
        monkeypatch.setattr(kernels, "_SCORES", elements)
        torch.testing.assert_close(_gradients(pattern, batch, heads, dropout), expected, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_autocast_around_the_backward_pass_changes_nothing(kind: PatternKind) -> None:
    pattern = AttentionPattern(kind, 7, HEIGHT, WIDTH, 5)
    inputs = random_inputs(pattern, torch.float32)
    output = attend(*inputs, pattern)
    expected = torch.autograd.grad(output.square().sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, torch.autograd.grad(output.square().sum(), inputs), expected))


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_tensors_of_the_caller_are_left_as_they_were(kind: PatternKind) -> None:
    pattern = AttentionPattern(kind, 7, HEIGHT, WIDTH, 5)
    inputs = random_inputs(pattern)
    output = attend(*inputs, pattern)
    weights = torch.randn_like(output)
    tensors = [*inputs, output, weights]
    before = [tensor.detach().clone() for tensor in tensors]
    torch.autograd.grad(output, inputs, weights)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("kind", SPARSE_KINDS)
def test_scores_that_differ_by_hundreds_have_finite_gradients(kind: PatternKind) -> None:
    pattern = AttentionPattern(kind, 7, HEIGHT, WIDTH, 5)
    query, key, value = random_inputs(pattern)
    query = (900 * query.detach()).requires_grad_()
    inputs = query, key, value
    output, expected = attend(*inputs, pattern), masked_attention(*inputs, pattern)
    gradients, exact = (torch.autograd.grad(each.square().sum(), inputs) for each in (output, expected))
    for gradient, of_oracle in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient, of_oracle, atol=1e-10 * of_oracle.abs().max().item(), rtol=0)
