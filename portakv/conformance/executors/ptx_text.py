"""PTX text as instructions: what the sections "Syntax" and "Instruction Operands" of the PTX ISA describe.

Only what Triton writes is read; the rest raises `UnknownInstruction`. Lines for debuggers are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from portakv.conformance.executors.errors import UnknownInstruction


@dataclass(frozen=True, slots=True)
class Register:
    index: int
    bits: int
    """1 for a predicate."""


@dataclass(frozen=True, slots=True)
class Immediate:
    """The bits of a constant, or the address of a shared variable."""

    value: int


@dataclass(frozen=True, slots=True)
class Special:
    """A register that only reads, such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a part of a destination that nobody wants."""


Scalar = Register | Immediate | Special | Sink


@dataclass(frozen=True, slots=True)
class Vector:
    parts: tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`base` plus `offset` bytes; a parameter's base is its place in the parameter list."""

    base: Scalar
    offset: int


@dataclass(frozen=True, slots=True)
class Label:
    name: str


Operand = Scalar | Vector | Address | Label


@dataclass(frozen=True, slots=True)
class Instruction:
    """`name` is the opcode with its modifiers. It runs where `guard` is true, or false if `negated`."""

    name: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str


@dataclass(slots=True)
class Listing:
    """A kernel: `parameters` are their sizes in bytes, `labels` name the instruction that follows them."""

    parameters: tuple[int, ...] = ()
    registers: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0


_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "f32": 32, "u16": 16, "u32": 32, "u64": 64}

_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\(([^)]*)\)([^{]*)\{")
_MODULE = re.compile(r"\.(version|target|address_size)\b.*|\.(extern|visible)\b|\s+")
_SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\]\s*;?")
_STATEMENT = re.compile(
    r"""(?P<label>[$\w]+)\s*:(?!:)
    | (?P<brace>[{}])
    | \.(?:loc|file|pragma)\b[^\n]*
    | \.reg\s+\.(?P<kind>\w+)\s+(?P<registers>[^;]+);
    | (?P<shared>\.shared[^;]+;)
    | (?P<directive>\.\w+)[^;\n]*
    | (?:@(?P<negated>!?)(?P<guard>[%\w]+)\s+)?(?P<name>[a-z][\w.:]*)(?P<operands>[^;]*);""",
    re.VERBOSE,
)


def read(text: str) -> Listing:
    """The one kernel of a module. Raises `UnknownInstruction` for what is not understood."""
    text = re.sub(r"//.*", "", text)
    entry = _ENTRY.search(text)
    if entry is None:
        raise UnknownInstruction("expected a module with an .entry")
    reader = _Reader()
    head = _SHARED.sub(lambda found: reader.declare_shared(found[0]), text[: entry.start()])
    if rest := _MODULE.sub("", head):
        raise UnknownInstruction(f"directive {rest!r}")
    directives = re.sub(r"\.(reqntid|maxntid|minnctapersm|maxnreg)[\s\d,]+", "", entry[2]).strip()
    if directives:
        raise UnknownInstruction(f"directive {directives!r}")
    reader.declare_parameters(entry[1])
    reader.read_body(text, entry.end())
    return reader.listing


class _Reader:
    def __init__(self) -> None:
        self.listing = Listing()
        self._parameters: dict[str, int] = {}
        self._shared: dict[str, int] = {}
        # A block's registers hide those of the same name around it.
        self._scopes: list[dict[str, Register]] = [{}]

    def declare_parameters(self, text: str) -> None:
        sizes: list[int] = []
        for line in filter(None, (line.strip() for line in text.split(","))):
            found = re.fullmatch(r"\.param\s+\.[bufs](\d+)(?:\s+\.ptr\s+\.global\s+\.align\s+\d+)?\s+(\w+)", line)
            if found is None:
                raise UnknownInstruction(f"parameter {line!r}")
            self._parameters[found[2]] = len(sizes)
            sizes.append(int(found[1]) // 8)
        self.listing.parameters = tuple(sizes)

    def declare_shared(self, text: str) -> str:
        found = _SHARED.fullmatch(text)
        if found is None:
            raise UnknownInstruction(f"shared variable {text!r}")
        align, begin = int(found[1]), self.listing.shared_bytes
        begin = -(-begin // align) * align
        self._shared[found[2]] = begin
        self.listing.shared_bytes = begin + int(found[3] or 0)
        return ""

    def read_body(self, text: str, at: int) -> None:
        while True:
            while text[at].isspace() or text[at] == ";":
                at += 1
            found = _STATEMENT.match(text, at)
            if found is None or found["directive"]:
                raise UnknownInstruction(f"statement {text[at : at + 40].splitlines()[0]!r}")
            at = found.end()
            if found["label"]:
                self.listing.labels[found["label"]] = len(self.listing.instructions)
            elif found["brace"] == "{":
                self._scopes.append({})
            elif found["brace"]:
                self._scopes.pop()
                if not self._scopes:
                    return
            elif found["kind"]:
                self._declare_registers(found["kind"], found["registers"])
            elif found["shared"]:
                self.declare_shared(found["shared"])
            elif found["name"]:
                guard = self._scalar(found["guard"]) if found["guard"] else None
                if not isinstance(guard, Register | None):
                    raise UnknownInstruction(f"guard {found['guard']}")
                operands = tuple(self._operand(part) for part in _split(found["operands"]))
                text_ = " ".join(found[0].split())
                self.listing.instructions.append(
                    Instruction(found["name"], operands, guard, found["negated"] == "!", text_)
                )

    def _declare_registers(self, kind: str, names: str) -> None:
        if kind not in _BITS:
            raise UnknownInstruction(f"register type .{kind}")
        for name in (name.strip() for name in names.split(",")):
            family = re.fullmatch(r"([%\w]+)<(\d+)>", name)
            for one in [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]:
                self._scopes[-1][one] = Register(len(self.listing.registers), _BITS[kind])
                self.listing.registers.append(_BITS[kind])

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Vector(tuple(self._scalar(part) for part in _split(text[1:-1])))
        if text[0] == "[":
            found = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:([+-])\s*(-?\d+))?\s*\]", text)
            if found is None:
                raise UnknownInstruction(f"address {text!r}")
            sign = -1 if found[2] == "-" else 1
            return Address(self._scalar(found[1]), sign * int(found[3] or 0))
        return Label(text) if text[0] == "$" else self._scalar(text)

    def _scalar(self, text: str) -> Scalar:
        text = text.strip()
        for scope in reversed(self._scopes):
            if text in scope:
                return scope[text]
        if text in self._parameters:
            return Immediate(self._parameters[text])
        if text in self._shared:
            return Immediate(self._shared[text])
        if text == "_":
            return Sink()
        if text[0] == "%":
            return Special(text)
        if found := re.fullmatch(r"0[fF]([\da-fA-F]{8})", text):
            return Immediate(int(found[1], 16))
        if found := re.fullmatch(r"(-?)(0[xX][\da-fA-F]+|[1-9]\d*|0)U?", text):
            return Immediate(int(found[1] + found[2], 0))
        raise UnknownInstruction(f"operand {text!r}")


def _split(text: str) -> list[str]:
    """Operands between commas that no bracket or brace encloses."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip()]
