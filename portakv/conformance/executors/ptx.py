"""Executes the PTX that Triton emits: all threads of a grid at once, each register one numpy array.

    program = parse(compiled.asm["ptx"])
    run(program, [*addresses, *scalars], grid, num_threads, shared_bytes, memory)

Semantics are those of NVIDIA's "Parallel Thread Execution ISA", by the names of its sections: this file has memory,
the exchange between threads of a warp, barriers and control flow; `ptx_arithmetic` what a thread computes by itself;
`ptx_text` the syntax. It shows nothing of ptxas, of the order of memory accesses between threads, or of time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
    Operand,
    Register,
    Sink,
    Special,
    Vector,
)

Array = np.ndarray[Any, Any]

LANES = 32

Step = Callable[["_Threads", Array], None]
"""Executes one instruction for the threads that a mask names."""


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel whose instructions are understood. `parameters` are their sizes in bytes."""

    parameters: tuple[int, ...]
    registers: tuple[int, ...]
    shared_bytes: int
    instructions: tuple[Instruction, ...]
    steps: tuple[Step | None, ...]
    """None for the instructions that end a block, of which `targets` has the branches'."""
    targets: tuple[int | None, ...]
    leaders: frozenset[int]
    """Where blocks begin."""


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
    return Program(
        listing.parameters,
        tuple(listing.registers),
        listing.shared_bytes,
        tuple(listing.instructions),
        tuple(steps),
        tuple(targets),
        frozenset(leaders),
    )


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
    threads = _Threads(program, args, grid, num_threads, shared_bytes, memory)
    with np.errstate(all="ignore"):
        while (chosen := threads.choose(schedule)) is not None:
            _run_block(program, threads, *chosen)


class _Threads:
    """The state of all threads of a grid; thread t of group g is number g * num_threads + t."""

    def __init__(
        self,
        program: Program,
        args: Sequence[int],
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        memory: Memory,
    ) -> None:
        if num_threads % LANES:
            raise ExecutionError(f"{num_threads} threads are no whole number of warps")
        if len(args) != len(program.parameters):
            raise ExecutionError(f"{len(args)} arguments for {len(program.parameters)} parameters")
        groups = grid[0] * grid[1] * grid[2]
        self.count, self.group_size = groups * num_threads, num_threads
        self.memory = memory
        self.shared = Memory.of_groups(groups, max(shared_bytes, program.shared_bytes))
        self.parameters = [
            int(a).to_bytes(n, "little", signed=a < 0) for a, n in zip(args, program.parameters, strict=True)
        ]
        # Nothing is promised about a register that was not written: a pattern that no kernel counts on.
        self.registers = [
            np.full(
                self.count, bits == 1 or 0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1), bool if bits == 1 else f"u{bits // 8}"
            )
            for bits in program.registers
        ]
        thread, group = (x.astype(np.uint32) for x in np.divmod(np.arange(self.count), num_threads)[::-1])
        self.lane = thread % LANES
        # The groups of a grid are numbered along x first (section "Special Registers").
        self.special = {
            "%tid.x": thread,
            "%ctaid.x": group % grid[0],
            "%ctaid.y": group // grid[0] % grid[1],
            "%ctaid.z": group // (grid[0] * grid[1]),
            "%laneid": self.lane,
        } | {f"%nctaid.{axis}": np.full(1, n, np.uint32) for axis, n in zip("xyz", grid, strict=True)}
        self.special |= {"%ntid.x": np.full(1, num_threads, np.uint32)}
        self.group_base = group.astype(np.uint64) << np.uint64(32)
        self.at = np.zeros(self.count, np.int64)
        """The next instruction of each thread; the number of instructions once it has exited."""
        self.waits = np.zeros(self.count, bool)
        self._end = len(program.instructions)

    @property
    def exited(self) -> Array:
        return self.at >= self._end

    def choose(self, schedule: random.Random | None) -> tuple[int, Array] | None:
        """An instruction, and the threads that go on from there; None once all have exited."""
        at = np.where(self.waits, self._end, self.at)
        if schedule is None:
            lowest = int(at.min(initial=self._end))
            chosen = at == lowest
        else:
            by_warp = at.reshape(-1, LANES).min(1)
            ready = np.flatnonzero(by_warp < self._end)
            first = schedule.choice(ready) if len(ready) else 0
            lowest = int(by_warp[first]) if len(ready) else self._end
            warps = np.fromiter((schedule.random() < 0.5 for _ in by_warp), bool, len(by_warp))
            warps[first : first + 1] = True
            # A warp with lanes that are further behind runs those first.
            chosen = (at == lowest) & np.repeat(warps & (by_warp == lowest), LANES)
        if lowest < self._end:
            return lowest, chosen
        if self.waits.any():
            raise MissingLanes("a barrier that some threads of the group never reach")
        return None

    def wait(self, at: int, mask: Array) -> None:
        """bar.sync: a thread goes on once all threads of its group are there."""
        self.waits |= mask
        there = self.waits.reshape(-1, self.group_size).all(1)
        released = np.repeat(there, self.group_size) & self.waits
        if (self.at[released] != at).any():
            raise MissingLanes("threads of a group wait at different barriers")
        self.at[released] += 1
        self.waits &= ~released


