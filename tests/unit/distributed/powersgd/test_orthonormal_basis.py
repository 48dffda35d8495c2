import pytest
import torch
from hypothesis import given, settings, strategies as st

from lightning_dalle.distributed.powersgd.compressor import orthonormal_basis
from lightning_dalle.ops.float_formats import FLOAT_1_6_9, decode, encode
from tests.rounding import assert_only_rounded


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Any rank and any scale, dependent columns and columns of zeros included."""
    rows = draw(st.integers(1, 40))
    rank = draw(st.integers(1, rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    inner = draw(st.integers(0, rank))
    matrix = torch.randn(rows, inner, generator=generator) @ torch.randn(inner, rank, generator=generator)
    return matrix * 10.0 ** draw(st.integers(-20, 15))


def _assert_orthonormal(basis: torch.Tensor, matrix: torch.Tensor) -> None:
    """Compare with the reflections of a QR decomposition in the same precision."""
    smallest = torch.finfo(matrix.dtype).tiny
    plain = torch.linalg.qr(matrix / matrix.abs().max().clamp(min=smallest)).Q
    assert_only_rounded(basis.T @ basis, plain.T @ plain, torch.eye(matrix.shape[1], dtype=torch.float64))


@settings(max_examples=150, deadline=None)
@given(matrices())
def test_columns_are_orthonormal_whatever_the_scale_and_the_rank(matrix: torch.Tensor) -> None:
    basis = orthonormal_basis(matrix)
    assert basis.dtype == torch.float32
    _assert_orthonormal(basis, matrix)


@settings(max_examples=50, deadline=None)
@given(matrices())
def test_span_holds_the_columns(matrix: torch.Tensor) -> None:
    matrix = matrix.double()
    basis = orthonormal_basis(matrix)
    # The identity that is added moves each column by 1e-6 of the largest entry, and dependent ones arbitrarily far.
    remainder = matrix - basis @ (basis.T @ matrix)
    if torch.linalg.matrix_rank(matrix) == matrix.shape[1]:
        assert remainder.norm() <= 1e-6 * matrix.abs().max() * matrix.shape[1] ** 0.5 * (1 + 1e-6)


def test_columns_that_went_through_sixteen_bits_are_orthonormal() -> None:
    matrix = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for rounded in (matrix.to(torch.bfloat16), decode(encode(matrix, FLOAT_1_6_9), FLOAT_1_6_9)):
        _assert_orthonormal(orthonormal_basis(rounded), rounded.float())


def test_basis_that_is_kept_in_sixteen_bits_stays_nearly_orthonormal() -> None:
    basis = orthonormal_basis(torch.randn(64, 8, generator=torch.Generator().manual_seed(0)))
    rounded = decode(encode(basis, FLOAT_1_6_9), FLOAT_1_6_9)
    # Each entry of both matrices is rounded by 2**-10 of itself at most, up or down: sums stay below one such share.
    torch.testing.assert_close(rounded.T @ rounded, torch.eye(8), rtol=0, atol=2**-10)


@pytest.mark.parametrize("shape", [(4, 4), (5, 2), (3, 0)])
def test_zeros_give_columns_of_the_identity_and_the_input_stays(shape: tuple[int, int]) -> None:
    matrix = torch.zeros(shape)
    assert torch.equal(orthonormal_basis(matrix).abs(), torch.eye(*shape))
    assert torch.equal(matrix, torch.zeros(shape))
