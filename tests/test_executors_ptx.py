"""The executor of PTX: every opcode beside a plain definition on edge values, and every error that it raises."""

from __future__ import annotations

import functools
import math
import random
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from portakv.conformance.executors import ptx
from portakv.conformance.executors.errors import (
    ConflictingStores,
    ExecutionError,
    Misaligned,
    MissingLanes,
    OutsideAllocation,
    UnknownInstruction,
)
from portakv.conformance.executors.memory import Memory

HEADER = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u64 kernel_param_1
)
.reqntid 32
{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<19>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
"""
WHERE = """
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r4, %r2, %r3, %r1;
    mul.wide.u32 %rd2, %r4, 8;
    add.s64 %rd3, %rd1, %rd2;
"""
"""%rd3 is the address of the thread's own 8 bytes."""


def execute(
    body: str,
    cells: np.ndarray,
    grid: tuple[int, int, int] = (1, 1, 1),
    threads: int = 32,
    schedule: random.Random | None = None,
    shared: int = 0,
) -> np.ndarray:
    """Run `body` on 64-bit `cells`, of which it changes a copy."""
    tensor = torch.from_numpy(cells.astype(np.uint64).view(np.int64).copy())
    program = ptx.parse(f"{HEADER}{WHERE}{body}\n    ret;\n}}\n")
    args = [tensor.data_ptr(), 7]
    ptx.run(program, args, grid, threads, shared, Memory.of_tensors([tensor]), schedule)
    return tensor.numpy().view(np.uint64)


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> bits - 1 else x


def number(x: int, kind: str) -> int:
    """The value of a bit pattern of type "s32" or "u64"."""
    bits = int(kind[1:])
    return signed(x, bits) if kind[0] == "s" else x & ((1 << bits) - 1)


def truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def field(a: int, position: int, length: int, kind: str) -> int:
    """bfe, bit by bit as the ISA defines it."""
    bits = int(kind[1:])
    position, length = position & 255, length & 255
    sign = 0 if kind[0] == "u" or length == 0 else a >> min(position + length - 1, bits - 1) & 1
    return sum((a >> position + i & 1 if i < length and position + i < bits else sign) << i for i in range(bits))


def permuted(a: int, b: int, control: int) -> int:
    source = [x >> 8 * i & 255 for x in (a, b) for i in range(4)]
    out = 0
    for i in range(4):
        nibble = control >> 4 * i & 15
        byte = source[nibble & 7]
        out |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return out


def single(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x & 0xFFFFFFFF))[0]


def rounded(x: float) -> int:
    """The bits of the nearest float32, NaN as the canonical one."""
    if math.isnan(x):
        return 0x7FFFFFFF
    with np.errstate(over="ignore"):
        return int(np.float64(x).astype(np.float32).view(np.uint32))


EDGES = [0, 1, 2, 7, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF]
EDGES += [2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
EDGES += [0x123456789ABCDEF0, 0xFEDCBA9876543210]
FLOATS = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F800001, 0x7F7FFFFF]
FLOATS += [0x7F800000, 0xFF800000, 0x7FC00001, 0xFF812345, 0x33800000, 0x4B7FFFFF, 0x3E19999A]
SHIFTS = {
    "shl": lambda a, n, bits: a << n if n < bits else 0,
    "shr": lambda a, n, bits: a >> min(n, bits),
}