def _run_block(program: Program, threads: _Threads, at: int, mask: Array) -> None:
    """Run the instructions from `at` to the end of their block."""
    while True:
        step = program.steps[at]
        instruction = program.instructions[at]
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
        threads.at[active] = len(program.instructions)
    else:
        if not np.array_equal(active, mask):
            raise MissingLanes(f"{instruction.text}: only for some threads")
        threads.at[mask] = at
        threads.wait(at, mask)


def _guarded(instruction: Instruction, threads: _Threads, mask: Array) -> Array:
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
                return _shuffle(mode, *operands)
            case ["redux", "sync", "add" | "min" | "max" | "and" | "or" | "xor" as how, "s32" | "u32" | "b32" as kind]:
                return _reduce(how, kind, *operands)
            case ["ldmatrix", "sync", "aligned", "m8n8", "x1" | "x2" | "x4" as count, *trans, "shared", "b16"]:
                return _load_matrices(int(count[1]), _is_transposed(trans), *operands)
            case ["stmatrix", "sync", "aligned", "m8n8", "x1" | "x2" | "x4" as count, *trans, "shared", "b16"]:
                return _store_matrices(int(count[1]), _is_transposed(trans), *operands)
            case ["bar", "warp", "sync"]:
                return _synchronize(*operands)
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


def _reader(operand: Operand, kind: str, wider: bool = False) -> Callable[[_Threads], Array]:
    """The operand as an array of a type, one element a thread, or one for all.

    With `wider` a register may have more bits than the type, of which the lowest are read.
    """
    if kind not in DTYPES:
        raise UnknownInstruction(f"type .{kind}")
    dtype = DTYPES[kind]
    bits = 1 if kind == "pred" else 8 * dtype.itemsize
    match operand:
        case Register(index, have) if have == bits:
            return (lambda t: t.registers[index]) if bits == 1 else (lambda t: t.registers[index].view(dtype))
        case Register(index, have) if wider and have > bits > 1:
            return lambda t: t.registers[index].astype(f"u{bits // 8}").view(dtype)
        case Immediate(value) if kind == "pred":
            constant = np.array([bool(value)])
            return lambda _: constant
        case Immediate(value):
            # Constants have 64 bits (section "Integer Constants"): above the type's may be copies of its sign.
            if not -(1 << bits - 1) <= (value - (1 << 64) if value >> 63 == 1 else value) < 1 << bits:
                raise UnknownInstruction(f"constant {value} of type .{kind}")
            constant = np.array([value & ((1 << bits) - 1)], f"u{bits // 8}").view(dtype)
            return lambda _: constant
        case Special(name) if kind in ("u32", "b32") and name in _SPECIAL:
            return lambda t: t.special[name].view(dtype)
    raise UnknownInstruction(f"an operand of type .{kind}: {operand}")


