"""Executes the PTX that Triton emits: all threads of a grid at once, each register one numpy array.

    program = parse(compiled.asm["ptx"])
    run(program, [*addresses, *scalars], grid, num_threads, shared_bytes, memory)

Semantics are those of NVIDIA's "Parallel Thread Execution ISA", by the names of its sections: this file has memory,
barriers and control flow; `ptx_arithmetic` what a thread computes by itself, `ptx_warps` what those of a warp do
together, `ptx_threads` the registers, `ptx_text` the syntax. It shows nothing of ptxas, of the order of memory accesses
between threads, or of time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from portakv.conformance.executors import ptx_text
from portakv.conformance.executors.errors import ExecutionError, MissingLanes, UnknownInstruction
from portakv.conformance.executors.memory import Memory
from portakv.conformance.executors.ptx_arithmetic import DTYPES, operation
from portakv.conformance.executors.ptx_text import (
    Address,
    Immediate,
    Instruction,
    Label,
    Listing,
    Operand,
    Sink,
    Vector,
)
from portakv.conformance.executors.ptx_threads import Step, Threads, addresses_of, elements_of, read_as, write_as
from portakv.conformance.executors.ptx_warps import (
    is_transposed,
    load_matrices,
    reduce,
    shuffle,
    store_matrices,
    synchronize,
)

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel whose instructions are understood.

    `steps` has None for the instructions that end a block, of which `targets` has the branches'; blocks begin at
    `leaders`.
    """

    listing: Listing
    steps: tuple[Step | None, ...]
    targets: tuple[int | None, ...]
    leaders: frozenset[int]

    @property
    def parameters(self) -> tuple[int, ...]:
        """Their sizes in bytes."""
        return self.listing.parameters


_ENDS = ("bra", "bra.uni", "ret", "exit", "bar.sync", "barrier.sync", "barrier.sync.aligned")


def parse(text: str) -> Program:
    """A program from a module of PTX with one kernel. Raises `UnknownInstruction` for the first that is not known."""
    listing = ptx_text.read(text)
    steps: list[Step | None] = []
    targets: list[int | None] = []
    leaders = set(listing.labels.values())
    for at, instruction in enumerate(listing.instructions):
        ends = instruction.name in _ENDS
        target = None
        if ends:
            leaders.add(at + 1)
            match instruction.name.split(".")[0], instruction.operands:
                case "bra", (Label(name),) if name in listing.labels:
                    target = listing.labels[name]
                case (("ret" | "exit"), ()):
                    pass
                case (("bar" | "barrier"), (Immediate(0),)):
                    leaders.add(at)
                case _:
                    raise UnknownInstruction(instruction.text)
        steps.append(None if ends else _bind(instruction))
        targets.append(target)
    return Program(listing, tuple(steps), tuple(targets), frozenset(leaders))


def run(
    program: Program,
    args: Sequence[int],
    grid: tuple[int, int, int],
    num_threads: int,
    shared_bytes: int,
    memory: Memory,
    schedule: random.Random | None = None,
) -> None:
    """Run a grid of groups (CTAs) of `num_threads` threads to its end.

    args: addresses and integers, one a parameter. Threads at the lowest instruction go first, all together; with a
    `schedule` a random choice of warps goes on by one basic block at a time. Raises `ExecutionError`.
    """
    threads = Threads(program.listing, args, grid, num_threads, shared_bytes, memory)
    with np.errstate(all="ignore"):
        while (chosen := threads.choose(schedule)) is not None:
            _run_block(program, threads, *chosen)


def _run_block(program: Program, threads: Threads, at: int, mask: Array) -> None:
    """Run the instructions from `at` to the end of their block."""
    while True:
        step = program.steps[at]
        instruction = program.listing.instructions[at]
        try:
            if step is None:
                break
            step(threads, _guarded(instruction, threads, mask))
        except ExecutionError as e:
            raise type(e)(f"{instruction.text}: {e}") from None
        at += 1
        if at in program.leaders:
            threads.at[mask] = at
            return
    active = _guarded(instruction, threads, mask)
    target = program.targets[at]
    threads.at[mask] = at + 1
    if target is not None:
        threads.at[active] = target
    elif instruction.name in ("ret", "exit"):
        threads.at[active] = len(program.listing.instructions)
    else:
        if not np.array_equal(active, mask):
            raise MissingLanes(f"{instruction.text}: only for some threads")
        threads.at[mask] = at
        threads.wait(at, mask)


def _guarded(instruction: Instruction, threads: Threads, mask: Array) -> Array:
    """The threads of `mask` whose guard predicate lets them execute (section "Predicated Execution")."""
    if instruction.guard is None:
        return mask
    guard: Array = threads.registers[instruction.guard.index]
    return np.logical_and(mask, ~guard if instruction.negated else guard)


