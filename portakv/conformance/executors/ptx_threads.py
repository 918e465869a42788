"""The threads of a grid of PTX: their registers, where each one is, and how an operand is read and written."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portakv.conformance.executors.errors import ExecutionError, MissingLanes, UnknownInstruction
from portakv.conformance.executors.memory import Memory
from portakv.conformance.executors.ptx_arithmetic import DTYPES
from portakv.conformance.executors.ptx_text import Address, Immediate, Listing, Operand, Register, Sink, Special, Vector

Array = np.ndarray[Any, Any]

LANES = 32

Step = Callable[["Threads", Array], None]
"""Executes one instruction for the threads that a mask names."""


class Threads:
    """The state of all threads of a grid; thread t of group g is number g * num_threads + t."""

    def __init__(
        self,
        listing: Listing,
        args: Sequence[int],
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        memory: Memory,
    ) -> None:
        if num_threads % LANES:
            raise ExecutionError(f"{num_threads} threads are no whole number of warps")
        if len(args) != len(listing.parameters):
            raise ExecutionError(f"{len(args)} arguments for {len(listing.parameters)} parameters")
        groups = grid[0] * grid[1] * grid[2]
        self.count, self.group_size = groups * num_threads, num_threads
        self.memory = memory
        self.shared = Memory.of_groups(groups, max(shared_bytes, listing.shared_bytes))
        self.parameters = [
            int(a).to_bytes(n, "little", signed=a < 0) for a, n in zip(args, listing.parameters, strict=True)
        ]
        # Nothing is promised about a register that was not written: a pattern that no kernel counts on.
        self.registers = [
            np.full(
                self.count, bits == 1 or 0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1), bool if bits == 1 else f"u{bits // 8}"
            )
            for bits in listing.registers
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
        self._end = len(listing.instructions)

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


def read_as(operand: Operand, kind: str, wider: bool = False) -> Callable[[Threads], Array]:
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


def write_as(operand: Operand, kind: str, wider: bool = False) -> Callable[[Threads, Array, Array], None]:
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


def addresses_of(space: str, operand: Operand) -> Callable[[Threads], tuple[Memory, Array]]:
    """The memory and the address of each thread. Shared memory is addressed in 32 bits, in its own group."""
    if not isinstance(operand, Address):
        raise UnknownInstruction("no address")
    base, offset = operand.base, operand.offset
    if space == "global":
        read = read_as(base, "u64")
        return lambda t: (t.memory, np.broadcast_to(read(t) + np.uint64(offset % 2**64), t.count))
    read = read_as(base, "u32")
    return lambda t: (t.shared, t.group_base + (read(t) + np.uint32(offset % 2**32)))


def elements_of(operand: Operand, count: int) -> tuple[Operand, ...]:
    parts = operand.parts if isinstance(operand, Vector) else (operand,)
    if len(parts) != count:
        raise UnknownInstruction(f"{len(parts)} elements, not {count}")
    return parts
