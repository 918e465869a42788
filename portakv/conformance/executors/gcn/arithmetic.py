"""What the opcodes compute, element by element, on numpy arrays.

`VECTOR` and `SCALAR` say of an opcode its results, its sources and its function; the types are those of the operands.
"mask" is a bit a lane in a scalar register, "scc" the scalar condition code; a source "=u32" is the first result's
register. Descriptions: AMD's "Instinct MI300 (CDNA3)", "RDNA3" and "RDNA4" Instruction Set Architecture, chapters
"Vector ALU instructions" (VOP1, VOP2, VOP3, VOP3P, VOPC) and "Scalar ALU instructions" (SOP1, SOP2, SOPC, SOPK).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Op(NamedTuple):
    results: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., Any]


def op(signature: str, compute: Callable[..., Any]) -> Op:
    """From "u32 mask = u32 u32"."""
    results, _, sources = signature.partition(" <- ")
    return Op(tuple(results.split()), tuple(sources.split()), compute)


def wide(x: Array) -> Array:
    """To 64 bits, signed if it is."""
    result: Array = x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)
    return result


def shift_left(x: Array, by: Array) -> Array:
    result: Array = x << _amount(x, by)
    return result


def shift_right(x: Array, by: Array) -> Array:
    result: Array = x >> _amount(x, by)
    return result


def _amount(x: Array, by: Array) -> Array:
    """The low bits of a shift, in the type of what is shifted."""
    amount: Array = (by & by.dtype.type(8 * x.itemsize - 1)).astype(x.dtype)
    return amount


def multiply_high(a: Array, b: Array) -> Array:
    x, y = wide(a), wide(b)
    return np.asarray(x * y >> x.dtype.type(32)).astype(a.dtype)


def multiply_add_wide(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """a · b + c in 64 bits, and whether the unsigned sum passed them."""
    total = wide(a) * wide(b) + c
    return total, total < c


def multiply_24(a: Array, b: Array) -> Array:
    """The product's low 32 bits, of the low 24 of each."""
    low = np.uint32(0xFFFFFF)
    return np.asarray((a & low) * (b & low))


def add_carry(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array]:
    total = wide(a) + wide(b)
    if carry is not None:
        total = total + carry
    return total.astype(np.uint32), total >> np.uint64(32) != 0


def subtract_borrow(a: Array, b: Array, borrow: Array | None = None) -> tuple[Array, Array]:
    other = wide(b) if borrow is None else wide(b) + borrow
    return (wide(a) - other).astype(np.uint32), wide(a) < other


def add_overflow(a: Array, b: Array) -> tuple[Array, Array]:
    """Signed sum modulo 2^32, and whether it passed 32 bits."""
    total = wide(a) + wide(b)
    return total.astype(np.int32), total != total.astype(np.int32)


def subtract_overflow(a: Array, b: Array) -> tuple[Array, Array]:
    total = wide(a) - wide(b)
    return total.astype(np.int32), total != total.astype(np.int32)


def add_saturated(a: Array, b: Array) -> Array:
    total: Array = np.minimum(wide(a) + wide(b), np.iinfo(a.dtype).max)
    return np.asarray(total, a.dtype)


def subtract_saturated(a: Array, b: Array) -> Array:
    return np.where(a < b, a.dtype.type(0), a - b)


def bit_field(x: Array, at: Array, count: Array) -> Array:
    """`count` bits (modulo 32) from bit `at` (modulo 32) on; sign-extended if x is signed."""
    at, count = (wide(y & np.uint32(31)).astype(np.int64) for y in (at, count))
    shifted = wide(x) >> at.astype(wide(x).dtype)
    if x.dtype.kind == "u":
        return np.asarray(shifted & ((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)), x.dtype)
    unused = np.int64(64) - count
    field = np.where(
        count == 0, np.int64(0), shifted << np.where(count == 0, 0, unused) >> np.where(count == 0, 0, unused)
    )
    return field.astype(x.dtype)


def scalar_bit_field(x: Array, packed: Array) -> tuple[Array, Array]:
    """The field's offset is in bits 4:0 (5:0 of 64), its width in bits 22:16; a width past the register is cut."""
    bits = 8 * x.itemsize
    at = packed & np.uint32(bits - 1)
    count = np.minimum(packed >> np.uint32(16) & np.uint32(127), np.uint32(bits))
    # Of a signed field that is cut by the register's end the bits above are the sign as well.
    count = np.minimum(count, np.uint32(bits) - at)
    up = np.where(count == 0, np.uint32(0), np.uint32(bits) - at - count).astype(x.dtype)
    down = np.where(count == 0, np.uint32(0), np.uint32(bits) - count).astype(x.dtype)
    field = np.where(count == 0, x.dtype.type(0), x << up >> down)
    return field, field != 0


