"""What PTX instructions compute within one thread: sections 9.7.1 to 9.7.9 of the PTX ISA, as far as Triton needs them.

A type is named as PTX names it: u, s or b and bits, f32, or pred.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from portakv.conformance.executors.errors import UnknownInstruction

Array = np.ndarray[Any, Any]

DTYPES: dict[str, np.dtype[Any]] = {"pred": np.dtype(bool), "f32": np.dtype(np.float32)} | {
    f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}") for kind in "usb" for bits in (8, 16, 32, 64)
}

CANONICAL_NAN = np.uint32(0x7FFFFFFF)
"""What float arithmetic gives for NaN, whose payload the ISA does not promise to keep."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`compute` maps an array for each of `sources` to one of type `result`; the types of both are PTX's."""

    sources: tuple[str, ...]
    result: str
    compute: Callable[..., Array]
    divides: bool = False
    """Whether the last source must not be zero: the ISA leaves the result open."""
    converts: bool = False
    """Whether registers may be wider than the types (section "Operand Size Exceeding Instruction-Type Size")."""


def operation(name: str) -> Operation:
    """The operation of an instruction's full name. Raises `UnknownInstruction`."""
    opcode, *modifiers = name.split(".")
    kind = modifiers[-1] if modifiers else ""
    found = None
    match modifiers:
        case [("u16" | "u32" | "u64" | "s16" | "s32" | "s64")]:
            found = _integer(opcode, kind)
        case [("lo" | "hi" | "wide") as part, ("u16" | "u32" | "u64" | "s16" | "s32" | "s64")]:
            found = _multiply(opcode, part, kind)
        case ["f32"] | ["rn", "f32" | "f32x2"]:
            found = _float(opcode, modifiers)
        case [("pred" | "b16" | "b32" | "b64")]:
            found = _bits(opcode, kind)
        case [comparison, _] if opcode == "setp" and kind in DTYPES:
            found = _compare(comparison, kind)
        case [to, source] if opcode == "cvt" and {to, source} <= DTYPES.keys() - {"f32", "pred"}:
            found = Operation((source,), to, lambda a: a.astype(DTYPES[to]), converts=True)
        case ["rn", "f32", source] if opcode == "cvt" and source in DTYPES and source[0] in "us":
            found = Operation((source,), "f32", lambda a: a.astype(np.float32), converts=True)
    if opcode == "mov" and len(modifiers) == 1 and kind in DTYPES:
        found = Operation((kind,), kind, lambda a: a)
    if opcode == "selp" and len(modifiers) == 1 and kind in DTYPES:
        found = Operation((kind, kind, "pred"), kind, _select)
    if found is None:
        raise UnknownInstruction(f"{name}: neither the opcode with these modifiers nor the type is implemented")
    return found


def _select(a: Array, b: Array, p: Array) -> Array:
    return np.where(p, a, b)


def _integer(opcode: str, kind: str) -> Operation | None:
    """9.7.1 Integer Arithmetic, and `shr` of 9.7.8, which fills with the sign where the type has one."""
    two = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}
    signed = kind[0] == "s"
    if opcode in two:
        return Operation((kind, kind), kind, two[opcode])
    if opcode in ("abs", "neg") and signed:
        return Operation((kind,), kind, {"abs": np.abs, "neg": np.negative}[opcode])
    if opcode in ("div", "rem"):
        return Operation((kind, kind), kind, _quotient if opcode == "div" else _remainder, divides=True)
    if opcode == "bfe" and kind[1:] != "16":
        return Operation((kind, "u32", "u32"), kind, _extract)
    if opcode == "shr":
        return Operation((kind, "u32"), kind, _shift_right)
    return None


def _unsigned(a: Array) -> Array:
    return a.view(np.dtype(f"u{a.itemsize}"))


def _quotient(a: Array, b: Array) -> Array:
    """Rounded to zero."""
    if a.dtype.kind == "u":
        out: Array = a // np.where(b == 0, 1, b).astype(b.dtype)
        return out
    absolute = _quotient(_unsigned(np.abs(a)), _unsigned(np.abs(b))).view(a.dtype)
    return np.where((a < 0) != (b < 0), -absolute, absolute)


def _remainder(a: Array, b: Array) -> Array:
    out: Array = a - _quotient(a, b) * b
    return out


def _extract(a: Array, position: Array, length: Array) -> Array:
    """bfe: `length` bits from `position` on; above the top bit come zeros, or the sign, the field's last bit."""
    bits = 8 * a.itemsize
    position, length = position & 0xFF, length & 0xFF
    field = _shift_right(_unsigned(a), position)
    ones = ~_shift_left(np.full_like(field, -1 & ((1 << bits) - 1)), length)
    if a.dtype.kind == "u":
        return field & ones
    last = np.minimum(position + length - 1, bits - 1)
    sign = (_shift_right(_unsigned(a), last) & 1).astype(bool) & (length > 0)
    inside = ~_shift_left(
        np.full_like(field, -1 & ((1 << bits) - 1)), np.minimum(length, bits - np.minimum(position, bits))
    )
    return np.where(sign, (field & ones) | ~inside, field & ones).view(a.dtype)


