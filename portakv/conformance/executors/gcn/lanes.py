"""Instructions in which a lane reads another's register.

Descriptions: DPP and SDWA in the chapters "Data Parallel Processing" and "Sub-Dword Addressing" of AMD's CDNA3 ISA and
"DPP16" of the RDNA3 ISA; `v_readlane` and the permutes in their VOP1, VOP3 and "LDS" (DS) opcode lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from portakv.conformance.executors.errors import MissingLanes, UnknownInstruction
from portakv.conformance.executors.gcn.assembly import Instruction, Operand
from portakv.conformance.executors.gcn.waves import (
    UNDEFINED,
    Array,
    Reader,
    Step,
    Waves,
    read_scalar,
    read_vector,
    write_scalar,
    write_vector,
)

Maker = Callable[[Instruction], Step]
"""Makes the step of an instruction."""

ROW, BANK = 16, 4
"""Lanes of a row, and of a bank in it."""


def dpp_sources(control: str, value: str, lanes: int) -> Array:
    """The lane that each lane reads; -1 where there is none."""
    lane = np.arange(lanes)
    row, at = lane - lane % ROW, lane % ROW
    number = int(value, 0) if value and value[0] != "[" else 0
    if control == "quad_perm":
        within = np.array([int(x) for x in value.strip("[]").split(",")])
        return np.asarray(lane - lane % 4 + within[lane % 4])
    if control in ("row_shl", "row_shr"):
        source = at + (number if control == "row_shl" else -number)
        return np.where((source >= 0) & (source < ROW), row + source, -1)
    if control in ("wave_shl", "wave_shr"):
        source = lane + (1 if control == "wave_shl" else -1)
        return np.where((source >= 0) & (source < lanes), source, -1)
    if control == "row_bcast":
        # The last lane of each row to the next row, of the first half to the second.
        last = {15: row - 1, 31: np.full(lanes, 31)}[number]
        takes = {15: row > 0, 31: lane >= 32}[number]
        return np.where(takes, last, -1)
    simple = {
        "row_ror": row + (at - number) % ROW,
        "row_mirror": row + ROW - 1 - at,
        "row_half_mirror": row + (at ^ 7),
        "row_share": row + number,
        "row_newbcast": row + number,
        "row_xmask": row + (at ^ number),
    }
    if control not in simple:
        raise UnknownInstruction(f"DPP control {control}:{value}")
    return np.asarray(simple[control])


_IN_ROW = {"quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_share", "row_xmask"}
DPP_CONTROLS = _IN_ROW | {"row_newbcast", "row_bcast", "wave_shl", "wave_shr"}
DPP_MODIFIERS = DPP_CONTROLS | {"row_mask", "bank_mask", "bound_ctrl", "fi"}


class Dpp:
    """Source 0 of an instruction comes from another lane; some lanes are not written.

    A lane without a source, or whose source is inactive, reads 0 under `bound_ctrl:1` and else is not written, like
    those that `row_mask` and `bank_mask` leave out.
    """

    def __init__(self, modifiers: Mapping[str, str], lanes: int) -> None:
        controls = [key for key in modifiers if key in DPP_CONTROLS]
        if len(controls) != 1:
            raise UnknownInstruction(f"DPP modifiers {dict(modifiers)}")
        source = dpp_sources(controls[0], modifiers[controls[0]], lanes)
        lane = np.arange(lanes)
        rows, banks = (int(modifiers.get(key, "0xf"), 0) for key in ("row_mask", "bank_mask"))
        self._chosen = (rows >> lane // ROW & banks >> lane % ROW // BANK & 1).astype(bool)
        self._source, self._inside = np.maximum(source, 0), source >= 0
        self._zero = modifiers.get("bound_ctrl") == "1"
        self._inactive = modifiers.get("fi") == "1"
        # Nothing is left unwritten, whatever exec is.
        self._all = bool(self._chosen.all()) and self._zero

    def valid(self, m: Waves) -> Array:
        active = m.active
        if active is None or self._inactive:
            return self._inside[None]
        return active[:, self._source] & self._inside

    def read(self, raw: Reader) -> Reader:
        def shuffled(m: Waves) -> Array:
            value = raw(m)[:, self._source]
            return np.where(self.valid(m), value, value.dtype.type(0))

        return shuffled

    def writes(self, m: Waves) -> Array | None:
        """The lanes that get a result."""
        if self._all:
            return m.active
        chosen = self._chosen if self._zero else self._chosen & self.valid(m)
        return np.broadcast_to(chosen if m.active is None else chosen & m.active, (m.size, m.lanes))


def select_sdwa(raw: Reader, select: str, operand: Operand) -> Reader:
    """A byte or word of a register, zero-extended, or sign-extended under `sext()`."""
    if select == "DWORD":
        return raw
    _, shift, kind = _sdwa_field(select)
    if operand.extend:
        kind = kind.replace("u", "i")
        return lambda m: (raw(m) >> shift).astype(kind).astype(np.int32).view(np.uint32)
    return lambda m: (raw(m) >> shift).astype(kind).astype(np.uint32)


def merge_sdwa(value: Array, old: Array, select: str, unused: str) -> Array:
    """The result in its byte or word; the other bits are zero, or as they were."""
    if select == "DWORD":
        return value
    size, shift, _ = _sdwa_field(select)
    field = np.uint32((1 << size) - 1) << shift
    placed = value << shift & field
    if unused == "UNUSED_PAD":
        return placed
    if unused == "UNUSED_PRESERVE":
        return placed | old & ~field
    raise UnknownInstruction(f"dst_unused:{unused}")


def _sdwa_field(select: str) -> tuple[int, np.uint32, str]:
    name, _, number = select.partition("_")
    if name not in ("BYTE", "WORD"):
        raise UnknownInstruction(f"SDWA select {select}")
    size = 8 if name == "BYTE" else 16
    return size, np.uint32(size * int(number)), f"<u{size // 8}"


def _first_lane(m: Waves) -> Array:
    """The lowest active lane, 0 if none is."""
    return np.zeros(m.size, np.int64) if m.active is None else m.active.argmax(axis=1)


def _read_first_lane(i: Instruction) -> Step:
    write, (source,) = write_scalar(i.operands[0], "u32"), i.operands[1:]
    read = read_vector(source, "u32")

    def step(m: Waves) -> None:
        values = np.broadcast_to(read(m), (m.size, m.lanes))
        write(m, values[np.arange(m.size), _first_lane(m)])

    return step


def _read_lane(i: Instruction) -> Step:
    """exec does not matter: LLVM reads results of a wave that it left inactive."""
    write, (source, lane) = write_scalar(i.operands[0], "u32"), i.operands[1:]
    read, which = read_vector(source, "u32"), read_scalar(lane, "u32")

    def step(m: Waves) -> None:
        write(m, read(m)[np.arange(m.size), which(m) % np.uint32(m.lanes)])

    return step


def _write_lane(i: Instruction) -> Step:
    target, value, lane = i.operands
    read, which = read_scalar(value, "u32"), read_scalar(lane, "u32")

    def step(m: Waves) -> None:
        chosen = np.arange(m.lanes) == (which(m) % np.uint32(m.lanes))[:, None]
        m.put(
            target.index,
            np.broadcast_to(read(m)[:, None], (m.size, m.lanes)),
            np.broadcast_to(chosen, (m.size, m.lanes)),
        )

    return step


def _count_below(base: int) -> Maker:
    """`v_mbcnt`: the bits of a mask that belong to lower lanes, counted in one half of the wave's 64."""

    def build(i: Instruction) -> Step:
        target, mask, start = i.operands
        read, add, write = read_vector(mask, "u32"), read_vector(start, "u32"), write_vector(target, "u32", True)
        below = np.array([(1 << min(max(lane - base, 0), 32)) - 1 for lane in range(64)], np.uint32)

        def step(m: Waves) -> None:
            count = np.bitwise_count(read(m) & below[: m.lanes]).astype(np.uint32)
            write(m, count + add(m), m.active)

        return step

    return build