Define = Callable[..., int]
INTEGERS: dict[str, tuple[tuple[str, ...], str, Define]] = {}
"""Full name: types of the sources, of the result, and its definition on Python's integers."""
for bits in (16, 32, 64):
    for sign in "us":
        kind = f"{sign}{bits}"
        INTEGERS |= {
            f"add.{kind}": ((kind, kind), kind, lambda a, b: a + b),
            f"sub.{kind}": ((kind, kind), kind, lambda a, b: a - b),
            f"min.{kind}": ((kind, kind), kind, min),
            f"max.{kind}": ((kind, kind), kind, max),
            f"mul.lo.{kind}": ((kind, kind), kind, lambda a, b: a * b),
            f"mul.hi.{kind}": ((kind, kind), kind, lambda a, b, n=bits: a * b >> n),
            f"mad.lo.{kind}": ((kind, kind, kind), kind, lambda a, b, c: a * b + c),
            f"mad.hi.{kind}": ((kind, kind, kind), kind, lambda a, b, c, n=bits: (a * b >> n) + c),
            f"div.{kind}": ((kind, kind), kind, truncated),
            f"rem.{kind}": ((kind, kind), kind, lambda a, b: a - truncated(a, b) * b),
            f"shr.{kind}": ((kind, "u32"), kind, lambda a, n, bits=bits: SHIFTS["shr"](a, n, bits)),
        }
        for name, order in {
            "eq": lambda a, b: a == b,
            "ne": lambda a, b: a != b,
            "lt": lambda a, b: a < b,
            "le": lambda a, b: a <= b,
            "gt": lambda a, b: a > b,
            "ge": lambda a, b: a >= b,
        }.items():
            INTEGERS[f"setp.{name}.{kind}"] = ((kind, kind), "pred", order)
        if bits < 64:
            wide = f"{sign}{2 * bits}"
            INTEGERS[f"mul.wide.{kind}"] = ((kind, kind), wide, lambda a, b: a * b)
            INTEGERS[f"mad.wide.{kind}"] = ((kind, kind, wide), wide, lambda a, b, c: a * b + c)
        if bits > 16:
            INTEGERS[f"bfe.{kind}"] = (
                (kind, "u32", "u32"),
                kind,
                lambda a, p, n, kind=kind: field(a & ((1 << int(kind[1:])) - 1), p, n, kind),
            )
        for other in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
            INTEGERS[f"cvt.{other}.{kind}"] = ((kind,), other, lambda a: a)
            INTEGERS[f"cvt.{kind}.{other}"] = ((other,), kind, lambda a: a)
    INTEGERS |= {
        f"abs.s{bits}": ((f"s{bits}",), f"s{bits}", abs),
        f"neg.s{bits}": ((f"s{bits}",), f"s{bits}", lambda a: -a),
        f"and.b{bits}": ((f"u{bits}", f"u{bits}"), f"u{bits}", lambda a, b: a & b),
        f"or.b{bits}": ((f"u{bits}", f"u{bits}"), f"u{bits}", lambda a, b: a | b),
        f"xor.b{bits}": ((f"u{bits}", f"u{bits}"), f"u{bits}", lambda a, b: a ^ b),
        f"not.b{bits}": ((f"u{bits}",), f"u{bits}", lambda a: ~a),
        f"shl.b{bits}": ((f"u{bits}", "u32"), f"u{bits}", lambda a, n, bits=bits: SHIFTS["shl"](a, n, bits)),
        f"shr.b{bits}": ((f"u{bits}", "u32"), f"u{bits}", lambda a, n, bits=bits: SHIFTS["shr"](a, n, bits)),
        f"mov.b{bits}": ((f"u{bits}",), f"u{bits}", lambda a: a),
        f"selp.b{bits}": ((f"u{bits}", f"u{bits}", "pred"), f"u{bits}", lambda a, b, p: a if p else b),
    }
INTEGERS |= {
    "prmt.b32": (("u32", "u32", "u32"), "u32", permuted),
    "and.pred": (("pred", "pred"), "pred", lambda a, b: a & b),
    "or.pred": (("pred", "pred"), "pred", lambda a, b: a | b),
    "xor.pred": (("pred", "pred"), "pred", lambda a, b: a ^ b),
    "not.pred": (("pred",), "pred", lambda a: 1 - a),
}


def register(kind: str, i: int) -> str:
    """A register wide enough for the type; none has 8 bits."""
    if kind == "pred":
        return f"%p{i}"
    return {8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}[int(kind[1:])] + str(i)


