"""Triton's IR (TTIR) as a tree of ops, read from the text that its compiler leaves in `asm["ttir"]`.

The grammar is that of MLIR's assembly (https://mlir.llvm.org/docs/LangRef/), as far as these kernels use it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_ASSIGNED = re.compile(r"(%\w+)(?::(\d+))? = (.*)")
_NAME = re.compile(r'"?([a-z_]+\.[a-z_.]+)"?')
_VALUE = re.compile(r"%\w+(?:#\d+)?")
_TYPE = re.compile(r"tensor<(?:[\dx]+x)?(?:!tt\.ptr<\w+>|\w+)>|!tt\.ptr<\w+>|\b(?:i|f|bf)\d+\b")


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar (`shape` is empty) or a tensor of `bits`-wide elements; of pointers, to elements of so many bits."""

    shape: tuple[int, ...]
    bits: int
    pointer: bool = False
    floating: bool = False

    @classmethod
    def parse(cls, text: str) -> Type:
        match = re.fullmatch(r"(?:tensor<((?:\d+x)*))?(!tt\.ptr<)?(i|f|bf)(\d+)>?>?", text)
        if match is None:
            raise ValueError(f"ttir: expected a type, got {text!r}")
        shape = tuple(int(n) for n in (match[1] or "").split("x") if n)
        return cls(shape, int(match[4]), match[2] is not None, match[3] != "i")


@dataclass(slots=True)
class Op:
    """One op. `types` are those that its line names, the last the first result's, but for `arith.cmpi` and ops without
    results; `text` is the line. `blocks` are its regions: a loop's body, the two branches of an if, a combiner."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    types: tuple[Type, ...]
    text: str
    blocks: list[Block] = field(default_factory=list)

    @property
    def predicate(self) -> str:
        """What `arith.cmpi` asks: "slt" and the like."""
        return self.text.split()[1]

    @property
    def axis(self) -> int:
        return int(self.attribute("axis"))

    def attribute(self, name: str) -> str:
        match = re.search(rf"\b{name} = (\w+)", self.text)
        if match is None:
            raise ValueError(f"ttir: expected {name} in {self.text!r}")
        return match[1]


@dataclass(slots=True)
class Block:
    """Ops in order, and the values that the block is entered with."""

    arguments: tuple[str, ...]
    ops: list[Op] = field(default_factory=list)

    def walk(self) -> Iterator[Op]:
        """Every op, those of inner blocks after their own."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's parameters, with their types, and its body."""

    parameters: dict[str, Type]
    body: Block


def parse(text: str) -> Kernel:
    """The one kernel of a module; raises `ValueError` for a line that is not understood."""
    lines = [line for raw in text.splitlines() if (line := _without_locations(raw).strip()) and line[0] != "#"]
    at = next((i for i, line in enumerate(lines) if line.startswith("tt.func")), None)
    if at is None:
        raise ValueError("ttir: expected a tt.func")
    parameters = dict(re.findall(r"(%\w+): (!tt\.ptr<\w+>|\w+)", lines[at]))
    body, end = _parse_block(lines, at + 1, ())
    if lines[end] != "}":
        raise ValueError(f"ttir: expected the end of tt.func, got {lines[end]!r}")
    _name_apart(body, {name: name for name in parameters}, set(parameters))
    return Kernel({name: Type.parse(kind) for name, kind in parameters.items()}, body)


def _without_locations(line: str) -> str:
    """`line` without its ` loc(…)`, in which parentheses nest."""
    while (start := line.find(" loc(")) >= 0:
        end, depth = start + len(" loc("), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        line = line[:start] + line[end:]
    return line


def _parse_block(lines: list[str], at: int, arguments: tuple[str, ...]) -> tuple[Block, int]:
    """The block that begins at line `at`, and the line that ends it."""
    block = Block(arguments)
    while not lines[at].startswith("}"):
        if lines[at].startswith("^"):
            block.arguments = tuple(_VALUE.findall(lines[at]))
            at += 1
            continue
        op = _parse_op(lines[at])
        block.ops.append(op)
        while lines[at].endswith("{"):  # once more at "} else {"
            inner = (op.operands[0], *op.operands[4::2]) if op.name == "scf.for" else ()
            region, at = _parse_block(lines, at + 1, inner)
            op.blocks.append(region)
        if op.name == "scf.for":
            # %low = %from to %to step %by iter_args(%x = %init, …)
            low, first, last, step, *carried = op.operands
            op.blocks[0].arguments = (low, *carried[::2])
            op.operands = (first, last, step, *carried[1::2])
        if op.blocks and "->" in lines[at]:  # the type of an op in generic form stands at its end
            op.types = tuple(Type.parse(t) for t in _TYPE.findall(lines[at]))
        at += 1
    return block, at


def _parse_op(line: str) -> Op:
    assigned = _ASSIGNED.fullmatch(line)
    result, count, text = assigned.groups() if assigned else (None, None, line)
    name = _NAME.match(text)
    if name is None:
        raise ValueError(f"ttir: expected an op, got {line!r}")
    results = (
        () if result is None else (result,) if count is None else tuple(f"{result}#{i}" for i in range(int(count)))
    )
    # Types come after the last colon that is not an attribute's.
    types = re.sub(r"[<{][^<>{}]*=[^<>{}]*[>}]", "", text).partition(" : " if " : " in text else "->")[2]
    if name[1] == "scf.if" or name[1] == "scf.for":
        types = text.partition("->")[2].partition(" : ")[0]
    found = tuple(Type.parse(t) for t in _TYPE.findall(types))
    return Op(name[1], results, tuple(_VALUE.findall(text.partition(" : ")[0])), found, text)


def _name_apart(block: Block, scope: dict[str, str], taken: set[str]) -> None:
    """Rename values so that no two of a kernel share a name: blocks beside each other may use one again."""

    def define(names: tuple[str, ...]) -> tuple[str, ...]:
        fresh = []
        for name in names:
            new = name
            while new in taken:
                new += "'"
            taken.add(new)
            scope[name] = new
            fresh.append(new)
        return tuple(fresh)

    block.arguments = define(block.arguments)
    for op in block.ops:
        op.operands = tuple(scope[name] for name in op.operands)
        for inner in op.blocks:
            _name_apart(inner, dict(scope), taken)
        op.results = define(op.results)