_SPECIAL = ("%tid.x", "%laneid", "%ntid.x", *(f"%{what}.{axis}" for what in ("ctaid", "nctaid") for axis in "xyz"))


def _writer(operand: Operand, kind: str, wider: bool = False) -> Callable[[_Threads, Array, Array], None]:
    """Stores an array of a type for the threads of a mask.

    With `wider` a register may have more bits than the type: signed types are extended by their sign.
    """
    if kind not in DTYPES:
        raise UnknownInstruction(f"type .{kind}")
    dtype = DTYPES[kind]
    bits = 1 if kind == "pred" else 8 * dtype.itemsize
    match operand:
        case Sink():
            return lambda _threads, _value, _mask: None
        case Register(index, have) if have == bits:
            own = bool if bits == 1 else f"u{bits // 8}"
            return lambda t, value, mask: np.copyto(t.registers[index], value.view(own), where=mask)
        case Register(index, have) if wider and have > bits > 1:
            wide = np.dtype(f"{dtype.kind}{have // 8}")
            return lambda t, value, mask: np.copyto(
                t.registers[index], value.astype(wide).view(f"u{have // 8}"), where=mask
            )
    raise UnknownInstruction(f"a destination of type .{kind}: {operand}")


def _compute(name: str, operands: Sequence[Operand]) -> Step:
    found = operation(name)
    if len(operands) != 1 + len(found.sources):
        raise UnknownInstruction(f"{len(operands)} operands")
    write = _writer(operands[0], found.result, found.converts)
    reads = [_reader(operand, kind, found.converts) for operand, kind in zip(operands[1:], found.sources, strict=True)]
    compute = found.compute

    def step(threads: _Threads, mask: Array) -> None:
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
        read, writes = _reader(source, kind), [_writer(p, part) for p in vector.parts]

        def unpack(threads: _Threads, mask: Array) -> None:
            parts = np.ascontiguousarray(read(threads)).view(DTYPES[part]).reshape(-1, len(writes)).copy()
            for i, write in enumerate(writes):
                write(threads, parts[:, i], mask)

        return unpack
    reads, write = [_reader(p, part) for p in vector.parts], _writer(to, kind)

    def pack(threads: _Threads, mask: Array) -> None:
        parts = np.stack(np.broadcast_arrays(*(read(threads) for read in reads)), -1)
        write(threads, np.ascontiguousarray(parts).view(dtype)[:, 0], mask)

    return pack


def _load_parameter(kind: str, to: Operand, source: Operand) -> Step:
    """ld.param (9.7.9, ld): every thread reads the same."""
    if not isinstance(source, Address) or not isinstance(source.base, Immediate):
        raise UnknownInstruction("an address that is no parameter")
    index, begin = source.base.value, source.offset
    write, dtype = _writer(to, kind, wider=True), DTYPES[kind]

    def step(threads: _Threads, mask: Array) -> None:
        value = threads.parameters[index][begin : begin + dtype.itemsize]
        if len(value) < dtype.itemsize:
            raise ExecutionError(f"parameter {index} has {len(threads.parameters[index])} bytes")
        write(threads, np.frombuffer(value, dtype), mask)

    return step


def _addresses(space: str, operand: Operand) -> Callable[[_Threads], tuple[Memory, Array]]:
    """The memory and the address of each thread. Shared memory is addressed in 32 bits, in its own group."""
    if not isinstance(operand, Address):
        raise UnknownInstruction("no address")
    base, offset = operand.base, operand.offset
    if space == "global":
        read = _reader(base, "u64")
        return lambda t: (t.memory, np.broadcast_to(read(t) + np.uint64(offset % 2**64), t.count))
    read = _reader(base, "u32")
    return lambda t: (t.shared, t.group_base + (read(t) + np.uint32(offset % 2**32)))


