"""Proofs about one compiled kernel: every access inside its tensor, no address that overflows, no byte written twice.

Each is a question to z3 whether a launch exists that breaks it. No answer in time counts as one that does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import z3

from portakv.conformance.prove.launch import Case, Launch
from portakv.conformance.prove.launches import LAUNCHES, cases
from portakv.conformance.prove.program import DATA, STRUCTURE, Access, Program, Total, Touch, UnknownOp
from portakv.conformance.prove.terms import Condition, Sum, Terms, both, implies, negate, number
from portakv.conformance.prove.threads import Thread
from portakv.formats import FAULT_KINDS, Variant

SECONDS = 20
"""That z3 has for one question."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was to be proved; `problem` says why it is not."""

    what: str
    problem: str | None = None


def prove(program: Program, variant: Variant, constants: Mapping[str, Any]) -> Iterator[Finding]:
    """Everything about a kernel, as it is found. Raises `UnknownOp` for an op that has no meaning here."""
    if variant.op not in LAUNCHES:
        raise UnknownOp(f"{variant.op}: expected an op whose launch is declared, one of {sorted(LAUNCHES)}")
    _require_meanings(program)
    unreached = set(program.accesses)
    for case in cases(variant):
        yield from CaseProof(program, variant, constants, case).findings(unreached)
    for access in unreached:
        if access.kind != "atomic":  # faults of a kind that int32 slots cannot have are counted nowhere
            yield Finding(f"{_name(access)} happens", "no launch makes it: nothing is shown of it")


def _require_meanings(program: Program) -> None:
    """Raise `UnknownOp` for an op that `Thread` has no meaning for."""
    for op in program.kernel.body.walk():
        if op.name not in STRUCTURE | DATA and not hasattr(Thread, f"do_{op.name.replace('.', '_')}"):
            raise UnknownOp(f"{op.name}: expected an op that the prover knows, got {op.text!r}")


def _name(access: Access) -> str:
    return f"{access.kind} {access.index} ({access.op.operands[0]})"