def operate(name: str, kinds: tuple[str, ...], result: str, columns: list[list[int]]) -> np.ndarray:
    """The instruction on each row of `columns`, a thread a row: three cells for sources, the first of which becomes
    the result."""
    count = -(-len(columns[0]) // 32) * 32
    cells = np.zeros((count, 4), np.uint64)
    for i, column in enumerate(columns):
        cells[: len(column), i] = np.array(column, np.uint64)
        cells[len(column) :, i] = column[0]
    lines = ["shl.b32 %r9, %r1, 5;", "cvt.u64.u32 %rd4, %r9;", "add.s64 %rd4, %rd1, %rd4;"]
    for i, kind in enumerate(kinds):
        bits = 8 if kind == "pred" else int(kind[1:])
        to = f"%rs{i + 1}" if bits == 8 else register(kind, i + 10 if bits == 32 else i + 5)
        lines.append(f"ld.global.b{bits} {to}, [%rd4+{8 * i}];")
        if kind == "pred":
            lines.append(f"setp.ne.b16 %p{i + 1}, {to}, 0;")
            to = f"%p{i + 1}"
        lines.append(f"// {to}")
    sources = [line[3:] for line in lines if line.startswith("// ")]
    to = {"pred": "%p8"}.get(result) or register(result, 8)
    lines.append(f"{name} {', '.join([to, *sources])};")
    if result == "pred":
        lines.append("selp.b64 %rd8, 1, 0, %p8;")
    elif to != "%rd8":
        lines.append(f"cvt.{result[0].replace('b', 'u')}64.{result} %rd8, {to};")
    lines.append("st.global.b64 [%rd4], %rd8;")
    return execute("\n".join(lines), cells.reshape(-1), threads=count).reshape(count, 4)[: len(columns[0]), 0]


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    kinds, result, define = INTEGERS[name]
    if len(kinds) == 1:
        rows = [(a,) for a in EDGES]
    else:
        last = [EDGES[(i * 5 + 3) % len(EDGES)] for i in range(len(EDGES))]
        rows = [(a, b, c)[: len(kinds)] for a in EDGES for b, c in zip(EDGES, last, strict=True)]
    if "pred" in kinds:
        rows = [tuple(x & 1 if k == "pred" else x for x, k in zip(row, kinds, strict=True)) for row in rows]
    if name.startswith(("div", "rem")):
        rows = [row for row in rows if number(row[1], kinds[1]) != 0]
    if name.startswith("bfe"):
        places = (0, 1, 5, 8, 31, 32, 63, 64, 255)
        rows = [(a, b, c) for a in EDGES[-6:] for b in places for c in places]
    got = operate(name, kinds, result, [list(column) for column in zip(*rows, strict=True)])
    for row, have in zip(rows, got.tolist(), strict=True):
        values = [x if k == "pred" else number(x, k) for x, k in zip(row, kinds, strict=True)]
        want = int(define(*values))
        want = want & 1 if result == "pred" else number(want, result) & (2**64 - 1)
        assert have == want, (name, row)


def test_floats() -> None:
    """Rounded once to nearest even, subnormals kept, any NaN the canonical one."""
    pairs = [(a, b) for a in FLOATS for b in FLOATS]
    columns = [list(column) for column in zip(*pairs, strict=True)]
    for name, define in {
        "add.rn.f32": lambda a, b: a + b,
        "sub.rn.f32": lambda a, b: a - b,
        "mul.rn.f32": lambda a, b: a * b,
    }.items():
        got = operate(name, ("u32", "u32"), "u32", columns).tolist()
        # A sum or product of two float32 in float64 is exact, or far enough from a tie to be rounded alike.
        assert got == [rounded(define(single(a), single(b))) for a, b in pairs], name
        both = [(a, b, c, d) for (a, b), (c, d) in zip(pairs, reversed(pairs), strict=True)]
        packed = [[a | c << 32 for a, _, c, _ in both], [b | d << 32 for _, b, _, d in both]]
        got = operate(f"{name}x2", ("u64", "u64"), "u64", packed).tolist()
        assert got == [
            rounded(define(single(a), single(b))) | rounded(define(single(c), single(d))) << 32 for a, b, c, d in both
        ]
    for name, define in {"abs.f32": abs, "neg.f32": lambda a: -a}.items():
        assert operate(name, ("u32",), "u32", [FLOATS]).tolist() == [rounded(define(single(a))) for a in FLOATS]
    for kind in ("u16", "s16", "u32", "s32"):
        want = [rounded(number(a, kind)) for a in EDGES]
        assert operate(f"cvt.rn.f32.{kind}", (kind,), "u32", [EDGES]).tolist() == want
    orders = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    for name, sign in orders.items():
        for unordered in (False, True):
            got = operate(f"setp.{name}{'u' * unordered}.f32", ("u32", "u32"), "pred", columns).tolist()
            want = []
            for x, y in ((single(a), single(b)) for a, b in pairs):
                nan = math.isnan(x) or math.isnan(y)
                want.append(int(unordered if nan else eval(f"x {sign} y")))
            assert got == want, (name, unordered)


def test_constants_have_64_bits() -> None:
    body = "mov.u32 %r5, 0xffffffffffffffff; mov.b32 %r6, -2; mov.u16 %rs1, 65535U; cvt.u32.u16 %r7, %rs1;"
    for name, want in (("%r5", 2**32 - 1), ("%r6", 2**32 - 2), ("%r7", 65535)):
        got = execute(f"{body} cvt.u64.u32 %rd4, {name}; st.global.b64 [%rd3], %rd4;", np.zeros(32))
        assert set(got.tolist()) == {want}


def test_vectors_move_whole() -> None:
    """Packed and unpacked from the lowest bits on, with a sink and a register of an inner block."""
    body = """
    ld.global.b64 %rd4, [%rd3];
    mov.b64 {%r5, %r6}, %rd4;
    mov.b64 {_, %r7}, %rd4;
    { .reg .b16 tmp; mov.b32 {tmp, %rs1}, %r5; }
    { .reg .b32 tmp; mov.b64 {tmp, %r8}, %rd4; }
    cvt.u16.u32 %rs2, %r8;
    mov.b32 %r5, {%rs1, %rs2};
    mov.b64 %rd4, {%r5, %r7};
    st.global.b64 [%rd3 + 0], %rd4;
    """
    cells = np.arange(32, dtype=np.uint64) * 0x1111222233334445 + 0xAAAABBBBCCCCDDDD
    got = execute(body, cells)
    for have, x in zip(got.tolist(), cells.tolist(), strict=True):
        high = x >> 32
        assert have == (high << 32) | (high & 0xFFFF) << 16 | (x >> 16 & 0xFFFF)


def test_loads_and_stores_of_every_width() -> None:
    """Narrow loads widen by their type's sign; vectors are consecutive; a guard keeps what was there."""
    cells = np.arange(64, dtype=np.uint64) * 0x0101010101010181
    for kind in ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "s32", "u32", "b64"):
        bits = int(kind[1:])
        to = {8: "%r5", 16: "%r5", 32: "%rd5", 64: "%rd5"}[bits]
        wide = f"mov.b64 %rd5, {{{to}, 0}};" if to == "%r5" else ""
        got = execute(f"ld.global.{kind} {to}, [%rd3]; {wide} st.global.b64 [%rd3], %rd5;", cells[:32])
        mask = 2**32 - 1 if to == "%r5" else 2**64 - 1
        assert got.tolist() == [number(x, kind.replace("b", "u")) & mask for x in cells[:32].tolist()]
    vector = "shl.b64 %rd2, %rd2, 1; add.s64 %rd3, %rd1, %rd2; ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd3];"
    got = execute(f"{vector} st.global.v2.b32 [%rd3+8], {{%r5, %r6}};", cells)
    assert (got[0::2] == cells[0::2]).all()
    assert (got[1::2] == cells[0::2]).all()
    got = execute(f"{vector} setp.lt.u32 %p1, %r1, 5; @!%p1 st.global.v2.b32 [%rd3], {{%r7, %r8}};", cells)
    assert (got[0:10:2] == cells[0:10:2]).all()
    assert (got[10::2] == cells[11::2]).all()


