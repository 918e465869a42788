"""A kernel as the prover reads it: what values are, and each access with the branches and loops on its way."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from portakv.conformance.prove.terms import Condition, Sum
from portakv.conformance.prove.ttir import Block, Kernel, Op, Type
from portakv.errors import PortaKVError


class UnknownOp(PortaKVError):
    """An op of TTIR that the prover has no meaning for."""


@dataclass(frozen=True, slots=True)
class Number:
    """A signed integer."""

    sum: Sum
    ok: Condition = True


@dataclass(frozen=True, slots=True)
class Truth:
    holds: Condition
    ok: Condition = True


@dataclass(frozen=True, slots=True)
class Pointer:
    """To a byte of a tensor, and how many bytes an element there has."""

    tensor: str
    offset: Sum
    size: int
    ok: Condition = True


@dataclass(frozen=True, slots=True)
class Data:
    """A float: it decides no address."""


Value = Number | Truth | Pointer | Data
Lane = tuple[Sum, ...]
"""An index into a tensor value, one number an axis."""

DATA = frozenset(
    f"arith.{name}" for name in ("addf", "subf", "mulf", "sitofp", "fptosi", "negf", "maximumf", "extf", "truncf")
)
"""Ops on floats: no number is known of their results."""

STRUCTURE = frozenset(("scf.yield", "tt.reduce.return", "tt.scan.return", "tt.return", "tt.store"))
"""Ops without a value."""


@dataclass(frozen=True, slots=True)
class Branch:
    """An op stands in a branch of an `scf.if`."""

    condition: str
    taken: bool


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """An op stands in the body of an `scf.for`."""

    op: Op


Path = tuple[Branch | Loop, ...]


def decided_by(path: Path) -> Iterator[str]:
    """The values that say whether an op on `path` is reached, and in which iterations."""
    for step in path:
        yield from (step.condition,) if isinstance(step, Branch) else step.op.operands[:3]


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """A load, store or atomic of the kernel; `index` counts those before it."""

    index: int
    op: Op
    path: Path

    @property
    def kind(self) -> str:
        return {"tt.load": "load", "tt.store": "store"}.get(self.op.name, "atomic")

    @property
    def mask(self) -> str | None:
        at = 1 if self.op.name == "tt.load" else 2
        return self.op.operands[at] if len(self.op.operands) > at else None

    def decided_by(self) -> Iterator[str]:
        """The values that say where it is made, and when."""
        yield self.op.operands[0]
        yield from () if self.mask is None else (self.mask,)
        yield from decided_by(self.path)


@dataclass(frozen=True, slots=True)
class Touch:
    """An access as one lane makes it: where, and when. `sound` must hold of every lane, the pointer's `ok` of those
    that access. `place` tells which lane it is: its programs, its elements, its iterations."""

    access: Access
    pointer: Pointer
    when: Condition
    sound: Condition
    place: tuple[Sum, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """What a lane loaded from a tensor: the element at a byte."""

    offset: Sum
    value: Sum
    mask: Condition


@dataclass(frozen=True, slots=True)
class Total:
    """A number that a loop adds up from nothing: `term` of every lane of every iteration."""

    loop: Op
    name: str
    term: str
    lanes: int
    result: Sum


def turn_of(loop: Op) -> str:
    """The variable that counts a loop's iterations."""
    return f"turn{loop.blocks[0].arguments[0]}"


def adds(op: Op) -> bool:
    """Whether it is a reduction, or a scan, by addition."""
    return op.name in ("tt.reduce", "tt.scan") and [x.name for x in op.blocks[0].ops[:-1]] == ["arith.addi"]


