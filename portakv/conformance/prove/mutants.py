"""Kernels broken on purpose, which the proofs must refuse: the control that they can fail at all."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass

from portakv.conformance.prove import ttir
from portakv.conformance.prove.kernels import Subject
from portakv.conformance.prove.program import Program
from portakv.conformance.prove.proof import prove_program, same_accesses
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
    """Every comparison that an address or a mask derives from, weakened alone."""
    kernel = ttir.parse(subject.text)
    original = Program(kernel, subject.arguments)
    needed = original.needed()
    for i, op in enumerate(kernel.body.walk()):
        if op.name != "arith.cmpi":
            continue
        if id(op) not in needed:
            yield Mutant(op.text, "equivalent")
            continue
        broken = copy.deepcopy(kernel)
        weaken(list(broken.body.walk())[i])
        program = Program(broken, subject.arguments)
        constants = dict(subject.constants)
        problems = [x for x in prove_program(program, subject.variant, constants) if x.problem]
        if problems:
            yield Mutant(op.text, "refuted")
        else:
            same = same_accesses(original, program, subject.variant, constants)
            yield Mutant(op.text, "equivalent" if same else "survived")
