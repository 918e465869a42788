"""A kernel as a whole: how its waves begin, and the order in which they run.

What a wave finds in its registers when it begins: LLVM's "User Guide for AMDGPU Backend", section "Initial Kernel
Execution State"; branches and barriers: the chapter "Program Flow Control" of AMD's ISA descriptions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portakv.conformance.executors.errors import ExecutionError, MissingLanes, UnknownInstruction
from portakv.conformance.executors.gcn.accesses import ARGUMENTS
from portakv.conformance.executors.gcn.assembly import EXEC, TTMP, VCC, Listing, read_listing
from portakv.conformance.executors.gcn.steps import compile_step
from portakv.conformance.executors.gcn.waves import Array, Waves
from portakv.conformance.executors.memory import Memory

BRANCHES: dict[str, Callable[[Waves], Array]] = {
    "s_branch": lambda m: np.ones(m.size, bool),
    "s_cbranch_scc0": lambda m: ~m.scc[m.at],
    "s_cbranch_scc1": lambda m: m.scc[m.at],
    "s_cbranch_vccz": lambda m: m.mask(VCC) == 0,
    "s_cbranch_vccnz": lambda m: m.mask(VCC) != 0,
    "s_cbranch_execz": lambda m: m.mask(EXEC) == 0,
    "s_cbranch_execnz": lambda m: m.mask(EXEC) != 0,
}
END, BARRIERS = "s_endpgm", ("s_barrier", "s_barrier_wait")


class Program:
    """A kernel whose instructions are understood. `parameters` are its sizes in bytes, without hidden ones.

    `steps` has None for what only times or decides; `ends` says of each instruction where its block ends: at the
    instruction that decides, or before the next that is jumped to.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.explicit = [(at, size) for at, size, kind in listing.arguments if not kind.startswith("hidden")]
        self.parameters = tuple(size for _, size in self.explicit)
        flow = {*BRANCHES, END, *BARRIERS}
        self.steps = [None if i.name in flow else compile_step(i, listing) for i in listing.code]
        for i in listing.code:
            if i.name in BRANCHES and (not i.operands or i.operands[0].label not in listing.labels):
                raise UnknownInstruction(f"{i.text}: no such label")
        leaders = {*listing.labels.values(), listing.entry, len(listing.code)}
        self.ends = [0] * len(listing.code)
        end = len(listing.code)
        for at in reversed(range(len(listing.code))):
            if listing.code[at].name in flow:
                end = at
            elif at + 1 in leaders:
                end = at + 1
            self.ends[at] = end
        operands = [x for i in listing.code for half in (i, i.second) if half for x in half.operands]
        self.registers = 1 + max((x.index + x.count - 1 for x in operands if x.kind == "v"), default=0)


def parse(text: str) -> Program:
    """The one kernel of an assembly file. Raises `UnknownInstruction` for the first that is not known."""
    return Program(read_listing(text))


