"""The conformance suite on compiled code, executed without its hardware: what `portakv check --target` runs.

    for outcome in check_targets([Target.parse("sm_90")]):
        print(outcome.op, outcome.row, outcome.result, outcome.detail)

It shows nothing of what a vendor's assembler makes of the code, of memory ordering, or of speed.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from portakv import dispatch, testing
from portakv.buffers import Mismatch
from portakv.check import Outcome, Result
from portakv.compile import Target
from portakv.conformance import far, mutations
from portakv.conformance.executors.errors import ExecutionError
from portakv.conformance.executors.launcher import ExecutingLauncher, load_executor
from portakv.errors import PortaKVError
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS, INDEX_DTYPES, PAD, KVFormat, Variant
from portakv.kernels import _triton
from portakv.kernels.reference import rows as reference
from portakv.write_loc import GraphWriteLoc

Tensor = torch.Tensor

CPU = torch.device("cpu")
SCALES = (1.0, 0.37, 2.0**125, 1e-39)
"""They take inputs and results through the subnormals of every dtype."""

Check = Callable[[], int]
"""Raises for what is wrong; returns how many cases it ran."""


@dataclass(frozen=True, slots=True)
class Task:
    """One or more checks of a target, which run in one process; `line` is what they are reported as."""

    target: str
    line: str
    check: Check
    cases: int


@functools.cache
def cases_of(op: str) -> tuple[testing.Case, ...]:
    return tuple(testing.cases(op))


def tasks(target: Target, every: int = 1) -> list[Task]:
    """All checks of a target; of the variants with a format every `every`-th."""
    name = target.name
    out: list[Task] = []
    for op in _triton.OPS:
        by_variant: dict[Variant, list[testing.Case]] = {}
        for case in cases_of(op):
            by_variant.setdefault(case.variant, []).append(case)
        step = every if any(variant.fmt for variant in by_variant) else 1
        chosen = list(by_variant.values())[::step]
        out += [
            Task(name, op, functools.partial(check_cases, name, op, some), len(some))
            for some in (list(itertools.chain(*chosen[i : i + 8])) for i in range(0, len(chosen), 8))
        ]
    for kept in (*FP8_DIALECTS, *FLOAT_DTYPES):
        check = functools.partial(check_floats, name, kept)
        out.append(Task(name, "every 16-bit pattern", check, len(FLOAT_DTYPES) * len(SCALES)))
    for op in _triton.OPS:
        if some := far.choose(cases_of(op)) if op in FAR_OPS else []:
            out.append(Task(name, "rows past 2^32", functools.partial(check_far, name, op), len(some)))
    out.append(Task(name, "rows past 2^32", functools.partial(check_far_mapping, name), len(INDEX_DTYPES)))
    out.append(Task(name, "graph buffers filled inside", functools.partial(check_graph_fill, name), len(FILLS)))
    if checks_accesses(target):
        for op in _triton.OPS:
            some = ordered_cases(op)
            out.append(Task(name, "warps in random order", functools.partial(check_order, name, op), len(some)))
    for mutation, op in broken(target):
        check = functools.partial(check_mutation, name, mutation.name, op)
        out.append(Task(name, "kernels broken on purpose", check, 1))
    return out


def checks_accesses(target: Target) -> bool:
    """Whether the target's executor checks accesses and takes a schedule; where not, a wild one may end the process."""
    return bool(getattr(load_executor(target.gpu)[0], "CHECKS_ACCESSES", True))


def unavailable(target: Target) -> str | None:
    """Why code for the target cannot be executed here, or `None`."""
    if (why := target.unavailable()) is not None:
        return why
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is 1, and the interpreter compiles nothing"
    try:
        load_executor(target.gpu)
    except ModuleNotFoundError as e:
        return f"{e.name} is not installed"
    return None


