"""Each opcode of the AMD executor beside a plain definition on Python's integers, and each error it should raise."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portakv import testing
from portakv.compile import Target
from portakv.conformance.executors import gcn
from portakv.conformance.executors.errors import (
    ConflictingStores,
    ExecutionError,
    Misaligned,
    MissingLanes,
    OutsideAllocation,
    UnknownInstruction,
)
from portakv.conformance.executors.gcn import arithmetic
from portakv.conformance.executors.gcn.lanes import LANES
from portakv.conformance.executors.gcn.probe import probe
from portakv.conformance.executors.gcn.waves import UNDEFINED
from portakv.conformance.executors.launcher import ExecutingLauncher
from portakv.conformance.executors.memory import Memory

M16, M32, M64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
WAVES = 12

FLOATS = (
    0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    -2.5,
    3.0,
    255.0,
    2.0**24,
    2.0**31,
    2.0**32,
    -(2.0**31),
    3.4e38,
    1e-38,
    1e-42,
    1e-45,
)
EDGES = [0, 1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000]
EDGES += [0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x12345678]
EDGES += [
    *(struct.unpack("<I", struct.pack("<f", x))[0] for x in FLOATS),
    0x00100008,
    0x001F0000,
    0x00400003,
    0xC0A0E05,
]


def signed(x: int, width: int = 32) -> int:
    x &= (1 << width) - 1
    return x - (1 << width) if x >> (width - 1) else x


def number(bits: int) -> np.float32:
    return np.array([bits], np.uint32).view(np.float32)[0]


def bits_of(x: Any) -> int:
    return int(np.array([x], np.float32).view(np.uint32)[0])


def round_exact(numerator: int, exponent: int, negative_zero: bool = False) -> int:
    """numerator · 2^exponent as float32 bits, to nearest even, with integers alone."""
    if numerator == 0:
        return 0x80000000 if negative_zero else 0
    sign, value = (0x80000000, -numerator) if numerator < 0 else (0, numerator)
    shift = max(value.bit_length() - 24, -149 - exponent)
    if shift > 0:
        whole, rest = value >> shift, value & ((1 << shift) - 1)
        half = 1 << (shift - 1)
        whole += rest > half or (rest == half and whole & 1)
        value, exponent = whole, exponent + shift
    else:
        value, exponent = value << min(-shift, 200), exponent + shift
    if value.bit_length() > 24:
        value, exponent = value >> 1, exponent + 1
    if value == 0:
        return sign
    biased = exponent + 150 if value >> 23 else 0
    return sign | (0x7F800000 if biased >= 255 else biased << 23 | value & 0x7FFFFF)


def split(bits: int) -> tuple[int, int]:
    """Signed mantissa and exponent of a finite float32."""
    exponent, mantissa = bits >> 23 & 255, bits & 0x7FFFFF
    value, power = (mantissa | 1 << 23, exponent - 150) if exponent else (mantissa, -149)
    return (-value if bits >> 31 else value), power


NAN = object()
"""A result that must be some NaN."""


def fma(a: int, b: int, c: int) -> Any:
    """Rounded once, with exact integers."""
    x, y, z = number(a), number(b), number(c)
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        result = float(x) * float(y) + float(z)
        return NAN if math.isnan(result) else bits_of(result)
    (m, p), (n, q), (o, r) = split(a), split(b), split(c)
    low = min(p + q, r)
    total = (m * n << (p + q - low)) + (o << (r - low))
    both_negative = ((a ^ b) >> 31 & 1) == 1 and c >> 31 == 1
    return round_exact(total, low, negative_zero=both_negative)


def floats(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: int) -> Any:
        with np.errstate(all="ignore"):
            result = np.float32(function(*(number(x) for x in args)))
        return NAN if np.isnan(result) else bits_of(result)

    return compute


def to_int(bits: int, low: int, high: int, mask: int) -> int:
    x = float(number(bits))
    return (
        0 if math.isnan(x) else (min(max(math.trunc(x), low), high) if math.isfinite(x) else (low, high)[x > 0]) & mask
    )


def half_of(x: np.float32) -> int:
    with np.errstate(over="ignore"):
        return int(np.float16(x).view(np.uint16))


def field(x: int, at: int, count: int, width: int, is_signed: bool) -> int:
    raw = (x >> at) & ((1 << count) - 1)
    return signed(raw, count) & ((1 << width) - 1) if is_signed and count else raw


def scalar_field(x: int, packed: int, width: int, is_signed: bool) -> tuple[int, int]:
    at, count = packed & (width - 1), min(packed >> 16 & 127, width)
    source = signed(x, width) if is_signed else x
    result = field(source, at, count, width, is_signed)
    return result, int(result != 0)


def perm(a: int, b: int, sel: int) -> int:
    both, out = a << 32 | b, 0
    for i in range(4):
        s = sel >> 8 * i & 255
        if s < 8:
            byte = both >> 8 * s & 255
        elif s < 12:
            byte = 255 * (both >> (16 * (s - 8) + 15) & 1)
        else:
            byte = 0 if s == 12 else 255
        out |= byte << 8 * i
    return out


def carry(x: int) -> tuple[int, int]:
    return x & M32, int(x > M32)


def borrow(x: int) -> tuple[int, int]:
    return x & M32, int(x < 0)


def nonzero(x: int) -> tuple[int, int]:
    return x, int(x != 0)


def overflow(x: int) -> tuple[int, int]:
    return x & M32, int(x != signed(x))


ORDER = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: a != b,
}


def value_of(bits: int, kind: str) -> Any:
    width = int(kind[1:])
    if kind == "f32":
        return number(bits)
    return signed(bits, width) if kind[0] == "i" else bits & ((1 << width) - 1)


def with_order(function: Callable[..., Any], kind: str) -> Callable[..., int]:
    width = int(kind[1:])

    def compute(*args: int) -> int:
        return int(function(*(value_of(x, kind) for x in args))) & ((1 << width) - 1)

    return compute


VECTOR: dict[str, Callable[..., Any]] = {}
for width in (16, 32, 64):
    mask = (1 << width) - 1
    VECTOR |= {
        f"v_mov_b{width}": lambda a: a,
        f"v_lshlrev_b{width}": lambda a, b, w=width, m=mask: b << (a & (w - 1)) & m,
        f"v_lshrrev_b{width}": lambda a, b, w=width: b >> (a & (w - 1)),
        f"v_ashrrev_i{width}": lambda a, b, w=width, m=mask: signed(b, w) >> (a & (w - 1)) & m,
    }
for width in (16, 32):
    mask = (1 << width) - 1
    VECTOR |= {
        f"v_cndmask_b{width}": lambda a, b, c: b if c else a,
        f"v_and_b{width}": lambda a, b: a & b,
        f"v_or_b{width}": lambda a, b: a | b,
        f"v_xor_b{width}": lambda a, b: a ^ b,
        f"v_not_b{width}": lambda a, m=mask: ~a & m,
        f"v_bitop3_b{width}": lambda a, b, c, m=mask: (a & b | ~a & c) & m,  # of the table 0xca
    }
VECTOR |= {
    "v_xnor_b32": lambda a, b: ~(a ^ b) & M32,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xor3_b32": lambda a, b, c: a ^ b ^ c,
    "v_bfe_u32": lambda a, b, c: field(a, b & 31, c & 31, 32, False),
    "v_bfe_i32": lambda a, b, c: field(signed(a), b & 31, c & 31, 32, True),
    "v_bfi_b32": lambda a, b, c: a & b | ~a & M32 & c,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_bcnt_u32_b32": lambda a, b: (a.bit_count() + b) & M32,
    "v_perm_b32": perm,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31) & M32,
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3) & M32,
    "v_lshl_or_b32": lambda a, b, c: a << (b & 31) & M32 | c,
    "v_add3_u32": lambda a, b, c: (a + b + c) & M32,
    "v_add_lshl_u32": lambda a, b, c: (a + b & M32) << (c & 31) & M32,
    "v_lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c & M32,
    "v_lshl_add_u64": lambda a, b, c: (a << (b & 7)) + c & M64,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c & M32,
    "v_mul_lo_u32": lambda a, b: a * b & M32,
    "v_mul_lo_u16": lambda a, b: a * b & M16,
    "v_mul_u32_u24": lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) & M32,
    "v_mad_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c & M32,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32 & M32,
    "v_add_co_u32": lambda a, b: carry(a + b),
    "v_sub_co_u32": lambda a, b: borrow(a - b),
    "v_subrev_co_u32": lambda a, b: borrow(b - a),
    "v_add_f32": floats(lambda a, b: a + b),
    "v_sub_f32": floats(lambda a, b: a - b),
    "v_subrev_f32": floats(lambda a, b: b - a),
    "v_mul_f32": floats(lambda a, b: a * b),
    **dict.fromkeys(("v_fma_f32", "v_fmac_f32", "v_fmamk_f32", "v_fmaak_f32"), fma),
    **dict.fromkeys(("v_mac_f32", "v_madmk_f32"), floats(lambda a, b, c: np.float32(a * b) + c)),
    "v_trunc_f32": floats(np.trunc),
    **dict.fromkeys(("v_rcp_f32", "v_rcp_iflag_f32"), floats(lambda a: np.float32(1) / a)),
    "v_cvt_f32_u32": lambda a: round_exact(a, 0),
    "v_cvt_f32_i32": lambda a: round_exact(signed(a), 0),
    "v_cvt_u32_f32": lambda a: to_int(a, 0, M32, M32),
    "v_cvt_i32_f32": lambda a: to_int(a, -(2**31), 2**31 - 1, M32),
    "v_cvt_u32_u16": lambda a: a,
    "v_cvt_i32_i16": lambda a: signed(a, 16) & M32,
    "v_cvt_f32_f16": lambda a: NAN if a & M16 >> 1 > 0x7C00 else bits_of(struct.unpack("<e", struct.pack("<H", a))[0]),
    "v_cvt_f16_f32": lambda a: NAN if np.isnan(number(a)) else half_of(number(a)),
}
VECTOR |= {f"v_cvt_f32_ubyte{i}": lambda a, i=i: bits_of(a >> 8 * i & 255) for i in range(4)}
for name in ("u32", "nc_u32"):
    VECTOR |= {
        f"v_add_{name}": lambda a, b: a + b & M32,
        f"v_sub_{name}": lambda a, b: a - b & M32,
        f"v_subrev_{name}": lambda a, b: b - a & M32,
    }
for name in ("u16", "nc_u16"):
    VECTOR |= {f"v_add_{name}": lambda a, b: a + b & M16, f"v_sub_{name}": lambda a, b: a - b & M16}
VECTOR |= dict.fromkeys(("v_addc_co_u32", "v_add_co_ci_u32"), lambda a, b, c: carry(a + b + c))
VECTOR |= dict.fromkeys(("v_subb_co_u32", "v_sub_co_ci_u32"), lambda a, b, c: borrow(a - b - c))
VECTOR |= dict.fromkeys(("v_subbrev_co_u32", "v_subrev_co_ci_u32"), lambda a, b, c: borrow(b - a - c))
VECTOR |= dict.fromkeys(("v_mad_u64_u32", "v_mad_co_u64_u32"), lambda a, b, c: (a * b + c & M64, int(a * b + c > M64)))
for kind in ("i16", "u16", "i32", "u32"):
    VECTOR |= {f"v_{name}3_{kind}": with_order(f, kind) for name, f in (("min", min), ("max", max))}
    VECTOR |= {f"v_{name}_{kind}": with_order(f, kind) for name, f in (("min", min), ("max", max))}
    VECTOR[f"v_med3_{kind}"] = with_order(lambda *x: sorted(x)[1], kind)
for kind in ("i16", "u16", "i32", "u32", "i64", "u64"):
    for name, f in ORDER.items():
        if name == "lg":
            continue
        compare = lambda a, b, f=f, kind=kind: int(f(value_of(a, kind), value_of(b, kind)))  # noqa: E731
        VECTOR |= {f"v_cmp_{name}_{kind}": compare, f"v_cmpx_{name}_{kind}": compare}

LESS, EQUAL, GREATER, UNORDERED = range(4)
FLOAT_ORDER = {"lt": {LESS}, "eq": {EQUAL}, "le": {LESS, EQUAL}, "gt": {GREATER}, "lg": {LESS, GREATER}}
FLOAT_ORDER |= {"ge": {GREATER, EQUAL}, "o": {LESS, EQUAL, GREATER}, "u": {UNORDERED}}
FLOAT_ORDER |= {f"n{name}": set(range(4)) - FLOAT_ORDER[name] for name in ("lt", "eq", "le", "gt", "lg", "ge")}


def relation(a: int, b: int) -> int:
    x, y = float(number(a)), float(number(b))
    return UNORDERED if math.isnan(x) or math.isnan(y) else LESS if x < y else GREATER if x > y else EQUAL


for name, holds in FLOAT_ORDER.items():
    compare = lambda a, b, holds=holds: int(relation(a, b) in holds)  # noqa: E731
    VECTOR |= {f"v_cmp_{name}_f32": compare, f"v_cmpx_{name}_f32": compare}

SCALAR: dict[str, Callable[..., Any]] = {}
for width in (32, 64):
    mask = (1 << width) - 1
    SCALAR |= {
        f"s_mov_b{width}": lambda a: a,
        f"s_cselect_b{width}": lambda a, b, c: a if c else b,
        f"s_and_b{width}": lambda a, b: nonzero(a & b),
        f"s_or_b{width}": lambda a, b: nonzero(a | b),
        f"s_xor_b{width}": lambda a, b: nonzero(a ^ b),
        f"s_nand_b{width}": lambda a, b, m=mask: nonzero(~(a & b) & m),
        f"s_nor_b{width}": lambda a, b, m=mask: nonzero(~(a | b) & m),
        f"s_xnor_b{width}": lambda a, b, m=mask: nonzero(~(a ^ b) & m),
        f"s_not_b{width}": lambda a, m=mask: nonzero(~a & m),
        f"s_brev_b{width}": lambda a, w=width: int(f"{a:0{w}b}"[::-1], 2),
        f"s_bcnt1_i32_b{width}": lambda a: nonzero(a.bit_count()),
        f"s_lshl_b{width}": lambda a, b, w=width, m=mask: nonzero(a << (b & (w - 1)) & m),
        f"s_lshr_b{width}": lambda a, b, w=width: nonzero(a >> (b & (w - 1))),
        f"s_ashr_i{width}": lambda a, b, w=width, m=mask: nonzero(signed(a, w) >> (b & (w - 1)) & m),
        f"s_bfe_u{width}": lambda a, b, w=width: scalar_field(a, b, w, False),
        f"s_bfe_i{width}": lambda a, b, w=width: scalar_field(a, b, w, True),
        f"s_bitcmp0_b{width}": lambda a, b, w=width: 1 - (a >> (b & (w - 1)) & 1),
        f"s_bitcmp1_b{width}": lambda a, b, w=width: a >> (b & (w - 1)) & 1,
        **dict.fromkeys((f"s_andn2_b{width}", f"s_and_not1_b{width}"), lambda a, b: nonzero(a & ~b)),
        **dict.fromkeys((f"s_orn2_b{width}", f"s_or_not1_b{width}"), lambda a, b, m=mask: nonzero((a | ~b) & m)),
    }
for infix in ("", "co_"):
    SCALAR |= {
        f"s_add_{infix}u32": lambda a, b: carry(a + b),
        f"s_sub_{infix}u32": lambda a, b: borrow(a - b),
        f"s_add_{infix}i32": lambda a, b: overflow(signed(a) + signed(b)),
        f"s_sub_{infix}i32": lambda a, b: overflow(signed(a) - signed(b)),
    }
SCALAR |= dict.fromkeys(("s_addc_u32", "s_add_co_ci_u32"), lambda a, b, c: carry(a + b + c))
SCALAR |= dict.fromkeys(("s_subb_u32", "s_sub_co_ci_u32"), lambda a, b, c: borrow(a - b - c))
for kind in ("i32", "u32", "u64"):
    for name in ("eq", "lg") if kind == "u64" else ("eq", "lg", "gt", "ge", "lt", "le"):
        SCALAR[f"s_cmp_{name}_{kind}"] = lambda a, b, f=ORDER[name], kind=kind: int(
            f(value_of(a, kind), value_of(b, kind))
        )
for kind in ("i32", "u32"):
    SCALAR |= {
        f"s_min_{kind}": lambda a, b, k=kind: (with_order(min, k)(a, b), int(value_of(a, k) < value_of(b, k))),
        f"s_max_{kind}": lambda a, b, k=kind: (with_order(max, k)(a, b), int(value_of(a, k) >= value_of(b, k))),
        f"s_mul_hi_{kind}": VECTOR[f"v_mul_hi_{kind}"],
    }
SCALAR |= {f"s_lshl{i}_add_u32": lambda a, b, i=i: carry((a << i) + b) for i in range(1, 5)}
SCALAR |= {
    "s_mul_i32": VECTOR["v_mul_lo_u32"],
    "s_mul_u64": lambda a, b: a * b & M64,
    "s_add_nc_u64": lambda a, b: a + b & M64,
    "s_sub_nc_u64": lambda a, b: a - b & M64,
    "s_abs_i32": lambda a: nonzero(abs(signed(a)) & M32),
    "s_sext_i32_i8": lambda a: signed(a, 8) & M32,
    "s_sext_i32_i16": lambda a: signed(a, 16) & M32,
    "s_pack_ll_b32_b16": lambda a, b: a & M16 | (b & M16) << 16,
    **{f"s_{name}": VECTOR[f"v_{name}"] for name in ("add_f32", "sub_f32", "mul_f32", "fmac_f32", "trunc_f32")},
    **{f"s_cvt_{name}": VECTOR[f"v_cvt_{name}"] for name in ("f32_u32", "f32_i32", "u32_f32", "i32_f32")},
    "v_s_rcp_f32": VECTOR["v_rcp_f32"],
}
CONSTANT_ONLY = {"s_movk_i32"}
NO_SUBNORMALS = {"v_mac_f32", "v_madmk_f32"}


def draw(rng: random.Random, kind: str, subnormals: bool = True) -> int:
    width = 1 if kind in ("mask", "scc") else int(kind.removeprefix("=")[1:])
    while True:
        value = rng.choice(EDGES) if rng.random() < 0.6 else rng.getrandbits(32)
        if width == 64:
            value |= (rng.choice((0, M32, 0x80000000, 1)) if rng.random() < 0.6 else rng.getrandbits(32)) << 32
        if subnormals or 0x3F000000 < value & 0x7FFFFFFF < 0x41000000:
            return value & ((1 << width) - 1)


def sources_of(op: arithmetic.Op, kinds: str) -> list[str]:
    return [kind for kind in op.sources if kind not in kinds]


def run_vector(
    name: str, op: arithmetic.Op, inputs: list[list[int]], arch: str = "gfx942", modifiers: str = ""
) -> list[Any]:
    """The results of each tuple of inputs, one a lane."""
    lanes = 64 if arch.startswith("gfx9") else 32
    waves = len(inputs) // lanes
    pair = lanes // 32
    vectors: dict[int, Any] = {}
    scalars: dict[int, Any] = {}
    words = []
    target = f"v[40:{41}]" if op.results[0][1:] == "64" else "v40"
    for n, kind in enumerate(op.sources):
        values = np.array([row[n] for row in inputs], np.uint64).reshape(waves, lanes)
        if kind == "mask":
            packed = np.packbits(values.astype(bool), axis=1, bitorder="little").view("<u4")
            scalars |= {20 + i: packed[:, i] for i in range(pair)}
            words.append("s[20:21]" if pair == 2 else "s20")
            continue
        at = 40 if kind[0] == "=" else 2 * n + 2
        vectors[at] = values & M32
        if kind.removeprefix("=")[1:] == "64":
            vectors[at + 1] = values >> np.uint64(32)
            words.append(f"v[{at}:{at + 1}]")
        elif kind[0] != "=":
            words.append(f"v{at}")
    mask = "s[30:31]" if pair == 2 else "s30"
    results = [{"mask": mask, "exec": ""}.get(kind, target) for kind in op.results]
    line = f"{name} {', '.join(word for word in results + words if word)} {modifiers}"
    m = probe([line], arch, vectors, scalars, waves)
    out = []
    for kind in op.results:
        if kind in ("mask", "exec"):
            raw = m.mask(30 if kind == "mask" else 126)
            out.append(m.lanes_of(raw).astype(int).ravel().tolist())
        else:
            low = m.v[40].ravel().astype(np.uint64) & np.uint64(M16 if kind[1:] == "16" else M32)
            high = m.v[41].ravel().astype(np.uint64) << np.uint64(32) if kind[1:] == "64" else np.uint64(0)
            out.append((low | high).tolist())
    return [row[0] if len(row) == 1 else row for row in zip(*out, strict=True)]


def run_scalar(name: str, op: arithmetic.Op, inputs: list[list[int]]) -> list[Any]:
    scalars: dict[int, Any] = {}
    words, given = [], []
    stored = [kind for kind in op.results if kind != "scc"]
    target = ("s[40:41]" if stored[0][1:] == "64" else "s40") if stored else ""
    before = []
    for n, kind in enumerate(op.sources):
        values = np.array([row[n] for row in inputs], np.uint64)
        if kind == "scc":
            scalars[60] = values.astype(np.uint32)
            before.append("s_cmp_lg_u32 s60, 0")
            continue
        at = 40 if kind[0] == "=" else 2 * n + 2
        scalars[at] = values & M32
        if kind[1:] == "64":
            scalars[at + 1] = values >> np.uint64(32)
            given.append(f"s[{at}:{at + 1}]")
        elif kind[0] != "=":
            given.append(f"s{at}")
    words = [target, *given] if target else given
    m = probe([*before, f"{name} {', '.join(words)}"], "gfx942", None, scalars, len(inputs))
    out = []
    for kind in op.results:
        if kind == "scc":
            out.append(m.scc.astype(int).tolist())
        else:
            out.append((m.wide[:, 20] if kind[1:] == "64" else m.s[:, 40]).tolist())
    return [row[0] if len(row) == 1 else row for row in zip(*out, strict=True)]


def agree(want: Any, got: Any, width: int) -> bool:
    if want is NAN:
        exponent, mantissa = (0x7F800000, 0x7FFFFF) if width == 32 else (0x7C00, 0x3FF)
        return got & exponent == exponent and bool(got & mantissa)
    return want == got


def check_op(
    name: str, op: arithmetic.Op, define: Callable[..., Any], run: Callable[..., list[Any]], count: int
) -> None:
    rng = random.Random(name)
    inputs = [[draw(rng, kind, name not in NO_SUBNORMALS) for kind in op.sources] for _ in range(count)]
    width = int(op.results[0][1:]) if op.results[0][1:].isdigit() else 1
    for row, got in zip(inputs, run(name, op, inputs), strict=True):
        want = define(*row)
        want, got = (x if isinstance(x, tuple) else (x,) for x in (want, got))
        assert all(agree(w, g, width) for w, g in zip(want, got, strict=True)), (
            f"{name} {[hex(x) for x in row]}: expected {want}, got {got}"
        )


@pytest.mark.parametrize("name", sorted(arithmetic.VECTOR))
def test_a_vector_opcode_computes_its_definition(name: str) -> None:
    modifiers = " bitop3:0xca" if name.startswith("v_bitop3") else ""
    run = lambda *args: run_vector(*args, modifiers=modifiers)  # noqa: E731
    check_op(name, arithmetic.VECTOR[name], VECTOR[name], run, 64 * WAVES)


@pytest.mark.parametrize("name", ["v_cndmask_b32", "v_add_co_ci_u32", "v_cmp_lt_i64", "v_cmpx_gt_i64", "v_mad_u64_u32"])
def test_masks_of_waves_of_32_lanes(name: str) -> None:
    run = lambda *args: run_vector(*args, arch="gfx1100")  # noqa: E731
    check_op(name, arithmetic.VECTOR[name], VECTOR[name], run, 32 * WAVES)


@pytest.mark.parametrize("name", sorted(set(arithmetic.SCALAR) - CONSTANT_ONLY))
def test_a_scalar_opcode_computes_its_definition(name: str) -> None:
    check_op(name, arithmetic.SCALAR[name], SCALAR[name], run_scalar, 400)


@pytest.mark.parametrize("name", sorted(arithmetic.SATURATED))
def test_clamp_saturates(name: str) -> None:
    bound = M16 if name.endswith("16") else M32
    sign = -1 if "sub" in name else 1
    run = lambda *args: run_vector(*args, modifiers="clamp")  # noqa: E731
    check_op(name, arithmetic.VECTOR[name], lambda a, b: min(max(a + sign * b, 0), bound), run, 64 * WAVES)


@pytest.mark.parametrize("name", sorted(arithmetic.PACKED))
def test_a_packed_opcode_takes_the_halves_it_names(name: str) -> None:
    rng, count = random.Random(name), 2 if name != "v_pk_fma_f32" else 3
    words = np.array([[draw(rng, "f32") for _ in range(64)] for _ in range(2 * count)], np.uint32)
    sources = ", ".join(f"v[{2 * n}:{2 * n + 1}]" for n in range(count))
    select, select_high = "[1,0,0]"[: 2 * count] + "]", "[1,0,1]"[: 2 * count] + "]"
    select, select_high = select.replace(",]", "]"), select_high.replace(",]", "]")
    lines = [f"{name} v[20:21], {sources} op_sel:{select} op_sel_hi:{select_high} neg_lo:{select_high} neg_hi:{select}"]
    m = probe(lines, vectors={n: words[None, n] for n in range(2 * count)})
    define = {"v_pk_add_f32": VECTOR["v_add_f32"], "v_pk_mul_f32": VECTOR["v_mul_f32"], "v_pk_fma_f32": fma}[name]
    for half, (pick, negate) in enumerate((("100", "101"), ("101", "100"))):
        for lane in range(64):
            given = [int(words[2 * n + int(pick[n]), lane]) ^ int(negate[n]) << 31 for n in range(count)]
            assert agree(define(*given), int(m.v[20 + half, 0, lane]), 32)


def test_packed_moves_take_one_half_of_each_source() -> None:
    m = probe(
        ["v_pk_mov_b32 v[4:5], v[0:1], v[2:3] op_sel:[1,0]"], vectors={n: np.full((1, 64), 10 + n) for n in range(4)}
    )
    assert m.v[4:6, 0, 0].tolist() == [11, 12]
    m = probe(["v_pk_mov_b32 v[4:5], 0, 7"])
    assert m.v[4:6, 0, 5].tolist() == [0, 7]


LANE = np.arange(64, dtype=np.uint32)[None]


def ones(value: int, lanes: int = 64) -> Any:
    return np.full((1, lanes), value, np.uint32)


def test_constants_and_modifiers_of_operands() -> None:
    lines = [
        "v_mov_b32_e32 v1, 1.0",
        "v_bfrev_b32_e32 v2, 0.5",
        "v_mov_b32_e32 v3, -16",
        "v_cndmask_b32_e64 v4, -v1, |v3|, s[2:3]",
        "v_add_f32_e64 v5, |v1|, -v1",
        "v_lshl_add_u64 v[6:7], v[8:9], 0, -1",
        "v_mul_f32_e32 v10, 0xc0000000, v1",
        "s_movk_i32 s4, 0x8000",
        "s_mov_b64 s[6:7], -1",
        "buffer_gl0_inv",
        "global_inv scope:SCOPE_SE",
        "s_waitcnt vmcnt(0) lgkmcnt(0)",
        "v_add_nc_u16 v11.h, v3.h, 2",
        "v_mov_b16_e32 v11.l, v1.h",
        "v_cmp_eq_f32_e64 s[8:9], |v1|, 1.0",
    ]
    m = probe(lines, vectors={8: ones(5), 9: ones(0), 11: ones(0)}, scalars={2: np.array([1]), 3: np.array([0])})
    assert m.v[1, 0, 0] == 0x3F800000
    assert m.v[2, 0, 0] == 0xFC
    assert m.v[3, 0, 0] == M32 - 15
    assert m.v[4, 0, :2].tolist() == [0x7FFFFFF0, 0xBF800000]
    assert m.v[5, 0, 0] == 0
    assert m.v[6:8, 0, 0].tolist() == [4, 0]
    assert m.v[10, 0, 0] == 0xC0000000
    assert m.s[0, 4] == 0xFFFF8000
    assert m.wide[0, 3] == M64
    assert m.wide[0, 4] == M64
    assert m.v[11, 0, 0] == 0x00013F80


def test_results_of_16_bits_clear_the_upper_half_on_cdna_and_keep_it_on_rdna() -> None:
    lines = ["v_add_u16_e32 v1, v0, v0"]
    for arch, lanes, want in (("gfx942", 64, 0x0002), ("gfx1100", 32, 0xABCD0002)):
        m = probe(lines, arch, {0: ones(0x50001, lanes), 1: ones(0xABCD1234, lanes)})
        assert m.v[1, 0, 0] == want


def test_mac_takes_subnormals_for_zeros() -> None:
    lines = ["v_mac_f32_e32 v2, v0, v1", "v_madmk_f32 v3, v1, 0x3f800000, v0"]
    m = probe(lines, vectors={0: ones(0x80000001), 1: ones(0x3F800000), 2: ones(0x00400000)})
    assert m.v[2:4, 0, 0].tolist() == [0, 0x3F800000]


def test_inactive_lanes_keep_their_registers_and_compare_as_zero() -> None:
    lines = ["v_mov_b32_e32 v1, 5", "v_cmp_eq_u32_e64 s[2:3], v0, v0", "v_add_co_u32_e64 v2, s[4:5], -1, 1"]
    m = probe(lines, vectors={0: LANE, 1: ones(9)}, exec_mask=0b110)
    assert m.v[1, 0, :4].tolist() == [9, 5, 5, 9]
    assert m.v[2, 0, 3] == UNDEFINED
    assert m.wide[0, 1] == m.wide[0, 2] == 0b110


def test_dual_instructions_read_before_they_write() -> None:
    m = probe(["v_dual_mov_b32 v0, v1 :: v_dual_mov_b32 v1, v0"], "gfx1100", {0: ones(1, 32), 1: ones(2, 32)})
    assert (m.v[0, 0, 0], m.v[1, 0, 0]) == (2, 1)
    lines = ["v_dual_cndmask_b32 v2, v0, v1 :: v_dual_add_f32 v3, v0, v1"]
    m = probe(lines, "gfx1100", {0: ones(0, 32), 1: ones(0x3F800000, 32)}, {106: np.array([2])})
    assert m.v[2, 0, :2].tolist() == [0, 0x3F800000]
    assert m.v[3, 0, 0] == 0x3F800000


DPP = {
    "quad_perm:[3,2,1,0]": lambda i: i ^ 3,
    "row_shl:1": lambda i: i + 1 if i % 16 < 15 else None,
    "row_shr:3": lambda i: i - 3 if i % 16 >= 3 else None,
    "row_ror:8": lambda i: i - i % 16 + (i % 16 - 8) % 16,
    "row_mirror": lambda i: i ^ 15,
    "row_half_mirror": lambda i: i ^ 7,
    "wave_shl:1": lambda i: i + 1 if i < 63 else None,
    "wave_shr:1": lambda i: i - 1 if i else None,
    "row_bcast:15": lambda i: i // 16 * 16 - 1 if i >= 16 else None,
    "row_bcast:31": lambda i: 31 if i >= 32 else None,
    "row_newbcast:5": lambda i: i - i % 16 + 5,
    "row_share:4": lambda i: i - i % 16 + 4,
    "row_xmask:2": lambda i: i ^ 2,
}


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("control", DPP)
def test_dpp_reads_another_lane(control: str, bound: bool) -> None:
    line = f"v_add_u32_dpp v1, v0, v2 {control} row_mask:0xb bank_mask:0x7{' bound_ctrl:1' if bound else ''}"
    active = [i % 5 != 2 for i in range(64)]
    mask = sum(on << i for i, on in enumerate(active))
    m = probe([line], vectors={0: LANE + 100, 1: ones(7), 2: ones(1000)}, exec_mask=mask)
    for i in range(64):
        source = DPP[control](i)
        valid = source is not None and active[source]
        chosen = 0xB >> i // 16 & 1 and 0x7 >> i % 16 // 4 & 1
        value = 1000 + (100 + source if valid else 0)
        assert m.v[1, 0, i] == (value if active[i] and chosen and (valid or bound) else 7), i


def test_dpp_of_both_rows_of_a_wave32() -> None:
    lines = ["v_add_co_u32_e64_dpp v1, vcc_lo, v0, v0 row_xmask:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"]
    m = probe(lines, "gfx1100", {0: LANE[:, :32]})
    assert m.v[1, 0].tolist() == [i + (i ^ 1) for i in range(32)]


def test_sdwa_selects_and_places_bytes_and_words() -> None:
    source = ones(0x8182F384)
    lines = [
        "v_mov_b32_sdwa v1, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3",
        "v_mov_b32_sdwa v2, v0 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:WORD_0",
        "v_mov_b32_sdwa v3, v0 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_1",
        "v_min_i32_sdwa v4, sext(v0), v5 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
        "v_cmp_gt_u16_sdwa vcc, v0, v5 src0_sel:WORD_1 src1_sel:DWORD",
    ]
    m = probe(lines, vectors={0: source, 3: ones(0x11112222), 5: ones(0xFFFF0005)})
    assert [int(m.v[n, 0, 0]) for n in range(1, 5)] == [0x81, 0x8400, 0x00F32222, 0xFFFF0005]
    assert m.mask(106)[0] == M64


def test_lanes_are_read_and_written_by_number() -> None:
    lines = [
        "v_readfirstlane_b32 s2, v0",
        "v_readlane_b32 s3, v0, 63",
        "s_mov_b32 s4, 66",
        "v_readlane_b32 s5, v0, s4",
        "v_writelane_b32 v1, s2, 1",
        "v_mbcnt_lo_u32_b32 v2, -1, 0",
        "v_mbcnt_hi_u32_b32 v2, -1, v2",
    ]
    m = probe(lines, vectors={0: LANE + 50, 1: ones(0)}, exec_mask=M64 ^ 0b11)
    assert m.s[0, [2, 3, 5]].tolist() == [52, 113, 52]
    assert m.v[1, 0, :3].tolist() == [0, 52, 0]
    assert m.v[2, 0, 2:].tolist() == list(range(2, 64))
    assert probe(["v_readfirstlane_b32 s2, v0"], vectors={0: LANE + 50}, exec_mask=0).s[0, 2] == 50


def test_permutes_between_lanes() -> None:
    rng = random.Random(5)
    order = rng.sample(range(64), 64)
    given = {0: LANE + 100, 1: 4 * np.array([order], np.uint32)}
    m = probe(["ds_bpermute_b32 v2, v1, v0 offset:8", "ds_permute_b32 v3, v1, v0"], vectors=given, exec_mask=M64 ^ 1)
    for i in range(1, 64):
        source = (order[i] + 2) % 64
        assert m.v[2, 0, i] == (100 + source if source else 0)
        assert m.v[3, 0, order[i]] == 100 + i or order[i] == 0
    m = probe(["ds_permute_b32 v3, v1, v0"], vectors={0: LANE, 1: ones(8)})
    assert m.v[3, 0, :4].tolist() == [0, 0, UNDEFINED, 0]  # which of 64 values arrives is not said

    lines = ["v_permlanex16_b32 v2, v0, s2, 0xfedcba98 op_sel:[1,0]", "v_permlane16_b32 v3, v0, s2, 0xfedcba98"]
    m = probe(lines, "gfx1100", {0: LANE[:, :32]}, {2: np.array([0x00000001])})
    assert m.v[2, 0, :9].tolist() == [17, *[16] * 7, 24]
    assert m.v[3, 0, 16:25].tolist() == [17, *[16] * 7, 24]

    m = probe(["v_permlane16_swap_b32_e32 v0, v1"], "gfx950", {0: LANE, 1: LANE + 100})
    assert m.v[0, 0].tolist() == [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]
    assert m.v[1, 0].tolist() == [*range(16, 32), *range(116, 132), *range(48, 64), *range(148, 164)]
    m = probe(["v_permlane32_swap_b32_e32 v0, v1"], "gfx950", {0: LANE, 1: LANE + 100})
    assert m.v[0, 0].tolist() == [*range(32), *range(100, 132)]
    assert m.v[1, 0].tolist() == [*range(32, 64), *range(132, 164)]


SWIZZLES = {
    "SWAP,16": lambda i: i ^ 16,
    "REVERSE,8": lambda i: i ^ 7,
    "BROADCAST,4,1": lambda i: i - i % 4 + 1,
    "QUAD_PERM,3,0,1,2": lambda i: i - i % 4 + (3, 0, 1, 2)[i % 4],
    'BITMASK_PERM,"01pip"': lambda i: i & 0b100000 | 0b01000 | i & 0b101 | ~i & 0b10,
}


@pytest.mark.parametrize("pattern", SWIZZLES)
def test_swizzle(pattern: str) -> None:
    m = probe([f"ds_swizzle_b32 v1, v0 offset:swizzle({pattern})"], vectors={0: LANE + 5}, exec_mask=M64 ^ 1)
    sources = [SWIZZLES[pattern](i) for i in range(64)]
    assert m.v[1, 0, 1:].tolist() == [source + 5 if source else 0 for source in sources[1:]]


def test_every_lane_instruction_is_tested() -> None:
    text = Path(__file__).read_text()
    assert not [name for name in LANES if name not in text]
    assert set(VECTOR) >= set(arithmetic.VECTOR)
    assert set(SCALAR) | CONSTANT_ONLY >= set(arithmetic.SCALAR)


SAVEEXEC = {
    "s_and_saveexec_b64": lambda a, b: a & b,
    "s_or_saveexec_b64": lambda a, b: a | b,
    "s_xor_saveexec_b64": lambda a, b: a ^ b,
    "s_andn2_saveexec_b64": lambda a, b: a & ~b,
    "s_and_not1_saveexec_b64": lambda a, b: a & ~b,
}


@pytest.mark.parametrize("name", SAVEEXEC)
def test_saveexec(name: str) -> None:
    mask, source = 0xFF00FF00FF00FF00, 0xF0F0F0F0F0F0F0F0
    scalars = {2: np.array([source & M32]), 3: np.array([source >> 32])}
    m = probe([f"{name} s[2:3], s[2:3]", "v_mov_b32_e32 v1, 1"], scalars=scalars, exec_mask=mask)
    want = SAVEEXEC[name](source, mask)
    assert m.wide[0, 1] == mask
    assert m.mask(126)[0] == want
    assert [x == 1 for x in m.v[1, 0].tolist()] == [bool(want >> i & 1) for i in range(64)]
    assert m.scc[0] == (want != 0)


def test_branches_part_and_join_the_waves() -> None:
    lines = [
        "s_mov_b32 s2, 0",
        ".LBB0_1:",
        "s_add_i32 s2, s2, 1",
        "s_cmp_lt_i32 s2, s3",
        "s_cbranch_scc1 .LBB0_1",
        "v_cmp_eq_u32_e64 vcc, s3, 2",
        "s_cbranch_vccz .LBB0_2",
        "s_mov_b32 s2, 100",
        "s_branch .LBB0_3",
        ".LBB0_2:",
        "s_add_i32 s2, s2, 10",
        ".LBB0_3:",
        "s_mov_b64 s[4:5], exec",
        "s_mov_b64 exec, 0",
        "s_cbranch_execnz .LBB0_1",
        "s_cbranch_execz .LBB0_4",
        "s_mov_b32 s2, 0",
        ".LBB0_4:",
        "s_mov_b64 exec, s[4:5]",
        "s_cmp_eq_u32 s2, s2",
        "s_cbranch_scc0 .LBB0_1",
        "s_cbranch_vccnz .LBB0_5",
        "s_add_i32 s2, s2, 1",
        ".LBB0_5:",
    ]
    m = probe(lines, scalars={3: np.array([1, 2, 5])}, waves=3)
    assert m.s[:, 2].tolist() == [12, 100, 16]


def of(array: Any) -> tuple[int, Memory]:
    """Its address, and a memory that holds it alone."""
    return array.__array_interface__["data"][0], Memory([(array.__array_interface__["data"][0], array.view(np.uint8))])


def address_registers(address: Any) -> dict[int, Any]:
    address = np.asarray(address, np.uint64)
    return {0: address.astype(np.uint32)[None], 1: (address >> np.uint64(32)).astype(np.uint32)[None]}


LOADS = {
    "global_load_dwordx4 v[4:7]": 16,
    "global_load_b128 v[4:7]": 16,
    "global_load_dwordx2 v[4:5]": 8,
    "global_load_b64 v[4:5]": 8,
    "flat_load_dword v4": 4,
    "global_load_b32 v4": 4,
    "global_load_ushort v4": 2,
    "global_load_u16 v4": 2,
    "global_load_ubyte v4": 1,
    "global_load_u8 v4": 1,
}


@pytest.mark.parametrize("text", LOADS)
def test_loads_at_an_offset(text: str) -> None:
    data = np.arange(4096, dtype=np.uint16).view(np.uint8)
    base, memory = of(data)
    size = LOADS[text]
    off = ", off" if text.startswith("global") else ""
    addresses = base + 32 + 16 * np.arange(64)
    m = probe([f"{text}, v[0:1]{off} offset:-16"], vectors=address_registers(addresses), memory=memory)
    raw = np.stack([m.v[4 + n, 0] for n in range(max(1, size // 4))], axis=1).view(np.uint8)[:, :size]
    assert (raw == data[16 : 16 + 1024].reshape(64, 16)[:, :size]).all()


def test_loads_of_half_a_register_and_with_a_sign() -> None:
    data = np.array([0x8182, 0x8384], np.uint16)
    base, memory = of(data)
    lines = [
        "global_load_d16_b16 v4, v[0:1], off",
        "global_load_d16_hi_b16 v5, v[0:1], off",
        "global_load_short_d16_hi v6, v[0:1], off",
        "global_load_d16_u8 v7, v[0:1], off offset:3",
        "global_load_sbyte v8, v[0:1], off",
        "global_load_i16 v9, v[0:1], off",
        "global_load_d16_hi_u8 v10, v[0:1], off",
    ]
    old = {n: ones(0x11112222) for n in range(4, 11)}
    m = probe(lines, vectors={**address_registers([base] * 64), **old}, memory=memory)
    want = [0x11118182, 0x81822222, 0x81822222, 0x11110083, 0xFFFFFF82, 0xFFFF8182, 0x00822222]
    assert m.v[4:11, 0, 0].tolist() == want


def test_stores_of_each_size_to_a_scalar_base() -> None:
    stores = {
        "global_store_dwordx4 v2, v[4:7]": 0x1000F000E000D000C000B000A0009,
        "global_store_b64 v2, v[4:5]": 0,
        "global_store_dword v2, v4": 0,
        "global_store_short v2, v4": 0,
        "global_store_byte v2, v4": 0,
        "global_store_byte_d16_hi v2, v4": 16,
        "global_store_d16_hi_b16 v2, v4": 16,
    }
    for text in stores:
        data = np.zeros(1024, np.uint8)
        base, memory = of(data)
        vectors = {2: 16 * LANE, **{n: LANE * 0x01010101 + n for n in range(4, 8)}}
        scalars = {2: np.array([base & M32]), 3: np.array([base >> 32])}
        probe([f"{text}, s[2:3]"], vectors=vectors, scalars=scalars, memory=memory, exec_mask=M64 ^ 1)
        size = 16 if "x4" in text else 8 if "b64" in text else 4 if "dword" in text else 1 if "byte" in text else 2
        shift = 16 if "hi" in text else 0
        for lane in range(64):
            row = data[16 * lane : 16 * lane + 16].tobytes()
            words = b"".join(int(vectors[n][0, lane]).to_bytes(4, "little") for n in range(4, 8))[shift // 8 :]
            assert row == (words[:size] if lane else b"\0" * size) + bytes(16 - size), (text, lane)


def test_scalar_loads_buffers_and_atomics() -> None:
    data = np.arange(64, dtype=np.uint32)
    base, memory = of(data)
    pair = {2: np.array([base & M32]), 3: np.array([base >> 32])}
    m = probe(["v_mov_b32_e32 v1, 0", "global_load_dword v2, v1, s[0:1]"])  # of the arguments: a word of nothing here
    assert m.v[2, 0, 0] == 0
    m = probe(
        ["s_load_dwordx4 s[8:11], s[2:3], 0x10", "s_load_b64 s[12:13], s[2:3], s20 offset:0x8"],
        "gfx942",
        None,
        {**pair, 20: np.array([16])},
        memory=memory,
    )
    assert m.s[0, 8:14].tolist() == [4, 5, 6, 7, 6, 7]

    buffer = {**pair, 4: np.array([16]), 5: np.array([0x31027000])}
    lines = ["buffer_load_b32 v1, v0, s[2:5], 0 offen offset:4", "buffer_store_b32 v2, v0, s[2:5], null offen"]
    given = {0: np.array([[0, 4, 8, 12, 0x80000000, *[M32 - 1] * 27]], np.uint32), 1: ones(9, 32), 2: ones(77, 32)}
    m = probe(lines, "gfx1100", given, buffer, memory=memory)
    assert m.v[1, 0, :6].tolist() == [1, 2, 3, 0, 0, 0]
    assert data[:6].tolist() == [77, 77, 77, 77, 4, 5]

    total = np.zeros(2, np.uint64)
    base, memory = of(total)
    lines = [
        "global_atomic_add_x2 v[0:1], v[2:3], off",
        "global_atomic_add_u64 v4, v[2:3], s[2:3] offset:8 scope:SCOPE_DEV",
    ]
    vectors = {**address_registers([base] * 64), 2: ones(M32), 3: ones(0), 4: ones(0)}
    probe(
        lines,
        "gfx942",
        vectors,
        {2: np.array([base & M32]), 3: np.array([base >> 32])},
        memory=memory,
        exec_mask=0b1011,
    )
    assert total.tolist() == [3 * M32, 3 * M32]


def test_local_memory_belongs_to_a_work_group_and_barriers_order_it() -> None:
    lines = [
        "v_lshlrev_b32_e32 v2, 2, v0",
        "v_add_u32_e32 v3, s16, v0",
        "ds_write_b32 v2, v3",
        "s_barrier",
        "v_xor_b32_e32 v2, 0x1fc, v2",
        "ds_read_b32 v4, v2",
        "ds_read2_b32 v[6:7], v5 offset0:1 offset1:3",
        "ds_load_2addr_stride64_b32 v[12:13], v5 offset1:1",
        "ds_read_b64 v[14:15], v5 offset:8",
        "ds_read_b64 v[18:19], v5 offset:10",
        "ds_store_b8 v2, v4",
        "ds_load_u8 v16, v2",
        "ds_write2_b64 v5, v[6:7], v[6:7] offset0:2 offset1:4",
        "ds_read_b128 v[8:11], v5",
    ]
    scalars = {16: np.repeat(np.array([0, 1000]), 2)}
    m = probe(
        lines, vectors={5: np.zeros((4, 64), np.uint32)}, scalars=scalars, waves=4, waves_per_group=2, shared_bytes=512
    )
    assert m.v[4].reshape(2, 128).tolist() == [[1000 * g + (i ^ 127) for i in range(128)] for g in range(2)]
    assert m.v[6:12, 2, 0].tolist() == [1001, 1003, 1000, 1001, 1002, 1003]
    assert m.v[12:16, 2, 0].tolist() == [1000, 1064, 1002, 1003]
    assert m.v[18:20, 2, 0].tolist() == [1003 << 16, 1004 << 16]
    assert (m.v[16] == m.v[4] & 0xFF).all()
    with pytest.raises(MissingLanes, match="barrier"):
        branch = ["s_cmp_eq_u32 s2, 0", "s_cbranch_scc0 .LBB0_1", "s_barrier", ".LBB0_1:"]
        probe(branch, scalars={2: np.array([0, 1])}, waves=2, waves_per_group=2)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OutsideAllocation, "global_load_dword v4, v[0:1], off offset:256"),
        (OutsideAllocation, "global_store_dword v[0:1], v2, off offset:-4"),
        (Misaligned, "global_load_dword v4, v[0:1], off offset:2"),
        (Misaligned, "global_load_dwordx4 v[4:7], v[0:1], off offset:2"),
        (Misaligned, "global_store_short v[0:1], v2, off offset:1"),
        (Misaligned, "global_atomic_add_x2 v[0:1], v[2:3], off offset:4"),
        (ConflictingStores, "global_store_dword v[0:1], v2, off"),
        (OutsideAllocation, "ds_write_b8 v2, v2"),
        (OutsideAllocation, "s_load_dword s4, s[2:3], 0x100"),
        (Misaligned, "s_load_dword s4, s[2:3], 0x2"),
        (OutsideAllocation, "global_load_dword v4, v[4:5], off"),  # registers that nothing has written
        (UnknownInstruction, "v_frobnicate_b32 v0, v1"),
        (UnknownInstruction, "global_atomic_cmpswap v[0:1], v[2:3], off"),
        (UnknownInstruction, "v_add_f32_e64 v0, v1, v2 mul:2"),
        (UnknownInstruction, "v_add_f32_e64 v0, v1, v2 clamp"),
        (UnknownInstruction, "v_add_u32_e64 v0, -v1, v2"),
        (UnknownInstruction, "v_add_u32_dpp v0, v1, v2 row_frob:1 row_mask:0xf bank_mask:0xf"),
        (UnknownInstruction, "global_load_dword v4, v[0:1], off frob:1"),
        (UnknownInstruction, "global_load_dword v4, v[0:1], off lds"),
        (UnknownInstruction, "v_mov_b32_e32 v0, src_scc"),
        (UnknownInstruction, "v_mov_b32_e32 v[0:1], v2"),
        (UnknownInstruction, "v_add_u32_e32 v0, v1, v2, v3"),
        (UnknownInstruction, "v_add_u32_e32 v0, v1"),
        (UnknownInstruction, "s_and_b64 s[2:3], s[2:3], 0xffffffff"),
        (UnknownInstruction, "s_mov_b64 s[3:4], 0"),
        (UnknownInstruction, "s_branch .LBB0_9"),
    ],
)
def test_what_must_raise_does(error: type[ExecutionError], line: str) -> None:
    data = np.zeros(64, np.uint32)
    base, memory = of(data)
    vectors = {**address_registers([base] * 64), 2: LANE, 3: ones(0)}
    scalars = {2: np.array([base & M32]), 3: np.array([base >> 32])}
    with pytest.raises(error):
        probe([line], vectors=vectors, scalars=scalars, memory=memory)


def test_missing_lanes_of_a_permute_are_an_error() -> None:
    with pytest.raises(MissingLanes):
        probe(["v_permlanex16_b32 v2, v0, 0, 0"], "gfx1100", {0: LANE[:, :32]}, exec_mask=0xFFFF)
    with pytest.raises(MissingLanes):
        probe(["v_permlane32_swap_b32_e32 v0, v1"], "gfx950", {0: LANE, 1: LANE}, exec_mask=1)


def test_stores_of_one_value_to_one_address_are_no_conflict() -> None:
    data = np.zeros(1, np.uint32)
    base, memory = of(data)
    probe(["global_store_dword v[0:1], v2, off"], vectors={**address_registers([base] * 64), 2: ones(6)}, memory=memory)
    assert data[0] == 6


KERNEL = """
	.amdgcn_target "amdgpu9.42-amd-amdhsa-unknown-gfx942"
