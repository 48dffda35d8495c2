"""The sixteen-bit formats against a reference in Python integers."""

import inspect
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from lightning_dalle.ops.float_formats import FLOAT_0_6_10, FLOAT_1_6_9, SixteenBitFormat, decode, encode

FORMATS = pytest.mark.parametrize("float_format", [FLOAT_1_6_9, FLOAT_0_6_10], ids=["1-6-9", "0-6-10"])
ALL_CODES = torch.arange(-(2**15), 2**15).to(torch.int16)


def slow_decode(code: int, float_format: SixteenBitFormat) -> float:
    """The value of one code, from its bits."""
    fraction_bits = float_format.fraction_bits
    sign = -1.0 if float_format.signed and code & 0x8000 else 1.0
    magnitude = code & (0x7FFF if float_format.signed else 0xFFFF)
    exponent, fraction = divmod(magnitude, 2**fraction_bits)
    if exponent == 63:
        return math.nan if fraction else sign * math.inf
    steps = fraction if exponent == 0 else fraction + 2**fraction_bits
    return sign * math.ldexp(steps, max(exponent, 1) - float_format.exponent_bias - fraction_bits)


def slow_encode(value: float, float_format: SixteenBitFormat) -> int:
    """The nearest code of a number, by exact arithmetic."""
    sign = 0x8000 if float_format.signed and math.copysign(1, value) < 0 else 0
    if math.isinf(value):
        return sign | float_format.infinity_code if float_format.signed or value > 0 else 0
    magnitude = Fraction(abs(value) if float_format.signed else max(value, 0.0))
    exponent = 1 - float_format.exponent_bias
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    # round() of a Fraction takes ties to even.
    steps = round(magnitude / Fraction(2) ** (exponent - float_format.fraction_bits))
    code = (exponent + float_format.exponent_bias - 1) * 2**float_format.fraction_bits + steps
    return sign | min(code, float_format.infinity_code)


def codes_of(values: Tensor, float_format: SixteenBitFormat) -> list[int]:
    return [code & 0xFFFF for code in encode(values, float_format).tolist()]


def test_formats_are_those_of_the_paper() -> None:
    assert FLOAT_1_6_9.largest == 15.984375
    assert FLOAT_0_6_10.largest == 15.9921875
    assert decode(torch.tensor([FLOAT_1_6_9.infinity_code - 1], dtype=torch.int16), FLOAT_1_6_9).item() == 15.984375
    assert decode(torch.tensor([1], dtype=torch.int16), FLOAT_1_6_9).item() == 2.0**-67
    assert decode(torch.tensor([1], dtype=torch.int16), FLOAT_0_6_10).item() == 2.0**-68


@FORMATS
def test_every_code_decodes_to_its_value(float_format: SixteenBitFormat) -> None:
    expected = torch.tensor([slow_decode(code & 0xFFFF, float_format) for code in ALL_CODES.tolist()])
    torch.testing.assert_close(decode(ALL_CODES, float_format), expected, rtol=0, atol=0, equal_nan=True)


@FORMATS
def test_finite_codes_decode_alike_without_a_look_at_the_others(float_format: SixteenBitFormat) -> None:
    values = decode(ALL_CODES, float_format)
    assert torch.equal(decode(ALL_CODES, float_format, finite=True)[values.isfinite()], values[values.isfinite()])


@FORMATS
def test_every_code_comes_back(float_format: SixteenBitFormat) -> None:
    values = decode(ALL_CODES, float_format)
    again = encode(values, float_format)
    is_nan = values.isnan()
    # 511 fractions of a NaN of either sign, or 1023.
    assert is_nan.sum() == (2 * 511 if float_format.signed else 1023)
    assert torch.equal(again[~is_nan], ALL_CODES[~is_nan])
    assert decode(again[is_nan], float_format).isnan().all()