def test_parameters_and_places() -> None:
    """Scalars, and where a thread of a 3-D grid is."""
    body = """
    ld.param.b64 %rd4, [kernel_param_1]; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z; mov.u32 %r7, %nctaid.x;
    mov.u32 %r8, %nctaid.y; mad.lo.s32 %r9, %r6, %r8, %r5; mad.lo.s32 %r9, %r9, %r7, %r2;
    mad.lo.s32 %r4, %r9, %r3, %r1; mul.wide.u32 %rd2, %r4, 8; add.s64 %rd3, %rd1, %rd2;
    cvt.u64.u32 %rd5, %r9; shl.b64 %rd5, %rd5, 8; cvt.u64.u32 %rd6, %r1; or.b64 %rd5, %rd5, %rd6;
    add.s64 %rd5, %rd5, %rd4; st.global.b64 [%rd3], %rd5;
    """
    got = execute(body, np.zeros(2 * 3 * 4 * 64), grid=(2, 3, 4), threads=64)
    assert got.tolist() == [(g << 8 | t) + 7 for g in range(24) for t in range(64)]


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("control", [0x1F, 0x0, 0x181F, 0x1800, 0x1C1F])
def test_shuffles(mode: str, control: int) -> None:
    """By the ISA's pseudocode, a lane at a time; a lane without a source keeps its own value."""
    got = [
        execute(f"ld.global.b32 %r5, [%rd3]; shfl.sync.{mode}.b32 %r6, %r5, {b}, {control}, -1;"
                "cvt.u64.u32 %rd4, %r6; st.global.b64 [%rd3], %rd4;", np.arange(64) + 100, threads=64)
        for b in (0, 1, 5, 31)
    ]  # fmt: skip
    for b, have in zip((0, 1, 5, 31), got, strict=True):
        want = []
        for lane in range(32):
            clamp, segment = control & 31, control >> 8
            most = (lane & segment) | (clamp & ~segment)
            j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment)}[mode]
            want.append(j if (j >= most if mode == "up" else j <= most) else lane)
        assert have.tolist() == [100 + 32 * warp + j for warp in range(2) for j in want]