def _multiply(opcode: str, part: str, kind: str) -> Operation | None:
    """9.7.1: mul and mad, of which "lo" and "hi" keep half of the product and "wide" all of it."""
    if opcode not in ("mul", "mad") or (part == "wide" and kind[1:] == "64"):
        return None
    result = f"{kind[0]}{2 * int(kind[1:])}" if part == "wide" else kind
    wide = DTYPES[result]

    def multiply(a: Array, b: Array) -> Array:
        return _high(a, b) if part == "hi" else a.astype(wide) * b.astype(wide)

    if opcode == "mul":
        return Operation((kind, kind), result, multiply)
    return Operation((kind, kind, result), result, lambda a, b, c: multiply(a, b) + c)


def _high(a: Array, b: Array) -> Array:
    """The upper half of the product."""
    kind, bits = a.dtype.kind, 8 * a.itemsize
    high: Array
    if bits < 64:
        wide = np.dtype(f"{kind}{2 * a.itemsize}")
        high = ((a.astype(wide) * b.astype(wide)) >> bits).astype(a.dtype)
        return high
    x, y = _unsigned(a), _unsigned(b)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    high = x1 * y1 + (middle >> half) + ((x0 * y1 + (middle & low)) >> half)
    if kind == "i":
        high = high.view(a.dtype) - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)
    return high


def _float(opcode: str, modifiers: list[str]) -> Operation | None:
    """9.7.3 Floating Point. Without `.rn` a compiler may fuse a multiply and an add, so those names are not known."""
    two = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    if modifiers == ["f32"] and opcode in ("abs", "neg"):
        return Operation(("f32",), "f32", _canonical({"abs": np.abs, "neg": np.negative}[opcode]))
    if modifiers == ["rn", "f32"] and opcode in two:
        return Operation(("f32", "f32"), "f32", _canonical(two[opcode]))
    if modifiers == ["rn", "f32x2"] and opcode in two:
        return Operation(("b64", "b64"), "b64", _pairwise(_canonical(two[opcode])))
    return None


def _canonical(compute: Callable[..., Array]) -> Callable[..., Array]:
    def rounded(*sources: Array) -> Array:
        out = compute(*sources)
        return np.where(np.isnan(out), CANONICAL_NAN.view(np.float32), out)

    return rounded


def _pairwise(compute: Callable[..., Array]) -> Callable[..., Array]:
    def paired(*sources: Array) -> Array:
        out = compute(*(np.ascontiguousarray(a).view(np.float32).reshape(-1, 2) for a in sources))
        return np.ascontiguousarray(out).view(np.uint64).reshape(-1)

    return paired


def _bits(opcode: str, kind: str) -> Operation | None:
    """9.7.8 Logic and Shift, and `prmt` of 9.7.9."""
    two = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    if opcode in two:
        return Operation((kind, kind), kind, two[opcode])
    if opcode == "not":
        return Operation((kind,), kind, np.invert)
    if opcode in ("shl", "shr") and kind != "pred":
        return Operation((kind, "u32"), kind, _shift_left if opcode == "shl" else _shift_right)
    if opcode == "prmt" and kind == "b32":
        return Operation((kind, kind, kind), kind, _permute)
    return None


def _shift_left(a: Array, amount: Array) -> Array:
    """Amounts past the width are taken as the width."""
    bits = 8 * a.itemsize
    return np.where(amount >= bits, 0, a << np.minimum(amount, bits - 1).astype(a.dtype)).astype(a.dtype)


def _shift_right(a: Array, amount: Array) -> Array:
    bits = 8 * a.itemsize
    shifted = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(amount >= bits, 0, shifted).astype(a.dtype)


def _permute(a: Array, b: Array, control: Array) -> Array:
    """Each nibble of `control` chooses a byte of the eight in {b, a}; its top bit asks for that byte's sign alone."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = (control >> np.uint32(4 * i)) & np.uint32(0xF)
        byte = (both >> (8 * (nibble & 7)).astype(np.uint64)).astype(np.uint8)
        sign = (byte.view(np.int8) >> 7).view(np.uint8)
        out = out | np.where(nibble & 8, sign, byte).astype(np.uint32) << np.uint32(8 * i)
    return out


ORDERS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
ORDERS |= {"gt": np.greater, "ge": np.greater_equal}


def _compare(comparison: str, kind: str) -> Operation | None:
    """9.7.6 Comparison and Selection. The comparisons of floats are the ordered ones, and their unordered twins."""
    if kind == "pred" or (kind[0] == "b" and comparison not in ("eq", "ne")):
        return None
    if comparison in ORDERS:
        order = ORDERS[comparison]
        if kind == "f32" and comparison == "ne":
            return Operation((kind, kind), "pred", lambda a, b: (a < b) | (a > b))
        return Operation((kind, kind), "pred", order)
    if kind == "f32" and comparison[:-1] in ORDERS and comparison[-1] == "u":
        order = ORDERS[comparison[:-1]]
        return Operation((kind, kind), "pred", lambda a, b: order(a, b) | np.isnan(a) | np.isnan(b))
    return None