class CaseProof:
    """One form of a launch."""

    def __init__(self, program: Program, variant: Variant, constants: Mapping[str, Any], case: Case) -> None:
        self.program, self.case = program, case
        self.terms = Terms()
        self.launch = Launch(self.terms, variant, constants, case)
        LAUNCHES[variant.op](self.launch)
        self._places = 0
        self.one = self._thread("a")
        self.touches = [self.one.touch(access) for access in program.accesses]

    def _thread(self, name: str, known: dict[str, Sum] | None = None) -> Thread:
        return Thread(self.program, self.terms, name, self.launch.scalars, self.launch.programs, known=known or {})

    def findings(self, unreached: set[Access]) -> Iterator[Finding]:
        """All of this form; takes from `unreached` what some launch of it reaches."""
        everything = [fact for facts in self.terms.facts.values() for fact in facts]
        yield self._finding("a launch exists", self.ask(*everything, wanted=z3.sat))
        broken = [("a sum does not overflow", negate(owed)) for owed in self.one.owed]
        broken += [(f"{_name(touch.access)} stays inside", self._leaves(touch)) for touch in self.touches]
        yield from self._exclude(broken)
        new = [touch for touch in self.touches if touch.access in unreached]
        if new and self.ask(*(touch.when for touch in new), wanted=z3.sat) is None:
            unreached.clear()
        for touch in new if unreached else ():
            if self.ask(touch.when, wanted=z3.sat) is None:
                unreached.remove(touch.access)
        yield from self._counts()
        yield from self._once()

    def _exclude(
        self, broken: Sequence[tuple[str, Condition]], *known: Condition, twins: Mapping[str, str] | None = None
    ) -> Iterator[Finding]:
        """That none of several conditions can hold: asked of all at once, and of each where that is not so."""
        asked = [(what, condition) for what, condition in broken if not z3.is_false(condition)]
        together = asked and self.ask(*known, z3.Or(*(_z(x) for _, x in asked)), twins=twins)
        for what, condition in broken:
            surely = not together or z3.is_false(condition)
            yield self._finding(what, None if surely else self.ask(*known, condition, twins=twins))

    def _finding(self, what: str, problem: str | None) -> Finding:
        form = ", ".join(self.case.values())
        return Finding(f"{form}: {what}" if form else what, problem)

    def ask(self, *asked: Condition, wanted: Any = z3.unsat, twins: Mapping[str, str] | None = None) -> str | None:
        """None if z3 answers as wanted to whether all that is asked can hold at once, else what it says."""
        solver = z3.SolverFor("QF_UFLIA")  # with what it learnt from other questions it takes up to 300 times as long
        solver.set("timeout", SECONDS * 1000)
        asked = (*(x.holds for x in self.launch.assumed), *asked)
        solver.add(*self.terms.known(asked, twins), *(x for x in asked if x is not True))
        answer = solver.check()
        problem = None
        if answer == z3.sat and wanted == z3.unsat:
            model = solver.model()
            problem = "refuted: " + ", ".join(
                f"{x} = {model[x]}" for x in sorted(model.decls(), key=str) if x.arity() == 0 and "." not in str(x)
            )
        elif answer != wanted:
            problem = "no such launch" if answer == z3.unsat else f"not decided in {SECONDS} s"
        return problem

    def _leaves(self, touch: Touch) -> Condition:
        """That an access leaves its tensor, or that its address or mask overflows."""
        pointer = touch.pointer
        size = self.launch.tensors[pointer.tensor]
        inside = both(
            pointer.ok,
            self.terms.at_least(pointer.offset, self.launch.starts.get(pointer.tensor, 0)),
            self.terms.at_least(size, pointer.offset + pointer.size),
        )
        return z3.simplify(z3.Or(negate(touch.sound), _z(both(touch.when, negate(inside)))))

    # Faults.

    def _counts(self) -> Iterator[Finding]:
        """Each atomic adds one to the counter of the launch's declaration, and exactly when that says so."""
        atomics = [touch for touch in self.touches if touch.access.kind == "atomic"]
        declared = self.launch.counts(self.one)
        if len(declared) != len(atomics):
            yield self._finding(
                "faults are counted as declared", f"{len(declared)} declared, {len(atomics)} in the kernel"
            )
            return
        broken = []
        for (kind, when), touch in zip(declared, atomics, strict=True):
            if when is None:
                continue
            place = self.terms.equal(touch.pointer.offset, 8 * FAULT_KINDS.index(kind))
            right = both(place, _z(touch.when) == _z(when))
            broken.append((f"{_name(touch.access)} counts as declared", negate(right)))
        yield from self._exclude(broken)

    # No byte twice.

    def _once(self) -> Iterator[Finding]:
        stores = [touch for touch in self.touches if touch.access.kind == "store"]
        if not stores:
            return
        other = self._thread("b", self._totals_of_all())
        others = [other.touch(touch.access) for touch in stores]
        distinct = [
            *self._order_totals(other),
            self._distinct(other),
            *(self.launch.apart[x].holds for x in self.launch.distinct),
        ]
        for tensor in dict.fromkeys(touch.pointer.tensor for touch in stores):
            apart = self.launch.apart.get(tensor)
            known = [*distinct, *(() if apart is None else (apart.holds,))]
            broken = []
            for i, a in enumerate(stores):
                if a.pointer.tensor != tensor:
                    continue
                for j, b in enumerate(others):
                    if b.pointer.tensor == tensor and i <= j:
                        clash = both(a.when, b.when, self._overlap(a, b), self._different(a, b) if i == j else True)
                        what = f"{_name(a.access)} and {_name(b.access)} of two lanes write different bytes"
                        broken.append((what, _z(clash)))
                if tensor in self.launch.reserved:
                    at, where = self.launch.reserved[tensor]()
                    hit = both(where, self.terms.less(a.pointer.offset, at + 1))
                    hit = both(a.when, hit, self.terms.less(at, a.pointer.offset + a.pointer.size))
                    broken.append((f"{_name(a.access)} leaves the reserved page alone", _z(hit)))
            yield from self._exclude(broken, *known)
        for view in self.launch.views:
            pairs = [(a, b) for a in stores for b in others if (a.pointer.tensor, b.pointer.tensor) == view.tensors]
            known = [*distinct, *(x.holds for x in view.relations)]
            broken = []
            for a, b in pairs:
                clash = both(a.when, b.when, self._overlap(a, b, view.apart))
                what = f"{view.name}: {_name(a.access)} and {_name(b.access)} write different bytes"
                broken.append((what, _z(clash)))
            yield from self._exclude(broken, *known, twins=view.twins)

    # Sums over loops. z3 knows nothing of sums; what is proved of every term is said of them.

    def _terms_of(
        self, threads: Sequence[Thread], totals: Sequence[Total], where: Sum | None
    ) -> tuple[list[Sum], Condition]:
        """The terms that totals of one loop add at one place, any or `where`, and when the loop comes there."""
        loop, lanes = totals[0].loop, totals[0].lanes
        self._places += 1
        name = f"place{self._places}"
        if where is None:
            turn, lane = self.terms.name(f"{name}.turn", 0, 1 << 40), self.terms.name(f"{name}.lane", 0, lanes - 1)
        else:
            turn, lane = self.terms.divide(where, number(lanes), floor=True)
        besides = [thread.beside(f"{name}.{i}", turn, loop) for i, thread in enumerate(threads)]
        found = [t.integer(total.term, (lane,)).sum for t, total in zip(besides, totals, strict=True)]
        _, last, _, low = besides[0].bounds(loop)
        return found, both(self.terms.at_least(turn, 0), self.terms.less(low, last.sum))

    def _totals_of_all(self) -> dict[str, Sum]:
        """Totals that every program comes to."""
        other = self._thread("c")
        other.program_id(0), other.program_id(1)
        same = {}
        for total in self.one.totals:
            (x, y), when = self._terms_of([self.one, other], [total, total], None)
            if self.ask(when, negate(self.terms.equal(x, y))) is None:
                same[total.name] = total.result
        return same

    def _order_totals(self, other: Thread) -> list[Condition]:
        """What is known of two totals of one loop: if no term of x is above y's, x + (y's - x's term anywhere) <= y.

        That it is so is proved for x of any program, or of one not behind y's.
        """
        laws: list[Condition] = []
        every = [(thread, total) for thread in (self.one, other) for total in thread.totals]
        for (a, x), (b, y) in itertools.permutations(every, 2):
            if x.loop is not y.loop or x.lanes != y.lanes or x.result.key == y.result.key:
                continue
            first, second = a.program_id(0), b.program_id(0)
            (f, g), when = self._terms_of([a, b], [x, y], None)
            for order in (True, self.terms.at_least(second, first)):
                if self.ask(both(order, when, negate(self.terms.at_least(g, f)))) is None:
                    (f, g), there = self._terms_of([a, b], [x, y], first)
                    laws.append(implies(order, self.terms.at_least(y.result, x.result)))
                    laws.append(implies(both(order, there), self.terms.at_least(y.result, x.result + g - f)))
                    break
        return laws

    def _overlap(self, a: Touch, b: Touch, apart: Sum | int = 0) -> Condition:
        """Whether two accesses share a byte, if b's tensor begins `apart` bytes after a's."""
        from_a, from_b = a.pointer.offset, b.pointer.offset + apart
        return both(self.terms.less(from_a, from_b + b.pointer.size), self.terms.less(from_b, from_a + a.pointer.size))

    def _different(self, a: Touch, b: Touch) -> Condition:
        """That two threads at one access are not one: they differ in a program, a lane or an iteration."""
        return z3.Or(*(negate(self.terms.equal(x, y)) for x, y in zip(a.place, b.place, strict=True)))

    def _distinct(self, other: Thread) -> Condition:
        """That different elements of slot tensors name different slots, where these are live."""
        out: list[Condition] = []
        for tensor, (low, high) in self.launch.distinct.items():
            for x in self.one.reads.get(tensor, ()):
                for y in other.reads.get(tensor, ()):
                    same = self.terms.equal(x.offset, y.offset)
                    dead = [negate(self.terms.at_least(x.value, low)), negate(self.terms.less(x.value, high))]
                    out.append(z3.Or(_z(same), negate(self.terms.equal(x.value, y.value)), *dead))
        return both(*out)


def _z(condition: Condition) -> Condition:
    return z3.BoolVal(True) if condition is True else condition
