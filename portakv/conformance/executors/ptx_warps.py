"""What the lanes of a warp do together in PTX: shuffles, reductions, and matrices in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from portakv.conformance.executors.errors import MissingLanes, UnknownInstruction
from portakv.conformance.executors.ptx_arithmetic import DTYPES
from portakv.conformance.executors.ptx_text import Operand
from portakv.conformance.executors.ptx_threads import (
    LANES,
    Step,
    Threads,
    addresses_of,
    elements_of,
    read_as,
    write_as,
)

Array = np.ndarray[Any, Any]


def _members(threads: Threads, mask: Array, named: Array) -> Array:
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


def shuffle(mode: str, to: Operand, source: Operand, b: Operand, c: Operand, named: Operand) -> Step:
    """9.7.9, shfl.sync: `c` holds a clamp in bits 0 to 4 and in bits 8 to 12 the lane bits that name a segment."""
    write, read = write_as(to, "b32"), read_as(source, "b32")
    reads = [read_as(operand, "u32") for operand in (b, c, named)]

    def step(threads: Threads, mask: Array) -> None:
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


def reduce(how: str, kind: str, to: Operand, source: Operand, named: Operand) -> Step:
    """9.7.13, redux.sync: over the lanes that the member mask names."""
    if (how in ("and", "or", "xor")) != (kind == "b32"):
        raise UnknownInstruction(f".{how}.{kind}")
    write, read, read_named = write_as(to, kind), read_as(source, kind), read_as(named, "u32")
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

    def step(threads: Threads, mask: Array) -> None:
        member = _members(threads, mask, read_named(threads))
        values = np.broadcast_to(read(threads), threads.count).reshape(-1, 1, LANES)
        taken = np.where(member, values, DTYPES[kind].type(neutral))
        write(threads, functions[how].reduce(taken, axis=2, dtype=DTYPES[kind]).reshape(-1), mask)

    return step


def synchronize(named: Operand) -> Step:
    """9.7.13, bar.warp.sync: all lanes that the mask names are here, or it raises."""
    read = read_as(named, "u32")
    return lambda threads, mask: (_members(threads, mask, read(threads)), None)[1]


def is_transposed(modifiers: Sequence[str]) -> bool:
    if tuple(modifiers) not in ((), ("trans",)):
        raise UnknownInstruction(f"modifier .{'.'.join(modifiers)}")
    return bool(modifiers)


ALL_LANES = np.array([0xFFFFFFFF], np.uint32)


def load_matrices(count: int, transposed: bool, to: Operand, source: Operand) -> Step:
    """9.7.14, ldmatrix: lane 8 i + r has the address of row r of matrix i, 8 elements of 16 bits; lane 4 r + c gets the
    elements 2 c and 2 c + 1 of row r of each."""
    writes = [write_as(part, "b32") for part in elements_of(to, count)]
    find = addresses_of("shared", source)

    def step(threads: Threads, mask: Array) -> None:
        _members(threads, mask, ALL_LANES)
        memory, addresses = find(threads)
        rows = memory.load(addresses, 16, mask & (threads.lane < 8 * count)).view(np.uint16)
        matrices = rows.reshape(-1, LANES // 8, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        for i, write in enumerate(writes):
            write(threads, np.ascontiguousarray(matrices[:, i]).view(np.uint32).reshape(-1), mask)

    return step


def store_matrices(count: int, transposed: bool, to: Operand, source: Operand) -> Step:
    """9.7.14, stmatrix: as ldmatrix, the other way."""
    reads = [read_as(part, "b32") for part in elements_of(source, count)]
    find = addresses_of("shared", to)

    def step(threads: Threads, mask: Array) -> None:
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