def reverse_bits(x: Array) -> Array:
    raw = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.itemsize)
    bits = np.unpackbits(raw, axis=-1, bitorder="little")[..., ::-1]
    return np.packbits(bits, axis=-1, bitorder="little").view(x.dtype)[..., 0]


def count_bits(x: Array) -> Array:
    return np.bitwise_count(x).astype(np.uint32)


def count_and_test(x: Array) -> tuple[Array, Array]:
    return count_bits(x), x != 0


def permute_bytes(high: Array, low: Array, selector: Array) -> Array:
    """Each byte of the selector takes one of the eight bytes of high:low, or a constant."""
    both = wide(high) << np.uint64(32) | wide(low)
    out = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for i in range(0, 32, 8):
        which = selector >> np.uint32(i) & np.uint32(255)
        byte = both >> wide(np.minimum(which, np.uint32(7)) << np.uint32(3)) & np.uint64(255)
        # 8 to 11 repeat the sign of bytes 1, 3, 5 and 7; 12 is 0, and from 13 on all bits are set.
        sign = both >> wide((which & np.uint32(3)) * np.uint32(16) + np.uint32(15)) & np.uint64(1)
        byte = np.select(
            [which < 8, which < 12, which == 12], [byte, sign * np.uint64(255), np.uint64(0)], np.uint64(255)
        )
        out |= byte.astype(np.uint32) << np.uint32(i)
    return out


def align_bits(high: Array, low: Array, by: Array) -> Array:
    both = wide(high) << np.uint64(32) | wide(low)
    return (both >> wide(by & np.uint32(31))).astype(np.uint32)


def insert_bits(mask: Array, a: Array, b: Array) -> Array:
    return (mask & a) | (~mask & b)


def combine(a: Array, b: Array, c: Array, table: int) -> Array:
    """Bitwise: bit 4a + 2b + c of the table."""
    out: Array = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for i in range(8):
        if table >> i & 1:
            out = out | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def fused(a: Array, b: Array, c: Array) -> Array:
    """a · b + c of float32, rounded once.

    The product is exact in float64; the sum is rounded to odd there, which makes the second rounding right.
    """
    x: Array = a.astype(np.float64) * b.astype(np.float64)
    y: Array = c.astype(np.float64)
    total: Array = x + y
    part = total - x
    error: Array = (x - (total - part)) + (y - part)
    bits: Array = total.view(np.int64)
    inexact: Array = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    odd: Array = bits + np.where(inexact, np.where(away, 1, -1), 0)
    return np.asarray(odd.view(np.float64), np.float32)


def multiply_then_add(a: Array, b: Array, c: Array) -> Array:
    """`v_mac_f32` and `v_madmk_f32` of CDNA2 round twice and take subnormals, also those they make, for zeros.

    (LLVM's "AMDGPU Usage" and its choice of these opcodes; AMD's description of CDNA2 has only the formula.)
    """
    return flush(flush(flush(a) * flush(b)) + flush(c))


