"""Kernels broken on purpose, which the proofs must refuse: the control that they can fail at all."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

import z3

from portakv.conformance.prove.kernels import Subject
from portakv.conformance.prove.launch import as_z3
from portakv.conformance.prove.launches import cases
from portakv.conformance.prove.program import Lane, Program, Value
from portakv.conformance.prove.proof import CaseProof
from portakv.conformance.prove.terms import Sum, both, negate
from portakv.conformance.prove.threads import Thread
from portakv.conformance.prove.ttir import Op


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel with one comparison weakened: "refuted", or "equivalent", if no access of any launch changes, or
    "survived"."""

    line: str
    outcome: str


def weaken(op: Op) -> None:
    """Let a comparison hold in the nearest case in which it does not."""
    op.text = re.sub(r"cmpi (\w+)", lambda m: f"cmpi {WEAKENED[m[1]]}", op.text)


WEAKENED = {"slt": "sle", "sgt": "sge", "sle": "sle1", "sge": "sge1", "eq": "eq1", "ne": "true"}
"""Predicates: "sle1" is x <= y + 1, "sge1" x + 1 >= y, "eq1" x = y or x = y + 1, "true" always holds."""


def weaken_each(subject: Subject) -> Iterator[Mutant]:
    """Every comparison of a kernel, weakened alone."""
    original = subject.program()
    for i, op in enumerate(original.kernel.body.walk()):
        if op.name != "arith.cmpi":
            continue
        kernel = copy.deepcopy(original.kernel)
        weaken(list(kernel.body.walk())[i])
        broken = Program(kernel, subject.arguments)
        if same_accesses(subject, original, broken, op.results[0]):
            yield Mutant(op.text, "equivalent")
        else:
            refuted = any((x.problem or "").startswith("refuted") for x in subject.prove(broken))
            yield Mutant(op.text, "refuted" if refuted else "survived")


@dataclass(kw_only=True)
class Twin(Thread):
    """The lane that `whole` is, in a kernel in which only `changed` may differ; other values are those of `whole`."""

    whole: Thread
    changed: set[str]

    def value(self, name: str, at: Lane) -> Value:
        return super().value(name, at) if name in self.changed else self.whole.value(name, at)

    def variable(self, what: str, most: int) -> Sum:
        found = self.whole.variable(what, most)
        assert self.terms.range(found)[1] >= most, (
            f"{what}: expected no more lanes or iterations than in the whole kernel"
        )
        return found


def same_accesses(subject: Subject, program: Program, broken: Program, weakened: str) -> bool:
    """Whether every lane of `broken` makes the accesses of `program`, whatever the launch: only `weakened` differs."""
    changed = program.derived(weakened)
    for case in cases(subject.variant):
        proof = CaseProof(program, subject.variant, dict(subject.constants), case)
        one, terms = proof.one, proof.terms
        twin = Twin(broken, terms, one.name, one.scalars, one.programs, whole=one, changed=changed)
        for a, access in zip(proof.touches, broken.accesses, strict=True):
            if changed.isdisjoint(access.decided_by()):
                continue
            b = twin.touch(access)
            moved = both(a.when, negate(terms.equal(a.pointer.offset, b.pointer.offset)))
            if proof.ask(z3.Or(as_z3(a.when) != as_z3(b.when), as_z3(moved))) is not None:
                return False
    return True
