"""Every opcode that the AMD executor computes, beside the pseudocode of AMD's ISA documents as tinygrad ships it.

`nox -s executors-oracle` installs tinygrad. The pseudocode is read by the small interpreter below, which knows the
language only as far as these opcodes need it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portakv.conformance.executors.gcn import arithmetic

_spec = importlib.util.spec_from_file_location("executors_gcn", Path(__file__).parents[1] / "test_executors_gcn.py")
assert _spec is not None and _spec.loader is not None
plain: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain)

PSEUDOCODE: dict[str, list[str]] = {}
"""Of each opcode the distinct texts of the generations that have it."""
for _generation in ("cdna", "rdna3", "rdna4"):
    _module = importlib.import_module(f"tinygrad.runtime.autogen.amd.{_generation}.str_pcode")
    for _op, _text in _module.PCODE.items():
        _name = _op.name.lower().removesuffix("_e32").removesuffix("_e64")
        if _text not in PSEUDOCODE.setdefault(_name, []):
            PSEUDOCODE[_name].append(_text)

ABSENT = {
    "v_mac_f32": "CDNA 3, whose document the data comes from, has it no more",
    "v_madmk_f32": "likewise",
}


@dataclass(frozen=True)
class Value:
    """`bits` of `width`; `kind` is "u", "i" or "f". A plain number of the text takes the type of what it meets."""

    bits: int
    width: int
    kind: str
    plain: bool = False

    @property
    def number(self) -> Any:
        if self.kind == "f":
            if self.width == 64:
                return float(np.array([self.bits], np.uint64).view(np.float64)[0])
            dtype = {16: np.float16, 32: np.float32}[self.width]
            return np.array([self.bits], f"u{self.width // 8}").view(dtype)[0]
        return plain.signed(self.bits, self.width) if self.kind == "i" else self.bits

    def to(self, width: int, kind: str) -> Value:
        """As C converts."""
        if kind == "f":
            return of_float(self.number, width)
        return Value(int(self.number) & ((1 << width) - 1), width, kind)

    def read_as(self, width: int, kind: str) -> Value:
        """The same bits as another type."""
        return Value(self.bits & ((1 << width) - 1), width, kind)


def of_float(x: Any, width: int) -> Value:
    dtype, raw = {16: (np.float16, np.uint16), 32: (np.float32, np.uint32), 64: (np.float64, np.uint64)}[width]
    with np.errstate(all="ignore"):
        return Value(int(np.array([x], dtype).view(raw)[0]), width, "f")


def of_bool(x: Any) -> Value:
    return Value(int(bool(x)), 1, "u")


def fused(a: Value, b: Value, c: Value) -> Value:
    x, y, z = (float(v.number) for v in (a, b, c))
    if not all(map(math.isfinite, (x, y, z))):
        return of_float(x * y + z, 32)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return of_float(x * y + z, 32)
    with np.errstate(all="ignore"):
        near = np.float32(min(max(float(exact), -3.5e38), 3.5e38)) if abs(exact) < 2**129 else np.float32(math.inf)
        if np.isinf(near):
            near = np.float32(math.copysign(3.4028235e38, exact))
        candidates = [np.nextafter(near, np.float32(-math.inf)), near, np.nextafter(near, np.float32(math.inf))]

    def distance(v: Any) -> tuple[Fraction, int]:
        place = Fraction(math.copysign(2.0**128, v)) if math.isinf(v) else Fraction(float(v))
        return abs(place - exact), of_float(v, 32).bits & 1

    best = min(candidates, key=distance)
    return of_float(math.copysign(0.0, exact) if best == 0 else best, 32)


def sign_extend_from(x: Value, count: Value) -> Value:
    n = count.bits
    return x if n >= x.width else Value(plain.signed(x.bits, n) & ((1 << x.width) - 1) if n else 0, x.width, "i")


def truncate(x: float) -> float:
    return math.copysign(math.trunc(x), x) if math.isfinite(x) else x


def to_int(x: Value, low: int, high: int, kind: str) -> Value:
    value = float(x.number)
    bound = 0 if math.isnan(value) else min(max(value, low), high)
    return Value(math.trunc(bound) & 0xFFFFFFFF, 32, kind)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "fma": fused,
    "trunc": lambda x: of_float(truncate(float(x.number)), x.width),
    "signext": lambda x: Value(plain.signed(x.bits, x.width) & plain.M64, 64, "i"),
    "signext_from_bit": sign_extend_from,
    "isNAN": lambda x: of_bool(np.isnan(x.number)),
    "u32_to_f32": lambda x: of_float(x.bits, 32),
    "i32_to_f32": lambda x: of_float(plain.signed(x.bits), 32),
    "f32_to_u32": lambda x: to_int(x, 0, 2**32 - 1, "u"),
    "f32_to_i32": lambda x: to_int(x, -(2**31), 2**31 - 1, "i"),
    "f32_to_f16": lambda x: of_float(x.number, 16),
    "f16_to_f32": lambda x: of_float(x.number, 32),
}

TOKEN = re.compile(
    r"\s*(?:(?P<sized>\d+'(?:0x[0-9a-f]+|\d+)U?)|(?P<cast>\d+'[UIFB])|(?P<float>\d+\.\d+F?)|(?P<hex>0x[0-9a-f]+[UL]*)"
    r"|(?P<int>\d+[UL]*)|(?P<name>[A-Za-z_]\w*)|(?P<sign>&&|\|\||==|!=|<>|<=|>=|<<|>>|\+=|[-+*/&|^~!?:()\[\]{},.=<>]))"
)
LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!=", "<>"),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/"),
)


class Reader:
    """Evaluates one expression or assignment."""

    def __init__(self, text: str, names: dict[str, Any]) -> None:
        self.tokens: list[tuple[str, str]] = []
        at, text = 0, text.strip()
        while at < len(text):
            found = TOKEN.match(text, at)
            assert found is not None, text[at:]
            assert found.lastgroup is not None
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self.at, self.names = 0, names

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        assert expected is None or token == expected, (expected, self.tokens[self.at :])
        self.at += 1
        return token

    def expression(self) -> Value:
        condition = self.binary(0)
        if self.peek() != "?":
            return condition
        self.take()
        yes = self.expression()
        self.take(":")
        no = self.expression()
        return yes if condition.bits else no

    def binary(self, level: int) -> Value:
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in LEVELS[level]:
            left = apply(self.take(), left, self.binary(level + 1))
        return left

    def unary(self) -> Value:
        if self.peek() in ("~", "!", "-"):
            sign, x = self.take(), self.unary()
            if sign == "!":
                return of_bool(not x.bits)
            return Value((~x.bits if sign == "~" else -x.bits) & ((1 << x.width) - 1), x.width, x.kind)
        value = self.primary()
        while self.peek() in (".", "["):
            value = self.suffix(value)
        return value

    def suffix(self, value: Any) -> Any:
        if self.take() == ".":
            width, kind = type_of(self.take())
            return value.read_as(width, kind)
        first = self.expression()
        if isinstance(value, list):
            self.take("]")
            return value[first.bits]
        last = first
        if self.peek() == ":":
            self.take()
            last = self.expression()
        self.take("]")
        high, low = first.bits, last.bits
        if high >= low:
            return Value(value.bits >> low & ((1 << (high - low + 1)) - 1), high - low + 1, "u")
        bits = [value.bits >> n & 1 for n in range(high, low + 1)]
        return Value(int("".join(map(str, bits)), 2), len(bits), "u")

    def primary(self) -> Any:
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "sized":
            width, _, digits = text.partition("'")
            return Value(int(digits.rstrip("U"), 0), int(width), "u")
        if kind == "cast":
            width, _, letter = text.partition("'")
            self.take("(")
            value = self.expression()
            self.take(")")
            return value.to(int(width), letter.lower().replace("b", "u"))
        if kind == "float":
            return of_float(float(text.rstrip("F")), 32)
        if kind in ("int", "hex"):
            digits = text.rstrip("UL")
            width = 64 if "LL" in text else 32
            return Value(int(digits, 0), width, "u" if "U" in text or kind == "hex" else "i", plain="U" not in text)
        if text == "(":
            value = self.expression()
            self.take(")")
            return value
        if text == "{":
            return self.concatenation()
        if self.peek() == "(":
            self.take()
            args = [self.expression()]
            while self.peek() == ",":
                self.take()
                args.append(self.expression())
            self.take(")")
            return self.call(text, args)
        return self.names[text]

    def concatenation(self) -> Value:
        value = self.expression()
        bits, width = value.bits, value.width
        while self.take() == ",":
            value = self.expression()
            bits, width = bits << value.width | value.bits, width + value.width
        return Value(bits, width, "u")

    def call(self, name: str, args: list[Value]) -> Value:
        if name in self.names:
            return self.names[name](*args)
        if name in FUNCTIONS:
            return FUNCTIONS[name](*args)
        kind = type_of(name.rpartition("_")[2])
        names = execute(PSEUDOCODE[name][0], {f"S{n}": x for n, x in enumerate(args)})
        return names["D0"].read_as(*kind)

    def assign(self) -> None:
        """`name.type[high : low].type = expression`, or bits taken apart."""
        if self.peek() == "{":
            self.take()
            first = self.target()
            self.take(",")
            second = self.target()
            self.take("}")
            self.take("=")
            value = self.expression()
            self.put(second, value)
            width = second[2]
            self.put(first, Value(value.bits >> width, value.width - width, "u"))
            return
        targets = [self.target()]
        sign = self.take()
        while "=" in [token for _, token in self.tokens[self.at :]]:
            targets.append(self.target())
            self.take("=")
        value = self.expression()
        if sign == "+=":
            value = apply("+", self.names[targets[0][0]], value)
        for target in targets:
            self.put(target, value)

    def target(self) -> tuple[str, int, int, str]:
        """Its name, lowest bit (-1: all, -2 - n: element n), width and kind."""
        name = self.take()
        low, width, kind = -1, 64, ""
        while self.peek() in (".", "["):
            if self.take() == ".":
                width, kind = type_of(self.take())
                low = max(low, 0)
                continue
            first = self.expression()
            if self.peek() == ":":
                self.take()
                last = self.expression()
                low, width, kind = last.bits, first.bits - last.bits + 1, kind or "u"
            elif isinstance(self.names.get(name), list):
                low = -2 - first.bits
            else:
                low, width, kind = first.bits, 1, "u"
            self.take("]")
        return name, low, width, kind

    def put(self, target: tuple[str, int, int, str], value: Value) -> None:
        name, low, width, kind = target
        name = "D0" if name == "D" else name
        if low <= -2:
            self.names[name][-2 - low] = value
            return
        if low == -1:
            self.names[name] = value
            return
        if value.kind == "f" and kind == "f" and value.width != width:
            value = value.to(width, "f")
        old = self.names.get(name, Value(0, 64, "u"))
        mask = ((1 << width) - 1) << low
        self.names[name] = Value(old.bits & ~mask | value.bits << low & mask, max(old.width, 64), "u")


def type_of(name: str) -> tuple[int, str]:
    return int(name[1:]), name[0].replace("b", "u")


def apply(sign: str, a: Value, b: Value) -> Value:
    if sign in ("&&", "||"):
        return of_bool(a.bits and b.bits if sign == "&&" else a.bits or b.bits)
    if sign in ("<<", ">>"):
        moved = a.number << b.bits if sign == "<<" else a.number >> b.bits
        return Value(moved & ((1 << a.width) - 1), a.width, a.kind)
    width = max(a.width, b.width)
    if a.plain and not b.plain:
        a, width = a.to(max(b.width, a.width if a.bits >> b.width else 0), b.kind), max(b.width, a.bits.bit_length())
    if b.plain and not a.plain:
        b, width = b.to(max(a.width, b.width if b.bits >> a.width else 0), a.kind), max(a.width, b.bits.bit_length())
    x, y = a.number, b.number
    compare = {"==": x == y, "!=": x != y, "<>": x < y or x > y, "<": x < y, ">": x > y, "<=": x <= y, ">=": x >= y}
    if sign in compare:
        return of_bool(compare[sign])
    if a.kind == "f":
        with np.errstate(all="ignore"):
            operation = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x / y}
            return of_float(operation[sign](), width)
    if sign in "&|^":
        bits = {"&": a.bits & b.bits, "|": a.bits | b.bits, "^": a.bits ^ b.bits}[sign]
        return Value(bits, width, a.kind)
    bits = {"+": x + y, "-": x - y, "*": x * y}[sign] & ((1 << width) - 1)
    return Value(bits, width, "i" if a.kind == b.kind == "i" else "u")


class Return(Exception):
    pass


def execute(text: str, names: dict[str, Any]) -> dict[str, Any]:
    names = {"D0": Value(0, 64, "u"), "EXEC": Value(0, 64, "u"), "laneId": Value(0, 32, "i"), **names}
    lines = [line.partition("//")[0].strip().rstrip(";") for line in text.splitlines()]
    run([line for line in lines if line], names)
    return names


def run(lines: list[str], names: dict[str, Any]) -> None:
    at = 0
    while at < len(lines):
        line = lines[at]
        if found := re.fullmatch(r"(\w+) = lambda\((.*)\) \(", line):
            end = next(n for n in range(at, len(lines)) if lines[n].endswith(")") and lines[n].startswith("endif"))
            body = [*lines[at + 1 : end], "endif"]
            names[found[1]] = define([x.strip() for x in found[2].split(",")], body, names)
            at = end
        elif line.startswith("if "):
            at = run_branches(lines, at, names)
        elif found := re.fullmatch(r"for (\w+) in (.+) : (.+) do", line):
            end = next(n for n in range(at, len(lines)) if lines[n] == "endfor")
            first, last = (Reader(x, names).expression().bits for x in (found[2], found[3]))
            for i in range(first, last + 1):
                names[found[1]] = Value(i, 32, "i", plain=True)
                run(lines[at + 1 : end], names)
            at = end
        elif found := re.fullmatch(r"declare (\w+) : (\d+)'\w(?:\[(\d+)\])?", line):
            empty = Value(0, int(found[2]), "u")
            names[found[1]] = [empty] * int(found[3]) if found[3] else empty
        elif line.startswith("return "):
            raise Return(Reader(line.removeprefix("return "), names).expression())
        elif not line.startswith("TTBL ="):  # given, as the modifier bitop3
            Reader(line, names).assign()
        at += 1


def define(parameters: list[str], body: list[str], outer: dict[str, Any]) -> Callable[..., Value]:
    def call(*args: Value) -> Value:
        try:
            run(body, {**outer, **dict(zip(parameters, args, strict=True))})
        except Return as e:
            return e.args[0]
        raise AssertionError("no value returned")

    return call


def run_branches(lines: list[str], at: int, names: dict[str, Any]) -> int:
    """An `if` with its other branches, none of them nested; where it ends."""
    end = next(n for n in range(at, len(lines)) if lines[n] == "endif")
    heads = [n for n in range(at, end) if lines[n].startswith(("if ", "elsif ", "else"))]
    for head, after in zip(heads, [*heads[1:], end], strict=True):
        found = re.fullmatch(r"(?:els)?if (.+) then", lines[head])
        if found is None or Reader(found[1], names).expression().bits:
            run(lines[head + 1 : after], names)
            break
    return end


SIMM32 = {"v_fmamk_f32": {"S0": 0, "SIMM32": 1, "S1": 2}, "v_fmaak_f32": {"S0": 0, "S1": 1, "SIMM32": 2}}


def definition(name: str, op: arithmetic.Op, text: str) -> Callable[..., Any]:
    """The pseudocode as `test_executors_gcn` writes its definitions: from bits to bits."""

    def compute(*args: int) -> Any:
        names: dict[str, Any] = {"TTBL": Value(0xCA, 32, "u"), "SCC": Value(0, 1, "u"), "VCC": Value(0, 64, "u")}
        slots = SIMM32.get(name, {f"S{n}": n for n in range(len(op.sources))})
        for slot, n in slots.items():
            kind = op.sources[n]
            if kind in ("scc", "mask"):
                names["SCC" if kind == "scc" else "VCC"] = Value(args[n], 64, "u")
            else:
                names["D0" if kind[0] == "=" else slot] = Value(args[n], 64, "u")
        names.setdefault("SIMM16", names.get("S0"))
        after = execute(text, names)
        results = []
        for kind in op.results:
            if kind == "scc":
                results.append(int(after["SCC"].bits != 0))
            elif kind in ("mask", "exec"):
                results.append(condition(name, after) & 1)
            else:
                value = after["D0"].read_as(int(kind[1:]), kind[0].replace("b", "u"))
                nan = kind[0] == "f" and np.isnan(value.number)
                results.append(plain.NAN if nan else value.bits)
        return results[0] if len(results) == 1 else tuple(results)

    return compute


def condition(name: str, after: dict[str, Any]) -> int:
    if name.startswith("v_cmp"):
        return after["EXEC" if name.startswith("v_cmpx") else "D0"].bits
    return after["D1"].bits if "D1" in after else after["VCC"].bits


CASES = [
    (name, n)
    for name in sorted({*arithmetic.VECTOR, *arithmetic.SCALAR} - set(ABSENT))
    for n in range(len(PSEUDOCODE[name]))
]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_an_opcode_computes_what_its_pseudocode_says(name: str, n: int) -> None:
    if name in plain.CONSTANT_ONLY:  # its source is a constant: one at a time
        define = definition(name, arithmetic.SCALAR[name], PSEUDOCODE[name][n])
        for x in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
            assert plain.probe([f"{name} s40, {x:#x}"]).s[0, 40] == define(x)
        return
    vector = name in arithmetic.VECTOR
    op = (arithmetic.VECTOR if vector else arithmetic.SCALAR)[name]
    modifiers = "bitop3:0xca" if name.startswith("v_bitop3") else ""

    def run_op(*args: Any) -> list[Any]:
        return plain.run_vector(*args, modifiers=modifiers) if vector else plain.run_scalar(*args)

    plain.check_op(name, op, definition(name, op, PSEUDOCODE[name][n]), run_op, 320)


def test_what_has_no_pseudocode_is_listed() -> None:
    assert {name for name in {*arithmetic.VECTOR, *arithmetic.SCALAR} if name not in PSEUDOCODE} == set(ABSENT)


@pytest.mark.parametrize("name", sorted(arithmetic.PACKED))
def test_packed_opcodes(name: str) -> None:
    """Without `op_sel`, which the pseudocode leaves out."""
    count = 3 if name == "v_pk_fma_f32" else 2
    rng = plain.random.Random(name)
    words = np.array([[plain.draw(rng, "f32") for _ in range(64)] for _ in range(2 * count)], np.uint32)
    sources = ", ".join(f"v[{2 * n}:{2 * n + 1}]" for n in range(count))
    m = plain.probe([f"{name} v[20:21], {sources}"], vectors={n: words[None, n] for n in range(2 * count)})
    for lane in range(64):
        given = {
            f"S{n}": Value(int(words[2 * n, lane]) | int(words[2 * n + 1, lane]) << 32, 64, "u") for n in range(count)
        }
        want = execute(PSEUDOCODE[name][0], given)["D0"].bits
        for half in range(2):
            value = Value(want >> 32 * half & plain.M32, 32, "f")
            expected = plain.NAN if np.isnan(value.number) else value.bits
            assert plain.agree(expected, int(m.v[20 + half, 0, lane]), 32)