def _permute_rows(i: Instruction) -> Step:
    """`v_permlane16_b32` reads in the lane's own row of 16, `v_permlanex16_b32` in the other one of its pair.

    `op_sel:[1,…]` also fetches from inactive lanes; without it such a lane's value is none of the description's.
    """
    target, source, low, high = i.operands
    read, write = read_vector(source, "u32"), write_vector(target, "u32", True)
    nibbles = read_scalar(low, "u32"), read_scalar(high, "u32")
    inactive = i.modifiers.get("op_sel", "[0,0]")[1] == "1"
    other = ROW if i.name == "v_permlanex16_b32" else 0

    def step(m: Waves) -> None:
        lane = np.arange(m.lanes)
        low, high = (np.broadcast_to(read(m), m.size).astype(np.uint64) for read in nibbles)
        within = (low | high << np.uint64(32))[:, None] >> (lane % ROW * 4).astype(np.uint64) & np.uint64(15)
        chosen = (lane - lane % ROW ^ other) + within.astype(np.int64)
        if m.active is not None and not inactive:
            missing = m.active & ~np.take_along_axis(m.active, chosen, axis=1)
            if missing.any():
                raise MissingLanes(f"{i.text}: {int(missing.sum())} lanes read from inactive ones")
        write(m, np.take_along_axis(read(m), chosen, axis=1), m.active)

    return step