k:
	s_load_dwordx2 s[2:3], s[0:1], {offset}
	s_waitcnt lgkmcnt(0)
	s_branch .LBB0_0
	.p2align	8
.LBB0_0:
	s_load_dword s7, s[0:1], 0x8
	v_mov_b32_e32 v1, s4
	s_lshl_b32 s6, s4, 2
	v_mov_b32_e32 v2, s6
	v_mov_b32_e32 v3, s7
	global_store_dword v2, v3, s[2:3]
	s_endpgm
.Lfunc_end0:
	.amdhsa_kernel k
		.amdhsa_kernarg_size 16
		.amdhsa_user_sgpr_count 4
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_user_sgpr_kernarg_preload_length 2
		.amdhsa_system_sgpr_workgroup_id_x 1
	.end_amdhsa_kernel
	.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
    .group_segment_fixed_size: 0
	.end_amdgpu_metadata
"""


def test_a_kernel_finds_its_arguments_and_work_group() -> None:
    data = np.zeros(3, np.int32)
    base, memory = of(data)
    program = gcn.parse(KERNEL.format(offset="0x0"))
    assert program.parameters == (8, 4)
    gcn.run(program, [base, -5], (3, 1, 1), 64, 0, memory, random.Random(0))
    assert data.tolist() == [-5, -5, -5]
    hidden = KERNEL.replace("        .value_kind:     by_value\n", "        .value_kind:     hidden_group_size_x\n")
    gcn.run(gcn.parse(hidden.format(offset="0x0")), [base], (3, 1, 1), 64, 0, memory)
    assert data.tolist() == [64, 64, 64]
    with pytest.raises(ValueError, match="args: expected 2 values, got 1"):
        gcn.run(program, [base], (3, 1, 1), 64, 0, memory)
    with pytest.raises(ExecutionError, match="preload"):
        gcn.run(gcn.parse(KERNEL.format(offset="0x8")), [base, 1], (3, 1, 1), 64, 0, memory)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
@pytest.mark.parametrize("op", ["translate_loc", "store_kv", "store_kv_flashmla", "build_read"])
def test_compiled_kernels_do_what_the_reference_does(arch: str, op: str) -> None:
    kernel = ExecutingLauncher(Target.parse(arch), random.Random(3)).bind(op)
    for case in list(testing.cases(op))[5::97]:
        testing.check(op, kernel, case, torch.device("cpu"))
