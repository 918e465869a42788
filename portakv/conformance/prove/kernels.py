"""Which kernels there are to prove: what the launchers compile, each kind of address arithmetic once."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from portakv.compile import FORMATS, Target, variant_name
from portakv.conformance.prove import ttir
from portakv.conformance.prove.program import Program
from portakv.conformance.prove.proof import Finding, prove
from portakv.formats import VECTOR_BYTES, Variant, list_variants
from portakv.testing import formats

_SAME_SIZE = {1: torch.float8_e4m3fn, 2: torch.float16, 4: torch.float32}
"""To an address a dtype is its size."""

_OF_ADDRESSES = ("HEADS", "ROWS", "K_DIM", "V_DIM", "BLOCK", "BLOCKS", "ALIGNED", "SPAN", "SEQUENCES")
"""The constexprs that say how rows are cut; the others are of floats, or stand in the kernel alone."""


def all_variants(conformance: bool = True) -> tuple[Variant, ...]:
    """Every variant that the launchers compile for the formats of `portakv compile`, and of the conformance cases.

    A launcher compiles by an explicit signature, never by the values of a call: kernel, constexprs and alignment follow
    from the variant (`launch.Source`). The cases launch a part of these, one slot width of two; the proof takes both.
    """
    ops = importlib.import_module("portakv.kernels._triton").OPS
    return tuple(v for v in list_variants((*(formats() if conformance else ()), *FORMATS)) if v.op in ops)


def plain(variant: Variant) -> Variant:
    """`variant` with one dtype for all of its size: what its launch is declared from."""
    fmt, dtype, rope = variant.fmt, variant.dtype, variant.rope
    if fmt is None or dtype is None:
        return variant
    # Only what writes a cache leaves its page 0 alone.
    page = 1 if variant.op.startswith("gather_kv") else fmt.page_size
    return replace(
        variant,
        fmt=replace(fmt, dtype=_SAME_SIZE[fmt.dtype.itemsize], page_size=page),
        dtype=_SAME_SIZE[dtype.itemsize],
        alignment=VECTOR_BYTES,  # stands in the constants
        rope=rope and _SAME_SIZE[rope.itemsize],
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """What is proved at once: kernels whose launches and address arithmetic are the same, by one of them."""

    variant: Variant
    constants: tuple[tuple[str, Any], ...]
    arguments: tuple[str, ...]
    text: str
    skeleton: str

    @classmethod
    def compile(cls, variant: Variant, target: Target) -> Subject:
        launcher = target.launcher()
        source = launcher.source(variant, target.lanes)
        return cls.of(variant, source, launcher.compile_ttir(variant, target.triton()))

    @classmethod
    def of(cls, variant: Variant, source: Any, text: str) -> Subject:
        """Raises `UnknownOp` for TTIR that the prover does not know."""
        arguments = source.arguments
        constants = tuple((name, source.constants[name]) for name in _OF_ADDRESSES if name in source.constants)
        skeleton = Program(ttir.parse(text), arguments).skeleton()
        return cls(plain(variant), constants, arguments, text, skeleton)

    @property
    def key(self) -> object:
        return self.variant, self.constants, self.skeleton

    def program(self) -> Program:
        return Program(ttir.parse(self.text), self.arguments)

    def prove(self, program: Program | None = None) -> Iterator[Finding]:
        """What is found of it, or of another kernel in its place."""
        return prove(program or self.program(), self.variant, dict(self.constants))


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one subject: the variants it stands for, how much is proved of it, and what is not."""

    op: str
    variants: tuple[str, ...]
    proved: int
    problems: tuple[str, ...]


def prove_all(
    target: Target, variants: Sequence[Variant], advance: Callable[[], None], processes: int | None = None
) -> Iterator[Result]:
    """A result for each subject among `variants`; calls `advance` once a variant. By default a process for every core.

    What cannot be compiled or read is a problem of its variant.
    """
    processes = processes or min(len(os.sched_getaffinity(0)), 1 + len(variants) // 16)
    # Not by fork: torch's threads and the command's progress bar hold locks.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found: dict[object, tuple[Subject, list[str]]] = {}
        compiled = pool.map(_compile, variants, [target] * len(variants), chunksize=8)
        for variant, subject in zip(variants, compiled, strict=True):
            if isinstance(subject, str):
                advance()
                yield Result(variant.op, (variant_name(variant),), 0, (subject,))
            else:
                found.setdefault(subject.key, (subject, []))[1].append(variant_name(variant))
        subjects = [subject for subject, _ in found.values()]
        for (subject, names), findings in zip(found.values(), pool.map(_prove, subjects), strict=True):
            for _ in names:
                advance()
            problems = tuple(f"{x.what}: {x.problem}" for x in findings if x.problem)
            yield Result(subject.variant.op, tuple(names), len(findings) - len(problems), problems)


def _compile(variant: Variant, target: Target) -> Subject | str:
    try:
        return Subject.compile(variant, target)
    except Exception as e:
        return f"{type(e).__name__}: {' '.join(str(e).split())}"


def _prove(subject: Subject) -> list[Finding]:
    try:
        return list(subject.prove())
    except Exception as e:
        return [Finding(type(e).__name__, " ".join(str(e).split()))]