@pytest.mark.parametrize(
    ("name", "define"),
    [
        ("add.s32", sum),
        ("min.s32", min),
        ("max.s32", max),
        ("min.u32", lambda xs: min(x % 2**32 for x in xs)),
        ("max.u32", lambda xs: max(x % 2**32 for x in xs)),
        ("and.b32", lambda xs: functools.reduce(int.__and__, xs)),
        ("or.b32", lambda xs: functools.reduce(int.__or__, xs)),
        ("xor.b32", lambda xs: functools.reduce(int.__xor__, xs)),
    ],
)
def test_reductions(name: str, define: Callable[[list[int]], int]) -> None:
    """Over the lanes of the member mask alone: the even ones, then the odd ones."""
    values = [(i * 0x9E3779B1 + 5) % 2**32 for i in range(32)]
    body = f"""
    ld.global.b32 %r5, [%rd3];
    and.b32 %r6, %r1, 1;
    setp.eq.b32 %p1, %r6, 0;
    @%p1 redux.sync.{name} %r7, %r5, 0x55555555;
    @!%p1 redux.sync.{name} %r7, %r5, 0xAAAAAAAA;
    cvt.u64.u32 %rd4, %r7; st.global.b64 [%rd3], %rd4;
    """
    got = execute(body, np.array(values)).tolist()
    want = [define([signed(x, 32) for x in values[i::2]]) % 2**32 for i in range(2)]
    assert got == want * 16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(count: int, transposed: bool) -> None:
    """Lane 4 r + c holds the elements 2 c and 2 c + 1 of row r, in each of the matrices."""
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    name = f"sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    address = "mov.u32 %r5, global_smem; shl.b32 %r6, %r1, 4; add.s32 %r6, %r5, %r6;"  # of lane t's row: 16 t
    own = "shl.b32 %r7, %r1, 4; add.s32 %r7, %r5, %r7;"
    words = "".join(f"shl.b32 %r{10 + i}, %r1, 17; or.b32 %r{10 + i}, %r{10 + i}, %r1; shl.b32 %r8, %r1, 1;"
                    f"shl.b32 %r{10 + i}, %r1, 1; add.s32 %r9, %r{10 + i}, {64 * i + 1}; shl.b32 %r9, %r9, 16;"
                    f"add.s32 %r{10 + i}, %r{10 + i}, {64 * i}; or.b32 %r{10 + i}, %r{10 + i}, %r9;"
                    for i in range(count))  # fmt: skip
    body = f"{address}{own}{words} stmatrix.{name} [%r6], {{{registers}}}; bar.warp.sync -1;"
    read = "ld.shared.b64 %rd4, [%r7]; ld.shared.b64 %rd5, [%r7+8]; shl.b64 %rd6, %rd2, 1; add.s64 %rd6, %rd1, %rd6;"
    got = execute(f"{body}{read} st.global.v2.b64 [%rd6], {{%rd4, %rd5}};", np.zeros(64), shared=512)
    want = np.arange(64 * count, dtype=np.uint16).reshape(count, 8, 8)
    stored = got.view(np.uint16)[: 64 * count].reshape(count, 8, 8)
    assert (stored == (want.swapaxes(1, 2) if transposed else want)).all()
    # And back: what is loaded is what was stored.
    back = "".join(f"mov.b32 %r{10 + i}, 0;" for i in range(count)) + f"ldmatrix.{name} {{{registers}}}, [%r6];"
    for i in range(count):
        got = execute(
            f"{body}{back} cvt.u64.u32 %rd4, %r{10 + i}; st.global.b64 [%rd3], %rd4;", np.zeros(32), shared=512
        )
        assert (got.astype(np.uint32).view(np.uint16) == want[i].reshape(-1)).all()