def _bind(instruction: Instruction) -> Step:
    operands = instruction.operands
    try:
        match instruction.name.split("."):
            case ["ld", "param", kind]:
                return _load_parameter(kind, *operands)
            case ["ld", "global" | "shared" as space, *vector, kind]:
                return _load(space, _width(vector), kind, *operands)
            case ["st", "global" | "shared" as space, *vector, kind]:
                return _store(space, _width(vector), kind, *operands)
            case ["red", "global", "gpu", "relaxed", "add", "u32" | "u64" as kind]:
                return _atomic_add(kind, Sink(), *operands)
            case ["atom", "global", "gpu", "relaxed" | "acq_rel", "add", "u32" | "u64" as kind]:
                return _atomic_add(kind, *operands)
            case ["shfl", "sync", "up" | "down" | "bfly" | "idx" as mode, "b32"]:
                return shuffle(mode, *operands)
            case ["redux", "sync", "add" | "min" | "max" | "and" | "or" | "xor" as how, "s32" | "u32" | "b32" as kind]:
                return reduce(how, kind, *operands)
            case ["ldmatrix", "sync", "aligned", "m8n8", "x1" | "x2" | "x4" as count, *trans, "shared", "b16"]:
                return load_matrices(int(count[1]), is_transposed(trans), *operands)
            case ["stmatrix", "sync", "aligned", "m8n8", "x1" | "x2" | "x4" as count, *trans, "shared", "b16"]:
                return store_matrices(int(count[1]), is_transposed(trans), *operands)
            case ["bar", "warp", "sync"]:
                return synchronize(*operands)
            case ["mov", "b16" | "b32" | "b64" as kind] if any(isinstance(o, Vector) for o in operands):
                return _move_vector(kind, *operands)
        return _compute(instruction.name, operands)
    except TypeError as e:
        raise UnknownInstruction(f"{instruction.text}: operands that are not implemented") from e
    except UnknownInstruction as e:
        raise UnknownInstruction(f"{instruction.text}: {e}") from None


def _width(vector: Sequence[str]) -> int:
    """Elements of a vector access; other modifiers, such as caching hints, are not known."""
    widths = {(): 1, ("v2",): 2, ("v4",): 4, ("v8",): 8}
    if tuple(vector) not in widths:
        raise UnknownInstruction(f"modifier .{'.'.join(vector)}")
    return widths[tuple(vector)]


def _compute(name: str, operands: Sequence[Operand]) -> Step:
    found = operation(name)
    if len(operands) != 1 + len(found.sources):
        raise UnknownInstruction(f"{len(operands)} operands")
    write = write_as(operands[0], found.result, found.converts)
    reads = [read_as(operand, kind, found.converts) for operand, kind in zip(operands[1:], found.sources, strict=True)]
    compute = found.compute

    def step(threads: Threads, mask: Array) -> None:
        sources = [read(threads) for read in reads]
        if found.divides and (mask & (sources[-1] == 0)).any():
            raise ExecutionError("division by zero, whose result is not specified")
        write(threads, compute(*sources), mask)

    return step


def _move_vector(kind: str, to: Operand, source: Operand) -> Step:
    """mov that packs a vector into a scalar, or takes one apart; the first element is the lowest bits (9.7.9, mov)."""
    bits, vector = int(kind[1:]), to if isinstance(to, Vector) else source
    assert isinstance(vector, Vector)
    part = f"b{bits // len(vector.parts)}"
    dtype = DTYPES[kind]
    if isinstance(to, Vector):
        read, writes = read_as(source, kind), [write_as(p, part) for p in vector.parts]

        def unpack(threads: Threads, mask: Array) -> None:
            parts = np.ascontiguousarray(read(threads)).view(DTYPES[part]).reshape(-1, len(writes)).copy()
            for i, write in enumerate(writes):
                write(threads, parts[:, i], mask)

        return unpack
    reads, write = [read_as(p, part) for p in vector.parts], write_as(to, kind)

    def pack(threads: Threads, mask: Array) -> None:
        parts = np.stack(np.broadcast_arrays(*(read(threads) for read in reads)), -1)
        write(threads, np.ascontiguousarray(parts).view(dtype)[:, 0], mask)

    return pack


def _load_parameter(kind: str, to: Operand, source: Operand) -> Step:
    """ld.param (9.7.9, ld): every thread reads the same."""
    if not isinstance(source, Address) or not isinstance(source.base, Immediate):
        raise UnknownInstruction("an address that is no parameter")
    index, begin = source.base.value, source.offset
    write, dtype = write_as(to, kind, wider=True), DTYPES[kind]

    def step(threads: Threads, mask: Array) -> None:
        value = threads.parameters[index][begin : begin + dtype.itemsize]
        if len(value) < dtype.itemsize:
            raise ExecutionError(f"parameter {index} has {len(threads.parameters[index])} bytes")
        write(threads, np.frombuffer(value, dtype), mask)

    return step


def _load(space: str, count: int, kind: str, to: Operand, source: Operand) -> Step:
    """9.7.9, ld: a vector's address is aligned to the whole of it."""
    writes = [write_as(part, kind, wider=True) for part in elements_of(to, count)]
    find, dtype = addresses_of(space, source), DTYPES[kind]

    def step(threads: Threads, mask: Array) -> None:
        memory, addresses = find(threads)
        loaded = memory.load(addresses, count * dtype.itemsize, mask).view(dtype)
        for i, write in enumerate(writes):
            write(threads, np.ascontiguousarray(loaded[:, i]), mask)

    return step


def _store(space: str, count: int, kind: str, to: Operand, source: Operand) -> Step:
    reads = [read_as(part, kind, wider=True) for part in elements_of(source, count)]
    find = addresses_of(space, to)

    def step(threads: Threads, mask: Array) -> None:
        memory, addresses = find(threads)
        values = np.stack([np.broadcast_to(read(threads), threads.count) for read in reads], -1)
        memory.store(addresses, values.view(np.uint8).reshape(threads.count, -1), mask)

    return step


def _atomic_add(kind: str, to: Operand, address: Operand, source: Operand) -> Step:
    """9.7.13, atom and red: integer adds wrap. Their order and scope do not matter where threads take turns."""
    write, find, read = write_as(to, kind), addresses_of("global", address), read_as(source, kind)

    def step(threads: Threads, mask: Array) -> None:
        memory, addresses = find(threads)
        values = np.broadcast_to(read(threads), threads.count).copy()
        write(threads, memory.atomic_add(addresses, values, mask), mask)

    return step