@FORMATS
def test_a_dense_sweep_is_rounded_as_by_exact_arithmetic(float_format: SixteenBitFormat) -> None:
    # Every binade of the format and some beyond, a full sweep of fractions, and the neighbours of every midpoint.
    fractions = torch.linspace(1, 2, 41, dtype=torch.float64).float()
    exponents = torch.arange(-75, 8, dtype=torch.float32)
    sweep = (fractions * torch.exp2(exponents).unsqueeze(1)).flatten()
    finite = decode(torch.arange(0, float_format.infinity_code, 61).to(torch.int16), float_format).double()
    next_codes = torch.arange(0, float_format.infinity_code, 61).add(1).clamp(max=float_format.infinity_code - 1)
    midpoints = ((finite + decode(next_codes.to(torch.int16), float_format).double()) / 2).float()
    infinity = torch.tensor(math.inf)
    values = torch.cat([sweep, midpoints, midpoints.nextafter(infinity), midpoints.nextafter(-infinity)])
    values = torch.cat([values, -values])
    assert codes_of(values, float_format) == [slow_encode(value, float_format) for value in values.tolist()]


@FORMATS
@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=300, deadline=None)
def test_any_number_is_rounded_as_by_exact_arithmetic(float_format: SixteenBitFormat, value: float) -> None:
    assert codes_of(torch.tensor([value]), float_format) == [slow_encode(value, float_format)]


@FORMATS
def test_nan_stays_nan(float_format: SixteenBitFormat) -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -1, -0x400000], dtype=torch.int32)
    assert decode(encode(patterns.view(torch.float32), float_format), float_format).isnan().all()


def test_a_format_without_sign_has_nothing_below_zero() -> None:
    values = torch.tensor([-0.0, -1e-30, -1.0, -math.inf])
    assert codes_of(values, FLOAT_0_6_10) == [0, 0, 0, 0]


def test_codes_have_two_bytes_and_the_shape_of_the_values() -> None:
    values = torch.randn(3, 5).t()
    codes = encode(values, FLOAT_1_6_9)
    assert (codes.dtype, codes.shape) == (torch.int16, values.shape)
    assert codes.element_size() == 2
    torch.testing.assert_close(decode(codes, FLOAT_1_6_9), values, rtol=2**-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    # Under pytest shapes and types are checked before the function itself looks.
    unchecked = inspect.unwrap(encode)
    with pytest.raises(TypeError, match=r"values are torch\..*; encode takes float32, so round once yourself"):
        unchecked(torch.ones(2, dtype=dtype), FLOAT_1_6_9)


@FORMATS
def test_saturated_values_stay_finite(float_format: SixteenBitFormat) -> None:
    values = torch.tensor([15.999, 16.0, 1e30, math.inf])
    assert decode(encode(values, float_format, saturate=True), float_format).tolist() == [float_format.largest] * 4
    assert decode(encode(torch.tensor([math.nan]), float_format, saturate=True), float_format).isnan().all()


@FORMATS
@pytest.mark.parametrize("saturate", [True, False])
def test_given_memory_receives_the_same_codes_and_values(float_format: SixteenBitFormat, saturate: bool) -> None:
    # Patterns from all of float32: subnormals, infinities and NaN are among them.
    values = torch.arange(-(2**31), 2**31, 99_991).to(torch.int32).view(torch.float32)
    codes = torch.empty(values.shape, dtype=torch.int16)
    scratch = torch.full((2, *values.shape), math.nan)
    assert encode(values, float_format, saturate=saturate, out=codes, scratch=scratch) is codes
    assert torch.equal(codes, encode(values, float_format, saturate=saturate))
    decoded = torch.empty(ALL_CODES.shape)
    bits = decode(ALL_CODES, float_format, out=decoded).view(torch.int32)
    assert bits.data_ptr() == decoded.data_ptr()
    assert torch.equal(bits, decode(ALL_CODES, float_format).view(torch.int32))