def flush(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def to_integer(low: int, high: int, kind: type[np.generic]) -> Callable[[Array], Array]:
    """From float32 towards zero; what lies outside becomes the nearest, NaN 0."""

    def convert(x: Array) -> Array:
        whole = np.trunc(np.where(np.isnan(x), np.float32(0), x).astype(np.float64))
        return np.clip(whole, low, high).astype(np.int64).astype(kind)

    return convert


def to_half(x: Array) -> Array:
    """float32 to float16, to nearest even; a NaN is quiet and keeps its sign and its upper bits."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    nan = (bits >> np.uint32(16) & np.uint32(0x8000)) | np.uint32(0x7E00) | (bits >> np.uint32(13) & np.uint32(0x3FF))
    return np.where(np.isnan(x), nan.astype(np.uint16), x.astype(np.float16).view(np.uint16)).view(np.float16)


def from_half(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint16).astype(np.uint32)
    nan = (
        (bits & np.uint32(0x8000)) << np.uint32(16) | np.uint32(0x7FC00000) | (bits & np.uint32(0x3FF)) << np.uint32(13)
    )
    return np.where(np.isnan(x), nan, x.astype(np.float32).view(np.uint32)).view(np.float32)


def _byte_to_float(index: int) -> Callable[[Array], Array]:
    return lambda x: (x >> np.uint32(8 * index) & np.uint32(255)).astype(np.float32)


def _reverse(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, *rest: function(b, a, *rest)


def _select(a: Array, b: Array, which: Array) -> Array:
    """Of a vector conditional move: b where the bit is set."""
    return np.where(which, b, a)


def _chain(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, c: second(first(a, b), c)


def _tested(function: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    """With a condition code: the result is not zero."""

    def compute(*sources: Array) -> tuple[Array, Array]:
        result = function(*sources)
        return result, result != 0

    return compute


def _same(x: Array) -> Array:
    return x


COMPARISONS: dict[str, Callable[..., Any]] = {
    "lt": operator.lt,
    "eq": operator.eq,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
INTEGER_COMPARISONS = COMPARISONS | {"ne": operator.ne, "lg": operator.ne}
FLOAT_COMPARISONS: dict[str, Callable[..., Any]] = {
    **COMPARISONS,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nlt": lambda a, b: ~(a < b),
    "neq": operator.ne,
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}
"""Without a first "n" false for a NaN, with it true."""

VECTOR: dict[str, Op] = {}
"""VOP1, VOP2, VOP3, VOPC."""

# Moves and bits.
VECTOR |= {f"v_mov_b{n}": op(f"b{n} <- b{n}", _same) for n in (16, 32, 64)}
VECTOR |= {f"v_cndmask_b{n}": op(f"b{n} <- b{n} b{n} mask", _select) for n in (16, 32)}
for _n in (16, 32):
    VECTOR |= {
        f"v_and_b{_n}": op(f"u{_n} <- u{_n} u{_n}", operator.and_),
        f"v_or_b{_n}": op(f"u{_n} <- u{_n} u{_n}", operator.or_),
        f"v_xor_b{_n}": op(f"u{_n} <- u{_n} u{_n}", operator.xor),
        f"v_not_b{_n}": op(f"u{_n} <- u{_n}", operator.invert),
        f"v_bitop3_b{_n}": op(f"u{_n} <- u{_n} u{_n} u{_n}", combine),
    }
for _n in (16, 32, 64):
    _by = "u16" if _n == 16 else "u32"
    VECTOR |= {
        f"v_lshlrev_b{_n}": op(f"u{_n} <- {_by} u{_n}", _reverse(shift_left)),
        f"v_lshrrev_b{_n}": op(f"u{_n} <- {_by} u{_n}", _reverse(shift_right)),
        f"v_ashrrev_i{_n}": op(f"i{_n} <- {_by} i{_n}", _reverse(shift_right)),
    }
VECTOR |= {
    "v_xnor_b32": op("u32 <- u32 u32", lambda a, b: ~(a ^ b)),
    "v_and_or_b32": op("u32 <- u32 u32 u32", _chain(operator.and_, operator.or_)),
    "v_or3_b32": op("u32 <- u32 u32 u32", _chain(operator.or_, operator.or_)),
    "v_xor3_b32": op("u32 <- u32 u32 u32", _chain(operator.xor, operator.xor)),
    "v_bfe_u32": op("u32 <- u32 u32 u32", bit_field),
    "v_bfe_i32": op("i32 <- i32 u32 u32", bit_field),
    "v_bfi_b32": op("u32 <- u32 u32 u32", insert_bits),
    "v_bfrev_b32": op("u32 <- u32", reverse_bits),
    "v_bcnt_u32_b32": op("u32 <- u32 u32", lambda a, b: count_bits(a) + b),
    "v_perm_b32": op("u32 <- u32 u32 u32", permute_bytes),
    "v_alignbit_b32": op("u32 <- u32 u32 u32", align_bits),
    "v_alignbyte_b32": op("u32 <- u32 u32 u32", lambda a, b, c: align_bits(a, b, (c & np.uint32(3)) << np.uint32(3))),
    "v_lshl_or_b32": op("u32 <- u32 u32 u32", _chain(shift_left, operator.or_)),
}

# Integers.
for _suffix in ("u32", "nc_u32"):
    VECTOR |= {
        f"v_add_{_suffix}": op("u32 <- u32 u32", operator.add),
        f"v_sub_{_suffix}": op("u32 <- u32 u32", operator.sub),
        f"v_subrev_{_suffix}": op("u32 <- u32 u32", _reverse(operator.sub)),
    }
for _suffix in ("u16", "nc_u16"):
    VECTOR |= {
        f"v_add_{_suffix}": op("u16 <- u16 u16", operator.add),
        f"v_sub_{_suffix}": op("u16 <- u16 u16", operator.sub),
    }
for _infix in ("addc_co", "add_co_ci"):
    VECTOR[f"v_{_infix}_u32"] = op("u32 mask <- u32 u32 mask", add_carry)
for _infix in ("subb_co", "sub_co_ci"):
    VECTOR[f"v_{_infix}_u32"] = op("u32 mask <- u32 u32 mask", subtract_borrow)
for _infix in ("subbrev_co", "subrev_co_ci"):
    VECTOR[f"v_{_infix}_u32"] = op("u32 mask <- u32 u32 mask", _reverse(subtract_borrow))
for _infix in ("mad", "mad_co"):
    VECTOR[f"v_{_infix}_u64_u32"] = op("u64 mask <- u32 u32 u64", multiply_add_wide)
for _kind in ("i16", "u16", "i32", "u32"):
    VECTOR |= {
        f"v_min_{_kind}": op(f"{_kind} <- {_kind} {_kind}", np.minimum),
        f"v_max_{_kind}": op(f"{_kind} <- {_kind} {_kind}", np.maximum),
        f"v_min3_{_kind}": op(f"{_kind} <- {_kind} {_kind} {_kind}", _chain(np.minimum, np.minimum)),
        f"v_max3_{_kind}": op(f"{_kind} <- {_kind} {_kind} {_kind}", _chain(np.maximum, np.maximum)),
        f"v_med3_{_kind}": op(f"{_kind} <- {_kind} {_kind} {_kind}", median),
    }
VECTOR |= {
    "v_add_co_u32": op("u32 mask <- u32 u32", add_carry),
    "v_sub_co_u32": op("u32 mask <- u32 u32", subtract_borrow),
    "v_subrev_co_u32": op("u32 mask <- u32 u32", _reverse(subtract_borrow)),
    "v_add3_u32": op("u32 <- u32 u32 u32", _chain(operator.add, operator.add)),
    "v_add_lshl_u32": op("u32 <- u32 u32 u32", _chain(operator.add, shift_left)),
    "v_lshl_add_u32": op("u32 <- u32 u32 u32", _chain(shift_left, operator.add)),
    "v_lshl_add_u64": op("u64 <- u64 u32 u64", lambda a, b, c: (a << wide(b & np.uint32(7))) + c),
    "v_xad_u32": op("u32 <- u32 u32 u32", _chain(operator.xor, operator.add)),
    "v_mul_lo_u32": op("u32 <- u32 u32", operator.mul),
    "v_mul_lo_u16": op("u16 <- u16 u16", operator.mul),
    "v_mul_u32_u24": op("u32 <- u32 u32", multiply_24),
    "v_mad_u32_u24": op("u32 <- u32 u32 u32", _chain(multiply_24, operator.add)),
    "v_mul_hi_u32": op("u32 <- u32 u32", multiply_high),
    "v_mul_hi_i32": op("i32 <- i32 i32", multiply_high),
}
for _x, _result in (("", "mask"), ("x", "exec")):
    VECTOR |= {f"v_cmp{_x}_{name}_f32": op(f"{_result} <- f32 f32", f) for name, f in FLOAT_COMPARISONS.items()}
    VECTOR |= {
        f"v_cmp{_x}_{name}_{kind}": op(f"{_result} <- {kind} {kind}", compare)
        for kind in ("i16", "u16", "i32", "u32", "i64", "u64")
        for name, compare in INTEGER_COMPARISONS.items()
        if name != "lg"
    }

# Floats. The reciprocal, of 1 ulp in hardware, is taken as exact: LLVM's integer division corrects what it gives.
VECTOR |= {
    "v_add_f32": op("f32 <- f32 f32", operator.add),
    "v_sub_f32": op("f32 <- f32 f32", operator.sub),
    "v_subrev_f32": op("f32 <- f32 f32", _reverse(operator.sub)),
    "v_mul_f32": op("f32 <- f32 f32", operator.mul),
    "v_fma_f32": op("f32 <- f32 f32 f32", fused),
    "v_fmac_f32": op("f32 <- f32 f32 =f32", fused),
    "v_fmamk_f32": op("f32 <- f32 f32 f32", fused),
    "v_fmaak_f32": op("f32 <- f32 f32 f32", fused),
    "v_mac_f32": op("f32 <- f32 f32 =f32", multiply_then_add),
    "v_madmk_f32": op("f32 <- f32 f32 f32", multiply_then_add),
    "v_trunc_f32": op("f32 <- f32", np.trunc),
    "v_rcp_f32": op("f32 <- f32", lambda x: np.float32(1) / x),
    "v_rcp_iflag_f32": op("f32 <- f32", lambda x: np.float32(1) / x),
    "v_cvt_f32_u32": op("f32 <- u32", lambda x: x.astype(np.float32)),
    "v_cvt_f32_i32": op("f32 <- i32", lambda x: x.astype(np.float32)),
    "v_cvt_u32_f32": op("u32 <- f32", to_integer(0, 2**32 - 1, np.uint32)),
    "v_cvt_i32_f32": op("i32 <- f32", to_integer(-(2**31), 2**31 - 1, np.int32)),
    "v_cvt_f16_f32": op("f16 <- f32", to_half),
    "v_cvt_f32_f16": op("f32 <- f16", from_half),
    "v_cvt_u32_u16": op("u32 <- u16", lambda x: x.astype(np.uint32)),
    "v_cvt_i32_i16": op("i32 <- i16", lambda x: x.astype(np.int32)),
}
VECTOR |= {f"v_cvt_f32_ubyte{i}": op("f32 <- u32", _byte_to_float(i)) for i in range(4)}

SATURATED = {
    **dict.fromkeys(("v_add_u32", "v_add_nc_u32", "v_add_u16", "v_add_nc_u16"), add_saturated),
    **dict.fromkeys(("v_sub_u32", "v_sub_nc_u32", "v_sub_u16", "v_sub_nc_u16"), subtract_saturated),
}
"""What has the modifier `clamp` here."""

PACKED: dict[str, Callable[..., Any]] = {
    "v_pk_add_f32": operator.add,
    "v_pk_mul_f32": operator.mul,
    "v_pk_fma_f32": fused,
}
"""VOP3P of CDNA: two float32 in a pair of registers."""

SCALAR: dict[str, Op] = {}
"""SOP1, SOP2, SOPC, SOPK."""

for _n in (32, 64):
    _two, _one = f"u{_n} scc <- u{_n} u{_n}", f"u{_n} scc <- u{_n}"
    SCALAR |= {
        f"s_mov_b{_n}": op(f"b{_n} <- b{_n}", _same),
        f"s_cselect_b{_n}": op(f"b{_n} <- b{_n} b{_n} scc", lambda a, b, scc: np.where(scc, a, b)),
        f"s_and_b{_n}": op(_two.replace("u", "b"), _tested(operator.and_)),
        f"s_or_b{_n}": op(_two.replace("u", "b"), _tested(operator.or_)),
        f"s_xor_b{_n}": op(_two.replace("u", "b"), _tested(operator.xor)),
        f"s_nand_b{_n}": op(_two.replace("u", "b"), _tested(lambda a, b: ~(a & b))),
        f"s_nor_b{_n}": op(_two.replace("u", "b"), _tested(lambda a, b: ~(a | b))),
        f"s_xnor_b{_n}": op(_two.replace("u", "b"), _tested(lambda a, b: ~(a ^ b))),
        f"s_not_b{_n}": op(_one, _tested(operator.invert)),
        f"s_brev_b{_n}": op(f"u{_n} <- u{_n}", reverse_bits),
        f"s_bcnt1_i32_b{_n}": op(f"u32 scc <- u{_n}", count_and_test),
        f"s_lshl_b{_n}": op(f"u{_n} scc <- u{_n} u32", _tested(shift_left)),
        f"s_lshr_b{_n}": op(f"u{_n} scc <- u{_n} u32", _tested(shift_right)),
        f"s_ashr_i{_n}": op(f"i{_n} scc <- i{_n} u32", _tested(shift_right)),
        f"s_bfe_u{_n}": op(f"u{_n} scc <- u{_n} u32", scalar_bit_field),
        f"s_bfe_i{_n}": op(f"i{_n} scc <- i{_n} u32", scalar_bit_field),
        f"s_bitcmp0_b{_n}": op(f"scc <- u{_n} u32", lambda a, b: shift_right(a, b) & a.dtype.type(1) == 0),
        f"s_bitcmp1_b{_n}": op(f"scc <- u{_n} u32", lambda a, b: shift_right(a, b) & a.dtype.type(1) != 0),
    }
    for _name in ("andn2", "and_not1"):
        SCALAR[f"s_{_name}_b{_n}"] = op(_two.replace("u", "b"), _tested(lambda a, b: a & ~b))
    for _name in ("orn2", "or_not1"):
        SCALAR[f"s_{_name}_b{_n}"] = op(_two.replace("u", "b"), _tested(lambda a, b: a | ~b))
for _infix in ("", "co_"):
    SCALAR |= {
        f"s_add_{_infix}u32": op("u32 scc <- u32 u32", add_carry),
        f"s_sub_{_infix}u32": op("u32 scc <- u32 u32", subtract_borrow),
        f"s_add_{_infix}i32": op("i32 scc <- i32 i32", add_overflow),
        f"s_sub_{_infix}i32": op("i32 scc <- i32 i32", subtract_overflow),
    }
for _infix in ("addc", "add_co_ci"):
    SCALAR[f"s_{_infix}_u32"] = op("u32 scc <- u32 u32 scc", add_carry)
for _infix in ("subb", "sub_co_ci"):
    SCALAR[f"s_{_infix}_u32"] = op("u32 scc <- u32 u32 scc", subtract_borrow)
for _kind in ("i32", "u32"):
    SCALAR |= {
        f"s_min_{_kind}": op(f"{_kind} scc <- {_kind} {_kind}", lambda a, b: (np.minimum(a, b), a < b)),
        f"s_max_{_kind}": op(f"{_kind} scc <- {_kind} {_kind}", lambda a, b: (np.maximum(a, b), a >= b)),
        f"s_mul_hi_{_kind}": op(f"{_kind} <- {_kind} {_kind}", multiply_high),
    }
SCALAR |= {
    f"s_cmp_{name}_{kind}": op(f"scc <- {kind} {kind}", INTEGER_COMPARISONS[name])
    for kind, names in (("i32", "eq lg gt ge lt le"), ("u32", "eq lg gt ge lt le"), ("u64", "eq lg"))
    for name in names.split()
}
SCALAR |= {
    f"s_lshl{i}_add_u32": op("u32 scc <- u32 u32", lambda a, b, i=i: add_carry_shifted(a, b, i)) for i in range(1, 5)
}
SCALAR |= {
    "s_movk_i32": op("i32 <- i16", lambda x: x.astype(np.int32)),
    "s_mul_i32": op("u32 <- u32 u32", operator.mul),
    "s_mul_u64": op("u64 <- u64 u64", operator.mul),
    "s_add_nc_u64": op("u64 <- u64 u64", operator.add),
    "s_sub_nc_u64": op("u64 <- u64 u64", operator.sub),
    "s_abs_i32": op("i32 scc <- i32", _tested(np.abs)),
    "s_sext_i32_i8": op("i32 <- u32", lambda x: x.astype(np.int8).astype(np.int32)),
    "s_sext_i32_i16": op("i32 <- i16", lambda x: x.astype(np.int32)),
    "s_pack_ll_b32_b16": op("u32 <- u16 u16", lambda a, b: a | b.astype(np.uint32) << np.uint32(16)),
    # Floats, on RDNA 3.5 and 4.
    "s_add_f32": op("f32 <- f32 f32", operator.add),
    "s_sub_f32": op("f32 <- f32 f32", operator.sub),
    "s_mul_f32": op("f32 <- f32 f32", operator.mul),
    "s_fmac_f32": op("f32 <- f32 f32 =f32", fused),
    "s_trunc_f32": op("f32 <- f32", np.trunc),
    "s_cvt_f32_u32": VECTOR["v_cvt_f32_u32"],
    "s_cvt_f32_i32": VECTOR["v_cvt_f32_i32"],
    "s_cvt_u32_f32": VECTOR["v_cvt_u32_f32"],
    "s_cvt_i32_f32": VECTOR["v_cvt_i32_f32"],
    "v_s_rcp_f32": VECTOR["v_rcp_f32"],
}


def add_carry_shifted(a: Array, b: Array, by: int) -> tuple[Array, Array]:
    total = (wide(a) << np.uint64(by)) + wide(b)
    return total.astype(np.uint32), total >> np.uint64(32) != 0