def _elements(operand: Operand, count: int) -> tuple[Operand, ...]:
    parts = operand.parts if isinstance(operand, Vector) else (operand,)
    if len(parts) != count:
        raise UnknownInstruction(f"{len(parts)} elements, not {count}")
    return parts


def _load(space: str, count: int, kind: str, to: Operand, source: Operand) -> Step:
    """9.7.9, ld: a vector's address is aligned to the whole of it."""
    writes = [_writer(part, kind, wider=True) for part in _elements(to, count)]
    find, dtype = _addresses(space, source), DTYPES[kind]

    def step(threads: _Threads, mask: Array) -> None:
        memory, addresses = find(threads)
        loaded = memory.load(addresses, count * dtype.itemsize, mask).view(dtype)
        for i, write in enumerate(writes):
            write(threads, np.ascontiguousarray(loaded[:, i]), mask)

    return step


def _store(space: str, count: int, kind: str, to: Operand, source: Operand) -> Step:
    reads = [_reader(part, kind, wider=True) for part in _elements(source, count)]
    find = _addresses(space, to)

    def step(threads: _Threads, mask: Array) -> None:
        memory, addresses = find(threads)
        values = np.stack([np.broadcast_to(read(threads), threads.count) for read in reads], -1)
        memory.store(addresses, values.view(np.uint8).reshape(threads.count, -1), mask)

    return step


def _atomic_add(kind: str, to: Operand, address: Operand, source: Operand) -> Step:
    """9.7.13, atom and red: integer adds wrap. Their order and scope do not matter where threads take turns."""
    write, find, read = _writer(to, kind), _addresses("global", address), _reader(source, kind)

    def step(threads: _Threads, mask: Array) -> None:
        memory, addresses = find(threads)
        values = np.broadcast_to(read(threads), threads.count).copy()
        write(threads, memory.atomic_add(addresses, values, mask), mask)

    return step


def _members(threads: _Threads, mask: Array, named: Array) -> Array:
    """Bools `[warps, lane, lane]`: the lanes that each thread's member mask names.

    Raises `MissingLanes` unless every thread names itself, and all threads that it names are here with the same mask.
    """
    named = np.broadcast_to(named, threads.count).reshape(-1, LANES)
    here, exited = mask.reshape(-1, LANES), threads.exited.reshape(-1, LANES)
    member = (named[:, :, None] >> np.arange(LANES, dtype=np.uint32) & 1).astype(bool)
    absent = member & ~(here | exited)[:, None, :]
    other = member & here[:, None, :] & (named[:, None, :] != named[:, :, None])
    itself = np.diagonal(member, axis1=1, axis2=2)
    wrong = here & (absent.any(2) | other.any(2) | ~itself)
    if wrong.any():
        warp, lane = np.argwhere(wrong)[0]
        raise MissingLanes(
            f"lane {lane} of warp {warp} names lanes {int(named[warp, lane]):#x}, and here are "
            f"{sum(1 << i for i in range(LANES) if here[warp, i]):#x}"
        )
    return member & here[:, None, :]


def _shuffle(mode: str, to: Operand, source: Operand, b: Operand, c: Operand, named: Operand) -> Step:
    """9.7.9, shfl.sync: `c` holds a clamp in bits 0 to 4 and in bits 8 to 12 the lane bits that name a segment."""
    write, read = _writer(to, "b32"), _reader(source, "b32")
    reads = [_reader(operand, "u32") for operand in (b, c, named)]

    def step(threads: _Threads, mask: Array) -> None:
        distance, control, named_lanes = (read(threads) for read in reads)
        member = _members(threads, mask, named_lanes)
        lane, b_value = threads.lane.astype(np.int64), (distance & 31).astype(np.int64)
        clamp, segment = (control & 31).astype(np.int64), (control >> 8 & 31).astype(np.int64)
        least = lane & segment
        most = least | (clamp & ~segment)
        match mode:
            case "up":
                chosen = lane - b_value
                valid = chosen >= most
            case "down":
                chosen = lane + b_value
                valid = chosen <= most
            case "bfly":
                chosen = lane ^ b_value
                valid = chosen <= most
            case _:
                chosen = least | (b_value & ~segment)
                valid = chosen <= most
        chosen = np.where(valid, chosen, lane)
        warp = np.arange(threads.count) // LANES
        if (mask & ~member[warp, lane, chosen]).any():
            raise MissingLanes("a lane reads from one that does not take part")
        values = np.broadcast_to(read(threads), threads.count)
        write(threads, values[warp * LANES + chosen], mask)

    return step


