"""Sixteen-bit floating-point formats of optimizer moments (Ramesh et al. 2021, appendix D): 1-6-9 and 0-6-10."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int16
from torch import Tensor

_FLOAT32_FRACTION_BITS = 23
_FLOAT32_BIAS = 127


@dataclass(frozen=True, kw_only=True)
class SixteenBitFormat:
    """Sign, exponent and fraction bits of a code, from the highest; the exponent takes what the others leave.

    As in IEEE 754 the lowest exponent holds zero and subnormals, the highest infinity and NaN.

    Attributes:
        signed: Without a sign bit, what is below zero becomes zero.
        exponent_bias: With 59 the largest finite value is just below 16. The paper gives that largest value for 1-6-9
            alone; the same bias for 0-6-10 is our reading.
    """

    signed: bool
    fraction_bits: int
    exponent_bias: int = 59

    @property
    def largest_code(self) -> int:
        """All bits but the sign; a NaN."""
        return 0x7FFF if self.signed else 0xFFFF

    @property
    def infinity_code(self) -> int:
        """The highest exponent with an empty fraction."""
        return self.largest_code >> self.fraction_bits << self.fraction_bits

    @property
    def overflow(self) -> float:
        """The power of two at which infinity begins; values within half a step below it round up to it."""
        return 2.0 ** ((self.infinity_code >> self.fraction_bits) - self.exponent_bias)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self.overflow * (1 - 2.0 ** -(self.fraction_bits + 1))


FLOAT_1_6_9 = SixteenBitFormat(signed=True, fraction_bits=9)
"""For the running mean: 15.984375 down to 2**-67 of either sign."""

FLOAT_0_6_10 = SixteenBitFormat(signed=False, fraction_bits=10)
"""For the running variance: 15.9921875 down to 2**-68."""


def encode(
    values: Float32[Tensor, "..."],
    float_format: SixteenBitFormat,
    *,
    saturate: bool = False,
    out: Int16[Tensor, "..."] | None = None,
    scratch: Float32[Tensor, "2 ..."] | None = None,
) -> Int16[Tensor, "..."]:
    """Round float32 to the nearest code, ties to even; a NaN keeps its sign and loses its payload.

    Args:
        saturate: Take the largest finite value for what is larger, instead of infinity.
        out: Receives the codes.
        scratch: Memory for two intermediate results, which is overwritten. With it and `out`, encoding many tensors in
            turn allocates nothing.

    Raises:
        TypeError: If the values are not float32: from a wider type they would be rounded twice.
    """
    if values.dtype != torch.float32:
        raise TypeError(f"values are {values.dtype}; encode takes float32, so round once yourself: values.float()")
    top = float_format.largest if saturate else float_format.overflow
    magnitude_out, power_out = (None, None) if scratch is None else (scratch[0], scratch[1].view(torch.int32))
    if float_format.signed:
        magnitude = torch.abs(values, out=magnitude_out).clamp_(max=top)
    else:
        magnitude = torch.clamp(values, min=0, max=top, out=magnitude_out).abs_()
    # The power of two below each value, at least that of the smallest normal one.
    lowest = (_FLOAT32_BIAS + 1 - float_format.exponent_bias) << _FLOAT32_FRACTION_BITS
    power = torch.bitwise_and(magnitude.view(torch.int32), 0xFF << _FLOAT32_FRACTION_BITS, out=power_out)
    power.clamp_(min=lowest)
    # Beside a power of two that is larger by the bits to drop, float32 rounds a value to those to keep: the fraction of
    # the sum counts the value's steps, its exponent that power.
    dropped_bits = _FLOAT32_FRACTION_BITS - float_format.fraction_bits
    codes = magnitude.add_(power.view(torch.float32), alpha=2.0**dropped_bits).view(torch.int32)
    zero = lowest + (dropped_bits << _FLOAT32_FRACTION_BITS)
    # Only a NaN is above the largest code, which has twice the steps of a power, less one, at the highest exponent.
    num_powers = float_format.infinity_code >> float_format.fraction_bits
    codes.clamp_(max=zero + (num_powers - 1 << _FLOAT32_FRACTION_BITS) + (2 << float_format.fraction_bits) - 1)
    # A code is the sum's bits plus these shifted to the right: steps and exponent meet, what lies above wraps around.
    # Multiplied before the shift, both and the offset take one pass; from the CPU a single number goes to any device.
    offset = torch.tensor(-zero, dtype=torch.int32, device="cpu")
    torch.add(offset, codes, alpha=2**dropped_bits + 1, out=codes)
    codes.bitwise_right_shift_(dropped_bits)
    if float_format.signed:
        # An arithmetic shift leaves -1 of a negative value. The powers are no longer needed.
        codes.sub_(torch.bitwise_right_shift(values.view(torch.int32), 31, out=power), alpha=0x8000)
    return codes.to(torch.int16) if out is None else out.copy_(codes)


def decode(
    codes: Int16[Tensor, "..."],
    float_format: SixteenBitFormat,
    *,
    finite: bool = False,
    out: Float32[Tensor, "..."] | None = None,
) -> Float32[Tensor, "..."]:
    """Return the values of codes, exactly.

    Args:
        finite: Spare the time to look for infinities and NaN, where there are none; they would become finite.
        out: Receives the values.
    """
    # With the fractions at the same bit both formats lie alike; only the biases differ.
    codes = codes if float_format.signed else codes.view(torch.uint16)
    bits = codes.to(torch.int32) if out is None else out.view(torch.int32).copy_(codes)
    bits.mul_(2 ** (_FLOAT32_FRACTION_BITS - float_format.fraction_bits))
    if float_format.signed:
        # What the sign leaves between itself and the exponent is cleared.
        bits.bitwise_and_(2 ** (_FLOAT32_FRACTION_BITS + 6) - 1 - 2**31)
    if finite:
        return bits.view(torch.float32).mul_(2.0 ** (_FLOAT32_BIAS - float_format.exponent_bias))
    # 1 where the exponent is the highest one, else 0.
    special = (bits + 2**_FLOAT32_FRACTION_BITS).bitwise_right_shift_(_FLOAT32_FRACTION_BITS + 6).bitwise_and_(1)
    values = bits.view(torch.float32).mul_(2.0 ** (_FLOAT32_BIAS - float_format.exponent_bias))
    highest_exponent = (float_format.infinity_code >> float_format.fraction_bits) - float_format.exponent_bias
    bits.add_(special, alpha=(0xFF - _FLOAT32_BIAS - highest_exponent) << _FLOAT32_FRACTION_BITS)
    return values
