"""`attend` against a plain softmax under the boolean mask."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dalle.ops import hardware
from lightning_dalle.ops.attention.api import attend
from lightning_dalle.ops.attention.patterns import AttentionPattern, PatternKind
from tests.rounding import FACTOR, assert_only_rounded
from tests.unit.ops.attention.oracle import DECODABLE_KINDS, KINDS, Triple, masked_attention, random_inputs

# Geometries whose tiles are of all sorts: a head, several equal ones and a rest.
TILED = {kind: AttentionPattern(kind, 70, 15, 13, 5) for kind in KINDS}


class _LargestTensor(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, list | tuple) else (results,):
            if isinstance(result, torch.Tensor):
                self.num_elements = max(self.num_elements, result.numel())
        return results


def _gradients(output: torch.Tensor, inputs: Triple) -> tuple[torch.Tensor, ...]:
    # Of eight bits, so that they are the same in every type.
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return torch.autograd.grad((output * weights.to(output.dtype)).sum(), inputs)


def _with_gradients(attention: Callable[..., torch.Tensor], inputs: Triple, *arguments: Any, **dropout: Any) -> Any:
    output = attention(*inputs, *arguments, **dropout)
    return [output, *_gradients(output, inputs)]


def _in_double(inputs: Triple) -> Triple:
    return tuple(tensor.detach().double().requires_grad_() for tensor in inputs)  # type: ignore[return-value]


def _assert_only_rounded(pattern: AttentionPattern, inputs: Triple, factor: float = FACTOR, **dropout: Any) -> None:
    """Output and gradients lose at most a few times what a plain softmax in the type of the inputs loses."""
    assert_only_rounded(
        _with_gradients(attend, inputs, pattern, **dropout),
        _with_gradients(masked_attention, inputs, pattern, **dropout),
        _with_gradients(masked_attention, _in_double(inputs), pattern, **dropout),
        factor=factor,
    )


@given(
    kind=st.sampled_from(KINDS),
    text_length=st.integers(1, 12),
    height=st.integers(0, 12),
    width=st.integers(1, 14),
    kernel_size=st.sampled_from((1, 3, 5, 7, 11)),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    dropout=st.sampled_from((0.0, 0.0, 0.4)),
)
@example("row", 1, 1, 40, 1, 1, 1, 0.0)
@example("row", 3, 3, 70, 1, 2, 2, 0.4)
@example("column", 140, 40, 1, 1, 2, 1, 0.0)
@example("convolution", 2, 40, 5, 3, 1, 2, 0.0)
@example("convolution", 140, 9, 30, 11, 2, 1, 0.4)
@example("convolution", 2, 9, 10, 31, 2, 2, 0.0)
@settings(max_examples=100, deadline=None)
def test_attend_equals_the_masked_softmax_for_any_geometry(
    kind: PatternKind,
    text_length: int,
    height: int,
    width: int,
    kernel_size: int,
    batch: int,
    heads: int,
    dropout: float,
) -> None:
    pattern = AttentionPattern(kind, text_length, height, width, kernel_size)
    inputs = random_inputs(pattern, torch.float64, batch, heads)
    output, *gradients = _with_gradients(attend, inputs, pattern, dropout=dropout, dropout_seed=height)
    expected, *exact = _with_gradients(masked_attention, inputs, pattern, dropout=dropout, dropout_seed=height)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    for gradient, exact_gradient in zip(gradients, exact, strict=True):
        # Of text keys it is a sum over all queries, and may be much larger than 1.
        scale = max(1.0, exact_gradient.abs().max().item())
        torch.testing.assert_close(gradient, exact_gradient, atol=1e-12 * scale, rtol=0)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_attend_equals_the_masked_softmax_in_single_precision(kind: PatternKind, dropout: float) -> None:
    _assert_only_rounded(TILED[kind], random_inputs(TILED[kind], torch.float32), dropout=dropout)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("kind", ["row", "column", "convolution"])
def test_any_memory_layout_gives_the_same(kind: PatternKind, layout: tuple[int, ...]) -> None:
    inputs = random_inputs(TILED[kind])
    inverse = [layout.index(axis) for axis in range(4)]
    permuted: Triple = tuple(  # type: ignore[assignment]
        tensor.detach().permute(layout).contiguous().permute(inverse).requires_grad_() for tensor in inputs
    )
    output, expected = attend(*permuted, TILED[kind]), attend(*inputs, TILED[kind])
    assert torch.equal(output, expected)
    assert all(map(torch.equal, _gradients(output, permuted), _gradients(expected, inputs)))


@pytest.mark.parametrize("kind", KINDS)
def test_each_output_is_moved_by_exactly_the_keys_of_its_mask(kind: PatternKind) -> None:
    pattern = TILED[kind]
    query, key, value = (tensor.detach()[:1, :1] for tensor in random_inputs(pattern))
    # Batch element p has key and value of position p perturbed.
    positions = torch.arange(pattern.length)
    keys, values = (tensor.repeat(pattern.length, 1, 1, 1) for tensor in (key, value))
    keys[positions, 0, positions] += 1
    values[positions, 0, positions] += 1
    change = attend(query.expand_as(keys), keys, values, pattern) - attend(query, key, value, pattern)
    # The size of the batch may round differently.
    assert torch.equal((change.squeeze(1).abs().amax(-1) > 1e-14).T, pattern.mask())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["row", "column", "convolution"])
def test_saved_bytes_are_no_more_than_those_of_fused_dense_attention(kind: PatternKind, dropout: float) -> None:
    inputs, saved = random_inputs(TILED[kind], torch.float32), []
    for way in (
        lambda: attend(*inputs, TILED[kind], dropout=dropout),
        lambda: scaled_dot_product_attention(*inputs, is_causal=True),
    ):
        sizes: list[int] = []

        def measured(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(measured, lambda tensor: tensor):
            way()
        saved.append(sum(sizes))
    assert 0 < saved[0] <= saved[1]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize(("kind", "kernel_size"), [*((kind, 5) for kind in KINDS), ("convolution", 61)])
def test_nothing_of_the_size_of_the_whole_mask_is_built(kind: PatternKind, kernel_size: int, dropout: float) -> None:
    # A geometry of its own, so that no mask comes from another test.
    pattern = AttentionPattern(kind, 60, 31, 29, kernel_size)
    inputs = random_inputs(pattern, torch.float32, batch=1, heads=1, head_dim=2)
    with _LargestTensor() as largest:
        attend(*inputs, pattern, dropout=dropout).sum().backward()
    assert 0 < largest.num_elements < pattern.length**2 / 4


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_decided_by_its_seed(kind: PatternKind) -> None:
    inputs = random_inputs(TILED[kind])
    first, again, other = (attend(*inputs, TILED[kind], dropout=0.5, dropout_seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, attend(*inputs, TILED[kind]))


@pytest.mark.parametrize("kind", DECODABLE_KINDS)
def test_mask_first_built_while_sampling_serves_a_later_backward(kind: PatternKind) -> None:
    # A geometry of its own, so that the mask cannot come from another test.
    pattern = AttentionPattern(kind, 5, 2, 7)
    inputs = random_inputs(pattern)
    with torch.inference_mode():
        attend(*inputs, pattern)
    attend(*inputs, pattern).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_attention_loses_no_more_than_plain_bfloat16(kind: PatternKind) -> None:
    pattern = TILED[kind]
    inputs = random_inputs(pattern, torch.bfloat16)
    assert attend(*inputs, pattern).dtype == torch.bfloat16
    # Plain code rounds its scores and weights too.
    _assert_only_rounded(pattern, inputs, factor=1)
    with torch.no_grad():
        exact = masked_attention(*_in_double(inputs), pattern)
        assert_only_rounded(attend(*inputs, pattern), masked_attention(*inputs, pattern), exact, factor=1)


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bits_are_widened_where_their_kernel_is_slow(
    kind: PatternKind, dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_cpu_multiplies_fast", lambda dtype: fast)
    query, key, value = (tensor.detach().to(dtype) for tensor in random_inputs(TILED[kind], torch.float32))
    wide = attend(query.float(), key.float(), value.float(), TILED[kind]).to(dtype)
    with torch.autocast("cpu", dtype):
        # The fused kernel's forward pass is fast in bfloat16 on any CPU; its backward pass is not on any.
        is_wide = torch.equal(attend(query, key, value, TILED[kind]), wide)
        assert is_wide == (dtype == torch.float16 and not fast)
        assert torch.equal(attend(query.requires_grad_(), key, value, TILED[kind]), wide)


def test_sequence_of_another_length_is_refused() -> None:
    pattern = AttentionPattern("row", 6, 4, 4)
    inputs = random_inputs(pattern.with_height(3))
    with pytest.raises(ValueError, match="query has 18 positions, but the pattern has 22"):
        attend(*inputs, pattern)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_that_is_no_probability_below_one_is_refused(dropout: float) -> None:
    pattern = AttentionPattern("row", 6, 4, 4)
    with pytest.raises(ValueError, match=rf"dropout \({dropout}\) must be in \[0, 1\)"):
        attend(*random_inputs(pattern), pattern, dropout=dropout)


@pytest.mark.parametrize("kind", KINDS)
def test_short_sequences_take_the_mask_and_give_the_same(kind: PatternKind, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = AttentionPattern(kind, 5, 4, 6, 3)
    inputs = random_inputs(pattern, torch.float64)
    structured = attend(*inputs, pattern)
    monkeypatch.setattr("lightning_dalle.ops.attention.api.MASKED_LENGTH", pattern.length)
    masked = attend(*inputs, pattern)
    torch.testing.assert_close(masked, structured, atol=1e-12, rtol=0)
    for one, other in zip(_gradients(masked, inputs), _gradients(structured, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