def pack_arguments(
    program: Program, args: Sequence[float] | bytes, grid: tuple[int, int, int], num_threads: int
) -> Array:
    """The argument segment: values where the metadata puts them, of hidden ones the grid's; bytes as they are."""
    listing = program.listing
    size = max([at + size for at, size, _ in listing.arguments] + [listing.setting("kernarg_size"), 4])
    packed = np.zeros(-(-size // 4) * 4, np.uint8)
    if isinstance(args, bytes):
        packed[: len(args)] = np.frombuffer(args, np.uint8)
        return packed
    if len(args) != len(program.explicit):
        raise ValueError(f"args: expected {len(program.explicit)} values, got {len(args)}")
    for value, (at, width) in zip(args, program.explicit, strict=True):
        if isinstance(value, float):
            raw = np.array([value], f"<f{width}").tobytes()
        else:
            raw = int(value % 2 ** (8 * width)).to_bytes(width, "little")
        packed[at : at + width] = np.frombuffer(raw, np.uint8)
    hidden = {f"hidden_block_count_{axis}": count for axis, count in zip("xyz", grid, strict=True)}
    hidden |= {"hidden_group_size_x": num_threads, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
    for at, width, kind in listing.arguments:  # others, as remainders and offsets, are 0
        if kind in hidden:
            packed[at : at + width] = np.frombuffer(hidden[kind].to_bytes(width, "little"), np.uint8)
    return packed


def begin(
    program: Program,
    args: Sequence[float] | bytes,
    grid: tuple[int, int, int],
    num_threads: int,
    shared_bytes: int,
    memory: Memory,
) -> Waves:
    """Waves at the kernel's first instruction (see `run`)."""
    listing = program.listing
    lanes = listing.lanes
    per_group = -(-num_threads // lanes)
    x, y, z = grid
    groups = x * y * z
    arguments = Memory([(ARGUMENTS, pack_arguments(program, args, grid, num_threads))])
    local = Memory.of_groups(groups, max(shared_bytes, listing.setting("group_segment_fixed_size")))
    m = Waves(listing, groups * per_group, program.registers, memory, local, arguments)
    m.group = np.repeat(np.arange(groups, dtype=np.uint64), per_group)
    wave = np.tile(np.arange(per_group, dtype=np.uint32), groups)
    thread = wave[:, None] * np.uint32(lanes) + np.arange(lanes, dtype=np.uint32)
    m.v[0] = thread  # the x of a work-item; where y and z are packed above it, they are 0
    m.set_mask(EXEC, m.bits_of(thread < num_threads))
    at = _begin_scalars(m, listing)
    index = m.group.astype(np.uint32)
    ids = (index % np.uint32(x), index // np.uint32(x) % np.uint32(y), index // np.uint32(x * y))
    if listing.generation >= 12:
        m.s[:, TTMP + 9] = ids[0]
        m.s[:, TTMP + 7] = ids[1] | ids[2] << np.uint32(16)
        m.s[:, TTMP + 8] = wave << np.uint32(25)
        return m
    for axis, number in zip("xyz", ids, strict=True):
        if listing.setting(f"system_sgpr_workgroup_id_{axis}"):
            m.s[:, at] = number
            at += 1
    return m


USER = ("private_segment_buffer", 4), ("dispatch_ptr", 2), ("queue_ptr", 2), ("kernarg_segment_ptr", 2)
"""What user registers begin with, in this order where it is enabled, and how many registers it takes."""


def _begin_scalars(m: Waves, listing: Listing) -> int:
    """User registers; the number of them."""
    at = 0
    for name, count in USER:
        if not listing.setting(f"user_sgpr_{name}"):
            continue
        if name == "kernarg_segment_ptr":
            m.wide[:, at >> 1] = ARGUMENTS
        at += count  # a kernel that uses another of them meets an address outside all tensors
    return listing.setting("user_sgpr_count", at)


def _check_preload(m: Waves, at: Any) -> None:
    """That the plain prologue loaded what firmware with preloading puts there: so both ways in are executed."""
    listing = m.listing
    count = listing.setting("user_sgpr_kernarg_preload_length")
    first = listing.setting("user_sgpr_count") - count
    offset = 4 * listing.setting("user_sgpr_kernarg_preload_offset")
    where = np.full(1, ARGUMENTS + offset, np.uint64)
    preloaded = m.arguments.load(where, 4 * count, align=4).view("<u4")
    if (m.s[at, first : first + count] != preloaded).any():
        raise ExecutionError("the prologue does not load the arguments that firmware preloads")


def run(
    program: Program,
    args: Sequence[float] | bytes,
    grid: tuple[int, int, int],
    num_threads: int,
    shared_bytes: int,
    memory: Memory,
    schedule: random.Random | None = None,
) -> None:
    """Run a grid of work-groups of `num_threads` to its end.

    Args are addresses and numbers in the order of the kernel's metadata, or its argument segment. All waves at the
    lowest program counter go on together; with a `schedule`, a random part of those at a random one.
    """
    finish(program, begin(program, args, grid, num_threads, shared_bytes, memory), schedule)


def finish(program: Program, m: Waves, schedule: random.Random | None = None) -> None:
    """Run all waves from the first instruction to the end."""
    pc = np.zeros(m.count, np.int64)
    waiting = np.zeros(m.count, bool)
    ended = len(program.steps)
    with np.errstate(all="ignore"):
        while True:
            ready = pc[~waiting]
            ready = ready[ready < ended]
            if not len(ready):
                if not waiting.any():
                    return
                _release(m, pc, waiting, ended)
                continue
            first = int(ready.min()) if schedule is None else int(schedule.choice(ready.tolist()))
            at = _choose((pc == first) & ~waiting, schedule)
            m.focus(at)
            if first == program.listing.entry and first:
                _check_preload(m, at)
            _run_block(program, m, pc, waiting, first, at)


def _choose(there: Array, schedule: random.Random | None) -> Any:
    """Those waves, as a slice if they are all."""
    if schedule is not None:
        numbers = np.flatnonzero(there)
        there = np.isin(np.arange(len(there)), schedule.sample(numbers.tolist(), schedule.randint(1, len(numbers))))
    return slice(None) if there.all() else np.flatnonzero(there)


def _run_block(program: Program, m: Waves, pc: Array, waiting: Array, first: int, at: Any) -> None:
    end = program.ends[first]
    for n in range(first, end):
        step = program.steps[n]
        if step is None:
            continue
        try:
            step(m)
        except ExecutionError as e:
            e.add_note(f"instruction {n}: {program.listing.code[n].text}")
            raise
    if end == len(program.steps):
        raise ExecutionError("a wave passed the kernel's last instruction")
    i = program.listing.code[end]
    if i.name in BRANCHES:
        pc[at] = np.where(BRANCHES[i.name](m), program.listing.labels[i.operands[0].label], end + 1)
    elif i.name == END:
        pc[at] = len(program.steps)
    elif i.name in BARRIERS:
        waiting[at] = True
        pc[at] = end + 1
    else:
        pc[at] = end


def _release(m: Waves, pc: Array, waiting: Array, ended: int) -> None:
    """All waves that have not ended wait at a barrier: let each work-group go on that is there as a whole."""
    short = np.unique(m.group[waiting & np.isin(m.group, m.group[pc >= ended])])
    if len(short):
        raise MissingLanes(f"a barrier that some waves of work-group {int(short[0])} have not reached")
    waiting[:] = False