def test_atomics_count_every_thread() -> None:
    """Old values are each seen once; a masked thread adds nothing; adds wrap."""
    body = "mov.b64 %rd4, 3; setp.ne.b32 %p1, %r1, 4; @%p1 {} st.global.b64 [%rd3+8], %rd5;"
    add = "atom.global.gpu.relaxed.add.u64 %rd5, [%rd1], %rd4;"
    got = execute("mov.b64 %rd5, 0;" + body.format(add), np.array([2**64 - 3] + [9] * 32, np.uint64))
    assert got[0] == (2**64 - 3 + 31 * 3) % 2**64
    assert sorted(got[1:].tolist()) == sorted([0] + [(2**64 - 3 + 3 * i) % 2**64 for i in range(31)])
    got = execute(body.format("red.global.gpu.relaxed.add.u64 [%rd1], %rd4;").replace("%rd5", "%rd4"), np.zeros(33))
    assert got[0] == 31 * 3


LOOP = """
    mov.u32 %r5, 0;
    mov.u32 %r6, 0;
$L__loop:
    setp.ge.u32 %p1, %r6, %r1;
    @%p1 bra $L__done;
    add.s32 %r5, %r5, %r6;
    add.s32 %r6, %r6, 1;
    bra.uni $L__loop;
$L__done:
    cvt.u64.u32 %rd4, %r5;
    st.global.b64 [%rd3], %rd4;
"""


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_threads_diverge_and_meet(seed: int | None) -> None:
    """A loop of another length for each thread, then a warp operation with all lanes."""
    schedule = None if seed is None else random.Random(seed)
    body = LOOP + "redux.sync.add.s32 %r7, %r5, 0xffffffff; cvt.u64.u32 %rd4, %r7; st.global.b64 [%rd3], %rd4;"
    got = execute(body, np.zeros(2 * 64), (2, 1, 1), 64, schedule)
    per_warp = [sum(t * (t - 1) // 2 for t in range(32 * w, 32 * w + 32)) for w in range(2)]
    assert got.tolist() == [per_warp[t // 32] for _ in range(2) for t in range(64)]


EXCHANGE = """
    mov.u32 %r5, global_smem;
    shl.b32 %r6, %r1, 3;
    add.s32 %r7, %r5, %r6;
    cvt.u64.u32 %rd4, %r4;
    st.shared.b64 [%r7], %rd4;
    {barrier}
    xor.b32 %r8, %r6, 504;
    add.s32 %r9, %r5, %r8;
    ld.shared.b64 %rd5, [%r9];
    st.global.b64 [%rd3], %rd5;
"""


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_barriers_order_shared_memory(seed: int | None) -> None:
    """Each group has its own; a thread of the last warp is read by the first one."""
    schedule = None if seed is None else random.Random(seed)
    body = EXCHANGE.replace("{barrier}", "bar.sync 0;")
    got = execute(body, np.zeros(3 * 64), (3, 1, 1), 64, schedule, shared=512)
    assert got.tolist() == [64 * g + 63 - t for g in range(3) for t in range(64)]


def test_a_missing_barrier_shows_in_a_random_order() -> None:
    body = EXCHANGE.replace("{barrier}", "bra.uni $L__next;\n$L__next:")
    want = [63 - t for t in range(64)]
    runs = [execute(body, np.zeros(64), (1, 1, 1), 64, random.Random(seed), 512).tolist() for seed in range(8)]
    assert any(got != want for got in runs)


@pytest.mark.parametrize(
    ("body", "error", "says"),
    [
        ("st.global.b64 [%rd3+8], %rd1;", OutsideAllocation, "byte 256 of the nearest"),
        ("ld.global.b32 %r5, [%rd3-8];", OutsideAllocation, "byte -8 of the nearest"),
        ("mov.b64 %rd4, 8; ld.global.b32 %r5, [%rd4];", OutsideAllocation, "nearest"),
        ("ld.global.b64 %rd4, [%rd3+4];", Misaligned, "8"),
        ("ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd3];", Misaligned, "no multiple of 16"),
        ("ld.shared.b32 %r5, [global_smem+16];", OutsideAllocation, "which has 16"),
        ("mov.b64 %rd4, 5; st.global.b64 [%rd1], %rd3;", ConflictingStores, "32|31 threads"),
        ("setp.ne.b32 %p1, %r1, 3; @%p1 shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1;", MissingLanes, "lane 0"),
        ("setp.ne.b32 %p1, %r1, 3; @%p1 redux.sync.add.s32 %r5, %r1, %r3;", MissingLanes, "names"),
        ("setp.ne.b32 %p1, %r1, 3; @%p1 bar.warp.sync -1;", MissingLanes, "names"),
        ("redux.sync.add.s32 %r5, %r1, 0xfffffffe;", MissingLanes, "lane 0"),
        ("setp.ne.b32 %p1, %r1, 9; @%p1 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r1];", MissingLanes, "names"),
        ("setp.ne.b32 %p1, %r1, 3; @%p1 bar.sync 0;", MissingLanes, "bar.sync"),
        ("div.u32 %r5, %r1, %r1;", ExecutionError, "division by zero"),
        ("rem.s32 %r5, %r3, %r1;", ExecutionError, "division by zero"),
    ],
)
def test_what_no_device_forgives(body: str, error: type[ExecutionError], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        execute(body, np.zeros(32), shared=16)
    assert raised.type is error
    assert body.split(";")[-2].strip() in str(raised.value)  # the instruction is named


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("setp.ge.u32 %p1, %r1, 32; @%p1 ret; bar.sync 0;", "never reach"),
        ("setp.ge.u32 %p1, %r1, 32; @%p1 bra $L__a; bar.sync 0; ret; $L__a: bar.sync 0;", "different barriers"),
    ],
)
def test_barriers_that_not_all_reach(body: str, says: str) -> None:
    with pytest.raises(MissingLanes, match=says):
        execute(body, np.zeros(64), threads=64)


def test_exited_lanes_are_not_missed() -> None:
    """A lane that has returned need not take part (section "Membermask" of shfl.sync and redux.sync)."""
    body = "setp.ge.u32 %p1, %r1, 16; @%p1 ret; redux.sync.add.s32 %r5, %r1, -1; cvt.u64.u32 %rd4, %r5;"
    got = execute(body + "st.global.b64 [%rd3], %rd4;", np.zeros(32))
    assert got.tolist() == [120] * 16 + [0] * 16


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("fma.rn.f32 %r5, %r1, %r1, %r1;", "fma.rn.f32"),
        ("add.f32 %r5, %r1, %r1;", "add.f32"),  # without .rn it may be fused
        ("add.rn.ftz.f32 %r5, %r1, %r1;", "ftz"),
        ("mul.lo.f32 %r5, %r1, %r1;", "mul.lo.f32"),
        ("add.s32.sat %r5, %r1, %r1;", "sat"),
        ("add.s8 %rs1, %rs1, %rs1;", "add.s8"),
        ("cvt.rz.f32.u32 %r5, %r1;", "cvt.rz"),
        ("prmt.b32.f4e %r5, %r1, %r1, %r1;", "f4e"),
        ("ld.global.nc.b32 %r5, [%rd3];", "modifier .nc"),
        ("ld.global.v3.b32 {%r5, %r6, %r7}, [%rd3];", "v3"),
        ("ld.local.b32 %r5, [%rd3];", "ld.local"),
        ("red.global.sys.relaxed.add.u64 [%rd3], %rd3;", "sys"),
        ("red.global.gpu.relaxed.min.u64 [%rd3], %rd3;", "min"),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%r5}, [%r1];", "b8"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r5}, [%r1];", "1 elements, not 2"),
        ("shfl.sync.bfly.b64 %r5, %r1, 1, 31, -1;", "b64"),
        ("redux.sync.and.s32 %r5, %r1, -1;", "and"),
        ("bar.sync 1;", "bar.sync 1"),
        ("bar.sync 0, 32;", "bar.sync 0, 32"),
        ("bra $L__nowhere;", "nowhere"),
        ("mov.u32 %r5, %clock;", "clock"),
        ("mov.u32 %r5, %unknown;", "unknown"),
        ("add.s32 %r5, %rd1, %r1;", "type .s32"),  # a register of another size
        ("add.s32 %r5, %r1;", "operands"),
        ("add.s32 %r5, %r1, 4294967296;", "4294967296"),
        (".local .b8 buffer[4];", "local"),
        ("setp.eq.and.s32 %p1, %r1, %r1, %p2;", "setp.eq.and"),
    ],
)
def test_what_is_unknown_is_named(statement: str, says: str) -> None:
    with pytest.raises(UnknownInstruction, match=says):
        ptx.parse(f"{HEADER}{statement}\nret;\n}}\n")


@pytest.mark.parametrize("change", [(".visible .entry", ".weak .func"), (".reqntid 32", ".reqntid 32 .cluster 2"),
                                    (".extern .shared .align 16 .b8 global_smem[];", ".global .b32 x;")])  # fmt: skip
def test_unknown_directives_are_named(change: tuple[str, str]) -> None:
    with pytest.raises(UnknownInstruction):
        ptx.parse(HEADER.replace(*change) + "ret;\n}\n")


def test_arguments_and_warps_must_fit() -> None:
    program = ptx.parse(HEADER + "ret;\n}\n")
    for args, threads, says in (([1], 32, "1 arguments"), ([1, 2], 31, "whole number")):
        with pytest.raises(ExecutionError, match=says):
            ptx.run(program, args, (1, 1, 1), threads, 0, Memory([]))