def _reduce(how: str, kind: str, to: Operand, source: Operand, named: Operand) -> Step:
    """9.7.13, redux.sync: over the lanes that the member mask names."""
    if (how in ("and", "or", "xor")) != (kind == "b32"):
        raise UnknownInstruction(f".{how}.{kind}")
    write, read, read_named = _writer(to, kind), _reader(source, kind), _reader(named, "u32")
    functions: dict[str, np.ufunc] = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    limits = np.iinfo(DTYPES[kind])
    neutral = {"min": limits.max, "max": limits.min, "and": limits.max}.get(how, 0)

    def step(threads: _Threads, mask: Array) -> None:
        member = _members(threads, mask, read_named(threads))
        values = np.broadcast_to(read(threads), threads.count).reshape(-1, 1, LANES)
        taken = np.where(member, values, DTYPES[kind].type(neutral))
        write(threads, functions[how].reduce(taken, axis=2, dtype=DTYPES[kind]).reshape(-1), mask)

    return step


def _synchronize(named: Operand) -> Step:
    """9.7.13, bar.warp.sync: all lanes that the mask names are here, or it raises."""
    read = _reader(named, "u32")
    return lambda threads, mask: (_members(threads, mask, read(threads)), None)[1]


def _is_transposed(modifiers: Sequence[str]) -> bool:
    if tuple(modifiers) not in ((), ("trans",)):
        raise UnknownInstruction(f"modifier .{'.'.join(modifiers)}")
    return bool(modifiers)


ALL_LANES = np.array([0xFFFFFFFF], np.uint32)


def _load_matrices(count: int, transposed: bool, to: Operand, source: Operand) -> Step:
    """9.7.14, ldmatrix: lane 8 i + r has the address of row r of matrix i, 8 elements of 16 bits; lane 4 r + c gets the
    elements 2 c and 2 c + 1 of row r of each."""
    writes = [_writer(part, "b32") for part in _elements(to, count)]
    find = _addresses("shared", source)

    def step(threads: _Threads, mask: Array) -> None:
        _members(threads, mask, ALL_LANES)
        memory, addresses = find(threads)
        rows = memory.load(addresses, 16, mask & (threads.lane < 8 * count)).view(np.uint16)
        matrices = rows.reshape(-1, LANES // 8, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        for i, write in enumerate(writes):
            write(threads, np.ascontiguousarray(matrices[:, i]).view(np.uint32).reshape(-1), mask)

    return step


def _store_matrices(count: int, transposed: bool, to: Operand, source: Operand) -> Step:
    """9.7.14, stmatrix: as ldmatrix, the other way."""
    reads = [_reader(part, "b32") for part in _elements(source, count)]
    find = _addresses("shared", to)

    def step(threads: _Threads, mask: Array) -> None:
        _members(threads, mask, ALL_LANES)
        memory, addresses = find(threads)
        matrices = np.zeros((threads.count // LANES, LANES // 8, 8, 8), np.uint16)
        for i, read in enumerate(reads):
            values = np.broadcast_to(read(threads), threads.count)
            matrices[:, i] = np.ascontiguousarray(values).view(np.uint16).reshape(-1, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices).reshape(threads.count, 8).view(np.uint8)
        memory.store(addresses, rows, mask & (threads.lane < 8 * count))

    return step
