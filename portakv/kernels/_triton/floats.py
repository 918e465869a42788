# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Float formats as data, and their conversion from and to float32 in integer arithmetic.

Native casts differ: Triton refuses e4m3fn below sm_89, its interpreter rounds tiny inputs wrongly, and each
device makes other NaNs. Integers give one answer everywhere, and no bf16 or fp8 type appears in a kernel.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from portakv.formats import CANONICAL_NAN, FP8_DIALECTS


@dataclass(frozen=True, slots=True)
class Float:
    """A float's bit layout, and the integer type `unit` that rows of it are moved in.

    An item has `item` bytes, and is one unit unless bytes move unchanged. `inf` is the pattern of infinity, 0 where
    there is none; `max` the float32 bits that a conversion saturates to, 0 where it overflows to infinity.
    """

    item: int
    mantissa: int
    bias: int
    inf: int
    nan: int
    max: int
    unit: tl.dtype

    @property
    def value(self) -> Float:
        """Itself: a compiled kernel has the float in a `tl.constexpr`, whose `value` it is, an interpreted one bare."""
        return self


def _float32_bits(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


FLOATS = {
    torch.float32: Float(4, 23, 127, 0x7F800000, CANONICAL_NAN[torch.float32], 0, tl.int32),
    torch.float16: Float(2, 10, 15, 0x7C00, CANONICAL_NAN[torch.float16], 0, tl.int16),
    torch.bfloat16: Float(2, 7, 127, 0x7F80, CANONICAL_NAN[torch.bfloat16], 0, tl.int16),
}
for _dtype, _fp8 in FP8_DIALECTS.items():
    _inf = 0x7C if _dtype is torch.float8_e5m2 else 0
    _bits = _fp8.mantissa_bits, _fp8.exponent_bias, _inf, _fp8.nan_byte, _float32_bits(_fp8.max)
    FLOATS[_dtype] = Float(1, *_bits, tl.int8)


@triton.jit
def decode(raw, FLOAT: tl.constexpr):
    """The exact float32 value of `raw`, a float's units; NaN becomes some NaN."""
    # Constexprs of their own: Triton 3.3 cannot compare the plain ints that they are.
    BITS: tl.constexpr = 8 * FLOAT.value.item
    MANTISSA: tl.constexpr = FLOAT.value.mantissa
    BIAS: tl.constexpr = FLOAT.value.bias
    INF: tl.constexpr = FLOAT.value.inf
    NAN: tl.constexpr = FLOAT.value.nan
    SHIFT: tl.constexpr = 23 - MANTISSA
    word = raw.to(tl.int32)
    if BITS < 32:
        word = word & ((1 << BITS) - 1)
        magnitude = word & ((1 << (BITS - 1)) - 1)
        wide = (magnitude << SHIFT) + ((127 - BIAS) << 23)
        if BIAS != 127:
            # A subnormal is its mantissa times a power of two. With float32's own bias it is one there too.
            step = tl.full([], (128 - BIAS - MANTISSA) << 23, tl.int32).to(tl.float32, bitcast=True)
            subnormal = (magnitude.to(tl.float32) * step).to(tl.int32, bitcast=True)
            wide = tl.where(magnitude < (1 << MANTISSA), subnormal, wide)
        if INF != 0:
            wide = tl.where(magnitude >= INF, (magnitude << SHIFT) | 0x7F800000, wide)
        else:
            wide = tl.where((magnitude == NAN) | (word == NAN), 0x7FC00000, wide)
        word = wide | ((word >> (BITS - 1)) << 31)
    return word.to(tl.float32, bitcast=True)


@triton.jit
def encode(x, FLOAT: tl.constexpr):
    """float32 `x` as a float's units: to nearest even, any NaN as its NaN."""
    BITS: tl.constexpr = 8 * FLOAT.value.item
    MANTISSA: tl.constexpr = FLOAT.value.mantissa
    BIAS: tl.constexpr = FLOAT.value.bias
    INF: tl.constexpr = FLOAT.value.inf
    NAN: tl.constexpr = FLOAT.value.nan
    MAX: tl.constexpr = FLOAT.value.max
    SHIFT: tl.constexpr = 23 - MANTISSA
    word = x.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    if BITS < 32:
        if MAX != 0:
            magnitude = tl.minimum(magnitude, MAX)
        half = ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
        out = ((magnitude + half) >> SHIFT) - ((127 - BIAS) << MANTISSA)
        if BIAS != 127:
            # Adding the float whose last bit is the target's smallest subnormal rounds to a multiple of it.
            magic = tl.full([], (151 - BIAS - MANTISSA) << 23, tl.int32).to(tl.float32, bitcast=True)
            rounded = (magnitude.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True)
            subnormal = rounded - ((151 - BIAS - MANTISSA) << 23)
            out = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, out)
        if MAX == 0:
            out = tl.minimum(out, INF)
        sign = ((word >> 31) & 1) << (BITS - 1)
        if NAN == 1 << (BITS - 1):  # fnuz: the pattern of -0 is the NaN
            sign = tl.where(out == 0, 0, sign)
        word = out | sign
    return tl.where(is_nan, NAN, word).to(FLOAT.value.unit)