def _swap_rows(rows: int) -> Maker:
    """`v_permlane16_swap_b32` and `v_permlane32_swap_b32`: odd rows (of `rows` lanes) of the first register and even
    rows of the second change places."""

    def build(i: Instruction) -> Step:
        first, second = i.operands
        if first.kind != "v" or second.kind != "v":
            raise UnknownInstruction(i.text)

        def step(m: Waves) -> None:
            if m.active is not None:
                raise MissingLanes(f"{i.text}: some lanes are inactive")
            a, b = m.v[first.index][m.at].copy(), m.v[second.index][m.at].copy()
            pairs = (m.size, m.lanes // (2 * rows), 2, rows)
            odd, even = a.reshape(pairs)[:, :, 1].copy(), b.reshape(pairs)[:, :, 0].copy()
            a.reshape(pairs)[:, :, 1], b.reshape(pairs)[:, :, 0] = even, odd
            m.put(first.index, a, None)
            m.put(second.index, b, None)

        return step

    return build


def _push(i: Instruction) -> Step:
    """`ds_permute_b32`: each active lane gives its value to lane (address / 4); a lane that gets none reads 0.

    Which of several values a lane gets is not said. LLVM sends all that it does not need to one lane, so that is no
    error: the lane becomes undefined.
    """
    target, address, data = i.operands
    where, value, write = read_vector(address, "u32"), read_vector(data, "u32"), write_vector(target, "u32", True)
    offset = np.uint32(int(i.modifiers.get("offset", "0"), 0))

    def step(m: Waves) -> None:
        shape = (m.size, m.lanes)
        to = np.broadcast_to((where(m) + offset) // np.uint32(4) % np.uint32(m.lanes), shape)
        wave = np.broadcast_to(np.arange(m.size)[:, None], shape)
        given, active = np.broadcast_to(value(m), shape), m.every()
        wave, to, given = wave[active], to[active], given[active]
        out = np.zeros(shape, np.uint32)
        out[wave, to] = given
        lost = out[wave, to] != given
        out[wave[lost], to[lost]] = UNDEFINED
        write(m, out, m.active)

    return step


def _pull(i: Instruction) -> Step:
    """`ds_bpermute_b32`: each lane takes the value of lane (address / 4), 0 if that is inactive."""
    target, address, data = i.operands
    where, value, write = read_vector(address, "u32"), read_vector(data, "u32"), write_vector(target, "u32", True)
    offset = np.uint32(int(i.modifiers.get("offset", "0"), 0))

    def step(m: Waves) -> None:
        shape = (m.size, m.lanes)
        lane = np.broadcast_to((where(m) + offset) // np.uint32(4) % np.uint32(m.lanes), shape).astype(np.int64)
        given = np.broadcast_to(value(m), shape)
        if m.active is not None:
            given = np.where(m.active, given, np.uint32(0))
        write(m, np.take_along_axis(given, lane, axis=1), m.active)

    return step


def swizzle_sources(text: str) -> Array:
    """The lane that each lane of a group of 32 reads, from LLVM's `swizzle(MODE,…)`."""
    found = re.fullmatch(r"swizzle\((\w+),(.+)\)", text)
    if found is None:
        raise UnknownInstruction(f"offset:{text}")
    mode, values = found[1], found[2].replace('"', "").split(",")
    lane = np.arange(32)
    if mode == "BITMASK_PERM":  # of each bit, the highest first: 0, 1, p(reserved) or i(nverted)
        bits = [(lane >> 4 - n & 1, letter) for n, letter in enumerate(values[0])]
        choices = [
            {"0": 0 * bit, "1": 0 * bit + 1, "p": bit, "i": 1 - bit}[letter] << 4 - n
            for n, (bit, letter) in enumerate(bits)
        ]
        return np.asarray(sum(choices))
    numbers = [int(x, 0) for x in values]
    if mode == "QUAD_PERM":
        return np.asarray(lane - lane % 4 + np.array(numbers)[lane % 4])
    if mode == "BROADCAST":
        return np.asarray(lane - lane % numbers[0] + numbers[1])
    return np.asarray(lane ^ {"SWAP": numbers[0], "REVERSE": numbers[0] - 1}[mode])


def _swizzle(i: Instruction) -> Step:
    """`ds_swizzle_b32`: lanes change places within groups of 32 in a pattern; an inactive lane gives 0."""
    target, data = i.operands
    within = swizzle_sources(i.modifiers.get("offset", ""))
    value, write = read_vector(data, "u32"), write_vector(target, "u32", True)

    def step(m: Waves) -> None:
        lane = np.arange(m.lanes)
        given = value(m) if m.active is None else np.where(m.active, value(m), np.uint32(0))
        write(m, given[:, lane - lane % 32 + within[lane % 32]], m.active)

    return step


LANES: dict[str, Maker] = {
    "v_readfirstlane_b32": _read_first_lane,
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_mbcnt_lo_u32_b32": _count_below(0),
    "v_mbcnt_hi_u32_b32": _count_below(32),
    "v_permlane16_b32": _permute_rows,
    "v_permlanex16_b32": _permute_rows,
    "v_permlane16_swap_b32": _swap_rows(16),
    "v_permlane32_swap_b32": _swap_rows(32),
    "ds_permute_b32": _push,
    "ds_bpermute_b32": _pull,
    "ds_swizzle_b32": _swizzle,
}

MODIFIERS: dict[str, set[str]] = {
    "v_permlane16_b32": {"op_sel"},
    "v_permlanex16_b32": {"op_sel"},
    "ds_permute_b32": {"offset"},
    "ds_bpermute_b32": {"offset"},
    "ds_swizzle_b32": {"offset"},
}