@dataclass
class Program:
    """A kernel's ops, found by the values that they define; shared by all threads."""

    kernel: Kernel
    arguments: Sequence[str]
    defined: dict[str, tuple[Op, int]] = field(default_factory=dict)
    carried: dict[str, tuple[Op, int]] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._enter(self.kernel.body, ())

    def _enter(self, block: Block, path: Path) -> None:
        for op in block.ops:
            self.paths[id(op)] = path
            for i, result in enumerate(op.results):
                self.defined[result] = op, i
            if op.name in ("tt.load", "tt.store", "tt.atomic_rmw"):
                self.accesses.append(Access(len(self.accesses), op, path))
            for i, inner in enumerate(op.blocks):
                if op.name == "scf.for":
                    self.carried |= {name: (op, at) for at, name in enumerate(inner.arguments)}
                    self._enter(inner, (*path, Loop(op)))
                elif op.name == "scf.if":
                    self._enter(inner, (*path, Branch(op.operands[0], i == 0)))

    def needed(self) -> set[int]:
        """The accesses, and the ops that their addresses, their masks and the ways to them derive from, by id."""
        sources: dict[str, list[str]] = {}
        for used, name in self._uses():
            sources.setdefault(name, []).append(used)
        kept = {id(access.op) for access in self.accesses}
        met: set[str] = set(self.kernel.parameters)
        waiting = [name for access in self.accesses for name in access.decided_by()]
        while waiting:
            name = waiting.pop()
            if name not in met:
                met.add(name)
                op, _ = self.defined.get(name) or self.carried[name]
                kept.add(id(op))
                # Of a load the value does not matter here, nor what a masked lane would get: both may be anything.
                waiting += (*sources.get(name, ()), *decided_by(self.paths[id(op)]))
        return kept

    def derived(self, start: str) -> set[str]:
        """`start` and the values that derive from it, by data; of a branch or a loop, those that come out of it."""
        found: set[str] = set()
        more = {start}
        while more:
            found |= more
            more = {name for used, name in self._uses() if used in more} - found
        return found

    def _uses(self) -> Iterator[tuple[str, str]]:
        """Each value that an op uses, with each that is made of it."""
        for op in self.kernel.body.walk():
            entered, carried = op.operands, list[str]()
            if op.name == "scf.for":
                turn, *carried = op.blocks[0].arguments
                entered, begun = op.operands[:3], op.operands[3:]
                yield from ((x, turn) for x in entered)
                yield from (x for made in (carried, op.results) for x in zip(begun, made, strict=True))
            yield from itertools.product(entered, op.results)
            for block in op.blocks:
                if block.ops[-1].name == "scf.yield":
                    yielded = block.ops[-1].operands
                    yield from zip(yielded, op.results, strict=True)
                    yield from zip(yielded, carried, strict=bool(carried))

    def skeleton(self) -> str:
        """The ops that are needed, their values numbered: kernels that differ only in what they make of data have the
        same."""
        kept = self.needed()
        numbers: dict[str, str] = {}

        def numbered(match: re.Match[str]) -> str:
            return numbers.setdefault(match[0], f"%{len(numbers)}")

        lines = [f"{self.arguments}"]
        for op in self.kernel.body.walk():
            if id(op) in kept:
                uses = " ".join((*op.results, *op.operands[: 1 if op.name == "tt.store" else None]))
                plain = re.sub(r"%[\w']+(?:#\d+)?(?::\d+)?", "", op.text)
                inner = (
                    [x.name for block in op.blocks for x in block.ops] if op.name in ("tt.reduce", "tt.scan") else []
                )
                mask = op.operands[2] if op.name == "tt.store" and len(op.operands) > 2 else ""
                ends = " ".join(x for block in op.blocks for x in (*block.arguments, *block.ops[-1].operands))
                lines.append(re.sub(r"%[\w']+(?:#\d+)?", numbered, f"{uses} {mask} {ends}") + plain + str(inner))
        return "\n".join(lines)

    def parameter(self, name: str) -> tuple[str, Type] | None:
        """The kernel's name of a parameter; TTIR may call it otherwise."""
        kinds = self.kernel.parameters
        if name not in kinds:
            return None
        return self.arguments[list(kinds).index(name)], kinds[name]