def check_targets(
    targets: Sequence[Target],
    every: int = 1,
    jobs: int | None = None,
    on_task: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """The outcome of every line of every target, in order, in `jobs` processes (default: one a core).

    The row of an outcome is the target's name. `on_task` is told how many `tasks` are done, of how many in all.
    """
    every_task = [task for target in targets for task in tasks(target, every)]
    done: dict[tuple[str, str], Outcome] = {}
    for i, (task, (ran, failure)) in enumerate(zip(every_task, _run(every_task, jobs), strict=True)):
        on_task(i + 1, len(every_task))
        key = (task.target, task.line)
        before = done.get(key, Outcome(task.line, task.target, "passed"))
        detail = before.detail or failure
        result: Result = "failed" if detail else "passed"
        done[key] = Outcome(task.line, task.target, result, detail, before.cases + ran, before.total + task.cases)
    return list(done.values())


def _run(every_task: Sequence[Task], jobs: int | None) -> Iterator[tuple[int, str]]:
    jobs = jobs or len(os.sched_getaffinity(0))
    if jobs == 1:
        yield from map(run_task, every_task)
        return
    # Not by fork: torch's threads and the command's progress bar hold locks.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(run_task, every_task)
        except BrokenProcessPool as e:
            raise PortaKVError(f"a process that executed kernels died ({e})") from e


def run_task(task: Task) -> tuple[int, str]:
    """How many cases ran, and what was wrong with the first bad one, or nothing."""
    torch.set_num_threads(1)
    try:
        return task.check(), ""
    except Exception as e:  # whatever compiled code does is a finding about it
        return 0, str(e) if isinstance(e, Mismatch) else f"{type(e).__name__}: {e}"


def check_cases(target: str, op: str, cases: Sequence[testing.Case]) -> int:
    """The shared inputs of the op."""
    launcher = ExecutingLauncher(Target.parse(target))
    for case in cases:
        check_case(op, launcher, case)
    return len(cases)


def check_case(op: str, launcher: ExecutingLauncher, case: testing.Case) -> None:
    launcher.races = testing.repeats_a_slot(case)
    testing.check(op, launcher.bind(op), case, CPU, last_wins=False)


def check_floats(target: str, kept: torch.dtype) -> int:
    """Every 16-bit pattern (for float32 as the upper half) of every dtype stored as `kept`, and read again."""
    launcher = ExecutingLauncher(Target.parse(target))
    fmt = KVFormat(1, 256, 256, kept)
    pairs: list[tuple[Callable[..., None], ...]] = [(reference.store_kv, reference.gather_kv)]
    pairs.append((launcher.bind("store_kv"), launcher.bind("gather_kv")))
    for dtype in FLOAT_DTYPES:
        patterns = torch.arange(1 << 16, dtype=torch.int32)
        bits = (patterns << 16 | 0x1234) if dtype is torch.float32 else patterns.to(torch.int16)
        k, slots = bits.view(256, 1, 256).view(dtype), torch.arange(1, 257)
        for factor in SCALES:
            scale, results = torch.tensor([factor]), []
            for store, gather in pairs:
                caches = [torch.zeros((257, 1, 256 * kept.itemsize), dtype=torch.uint8).view(kept) for _ in "kv"]
                outs = [torch.zeros_like(k) for _ in "kv"]
                faults = testing.faults().tensor
                store(k, k.flip(0), *caches, slots, scale, 3 * scale, faults, fmt)
                gather(*caches, slots, *outs, scale, 3 * scale, faults, fmt)
                results.append([*caches, *outs, faults])
            _compare(f"{dtype} in {kept}, scale {factor}", *results)
    return len(FLOAT_DTYPES) * len(SCALES)


FAR_OPS = (*mutations.MOVERS, "build_read")


def check_far(target: str, op: str) -> int:
    kernel = ExecutingLauncher(Target.parse(target)).bind(op)
    cases = far.choose(cases_of(op))
    for case in cases:
        far.check(op, kernel, case)
    return len(cases)


def check_far_mapping(target: str) -> int:
    _check_far_mapping(ExecutingLauncher(Target.parse(target)), ("patch_map", "translate_loc", "build_read"))
    return len(INDEX_DTYPES)


def _check_far_mapping(launcher: ExecutingLauncher, ops: Iterable[str]) -> None:
    kernels = {op: getattr(reference, op) for op in ("patch_map", "translate_loc", "build_read")}
    for dtype in INDEX_DTYPES:
        far.check_mapping(dtype, kernels | {op: launcher.bind(op) for op in ops})


FILLS = (300, 7, 0, 299, 256)
"""Live tokens of each replay, in buffers for 300: more than one program writes them, and tails come and go."""


def check_graph_fill(target: str) -> int:
    """`GraphWriteLoc.fill` as a captured graph has it, over a PAD-padded input of full length, then a store at each of
    the locations; the same calls on the same tensors, as a replay is."""
    launcher = ExecutingLauncher(Target.parse(target))
    longest, rows = max(FILLS), 400
    fmt = KVFormat(1, 8, 8, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    mapping = torch.randint(0, rows, (rows + 1,), generator=generator)
    mapping[0], mapping[-1] = PAD, -1
    k = torch.randn((longest, 1, 8), generator=generator).to(torch.bfloat16)
    ones = torch.ones(1)
    sides: list[tuple[GraphWriteLoc, list[Tensor], Tensor, Callable[..., None]]] = []
    for translate, store in (
        (launcher.bind("translate_loc"), launcher.bind("store_kv")),
        (reference.translate_loc, reference.store_kv),
    ):
        faults = testing.faults().tensor
        caches = [torch.zeros((rows, 1, 8), dtype=torch.bfloat16) for _ in range(8)]

        def fill(
            loc: Tensor, *outs: Tensor | None, translate: Callable[..., None] = translate, faults: Tensor = faults
        ) -> None:
            translate(mapping, loc, *outs, faults)

        sides.append(
            (GraphWriteLoc(fill, longest, dispatch.device_of(CPU), CPU, int32_twin=True), caches, faults, store)
        )
    slots = torch.zeros(longest, dtype=torch.int64)
    for live in FILLS:
        slots.fill_(PAD)
        slots[:live] = torch.randperm(rows, generator=generator)[:live]
        if live > 3:
            slots[1:4] = torch.tensor([-1, rows + 5, 2**40])
        results = []
        for write_loc, caches, faults, store in sides:
            write_loc.fill(slots)
            twin = write_loc.int32
            assert twin is not None
            locations = (write_loc.loc, twin.loc)
            for i, loc in enumerate(locations):
                store(k, k, caches[2 * i], caches[2 * i + 1], loc, ones, ones, faults, fmt)
            results.append([*locations, write_loc.swa_loc, twin.swa_loc, *caches, faults])
        _compare(f"{live} live tokens", *results)
    return len(FILLS)


def ordered_cases(op: str) -> list[testing.Case]:
    """A few of the op's cases with more than one warp; of rows fewer, whose warps are many."""
    tokens = {False: max(testing.TOKENS), True: 33}
    cases = [case for case in cases_of(op) if case.tokens == tokens[case.variant.fmt is not None]]
    return cases[:: max(1, len(cases) // 6)][:6]


def check_order(target: str, op: str) -> int:
    """Warps that take turns at random, at the ends of basic blocks."""
    cases = ordered_cases(op)
    for case in cases:
        launcher = ExecutingLauncher(Target.parse(target), random.Random(case.seed))
        check_case(op, launcher, case)
    return len(cases)


def broken(target: Target) -> Iterator[tuple[mutations.Mutation, str]]:
    """Every mistake, with each op that it can be made in."""
    launcher = ExecutingLauncher(target)
    for mutation in mutations.MUTATIONS:
        for op in _triton.OPS:
            source = launcher.source(cases_of(op)[0].variant, target.lanes)
            if mutation.applies_to(op, source):
                yield mutation, op


def check_mutation(target: str, name: str, op: str) -> int:
    """Raise unless a kernel broken in that way is caught."""
    if mutations.find(name).wild and not checks_accesses(Target.parse(target)):
        process = multiprocessing.get_context("spawn").Process(target=_check_mutation, args=(target, name, op))
        process.start()
        process.join()
        if process.exitcode == 1:  # a signal is a negative one
            raise AssertionError(f"{op} {name}, and no case showed it")
    else:
        _check_mutation(target, name, op)
    return 1


def _check_mutation(target: str, name: str, op: str) -> None:
    mutation = mutations.find(name)
    launcher = mutations.BrokenLauncher(Target.parse(target), mutation)
    checks: list[Callable[[], Any]]
    if not mutation.far:
        cases = [case for case in cases_of(op) if case.tokens >= 7]
        random.Random(0).shuffle(cases)
        checks = [functools.partial(check_case, op, launcher, case) for case in cases]
    elif op in FAR_OPS:
        checks = [functools.partial(far.check, op, launcher.bind(op), case) for case in far.choose(cases_of(op))]
    else:
        checks = [functools.partial(_check_far_mapping, launcher, [op])]
    for check in checks:
        try:
            check()
        except (Mismatch, ExecutionError):
            return
    raise AssertionError(f"{op} {name}, and none of {len(checks)} cases showed it")


def _compare(what: str, want: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        differ = int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
        if differ:
            raise Mismatch(f"{what}: result {i}: {differ} bytes differ")
