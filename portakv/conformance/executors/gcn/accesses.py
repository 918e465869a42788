"""Loads, stores and atomics.

Descriptions: the chapters "Scalar Memory", "Vector Memory" (MUBUF), "Flat Memory" (FLAT, GLOBAL) and "Data Share" (DS)
of AMD's CDNA3, RDNA3 and RDNA4 ISA; CDNA's names in bytes and words are RDNA's in bits.
"""

from __future__ import annotations

import re

import numpy as np

from portakv.conformance.executors.errors import UnknownInstruction
from portakv.conformance.executors.gcn.assembly import Instruction, Operand
from portakv.conformance.executors.gcn.waves import (
    HALF,
    LOW,
    Array,
    Reader,
    Step,
    Waves,
    read_scalar,
    read_vector,
)
from portakv.conformance.executors.memory import Memory

CACHE_POLICY = {"glc", "slc", "dlc", "nt", "sc0", "sc1", "scope", "th"}
"""Which caches an access passes: all of them are one memory here."""

ARGUMENTS = 0x7E57 << 48
"""Where the kernel's arguments lie: at no address of a tensor."""

_UNITS = {f"dwordx{n}": (4 * n, "u", "") for n in (2, 3, 4, 8, 16)}
_UNITS |= {"dword": (4, "u", ""), "byte": (1, "u", ""), "ubyte": (1, "u", ""), "sbyte": (1, "i", "")}
_UNITS |= {"short": (2, "u", ""), "ushort": (2, "u", ""), "sshort": (2, "i", "")}
_UNITS |= {"short_d16": (2, "u", "l"), "ubyte_d16": (1, "u", "l")}
_UNITS |= {"short_d16_hi": (2, "u", "h"), "byte_d16_hi": (1, "u", "h"), "ubyte_d16_hi": (1, "u", "h")}
_UNITS |= {f"b{n}": (n // 8, "u", "") for n in (8, 16, 32, 64, 96, 128, 256, 512)}
_UNITS |= {f"{kind}{8 * n}": (n, kind, "") for kind in "ui" for n in (1, 2)}
_UNITS |= {"d16_b16": (2, "u", "l"), "d16_u8": (1, "u", "l")}
_UNITS |= {"d16_hi_b16": (2, "u", "h"), "d16_hi_u8": (1, "u", "h"), "d16_hi_b8": (1, "u", "h")}
"""What follows `load_` or `store_`: bytes, kind, and the half of the register that alone is meant."""


def _unit(i: Instruction, name: str) -> tuple[int, str, str]:
    if name not in _UNITS:
        raise UnknownInstruction(i.text)
    return _UNITS[name]


def access(i: Instruction) -> Step | None:
    """The step of an instruction that touches memory; None if it is none."""
    if found := re.fullmatch(r"s_load_(\w+)", i.name):
        return _load_scalar(i, _unit(i, found[1])[0])
    # "ds_read2_b32" and "ds_read2st64_b32" of CDNA, "ds_load_2addr_b32" and "ds_load_2addr_stride64_b32" of RDNA
    if found := re.fullmatch(r"ds_(read2|load_2addr|write2|store_2addr)(st64|_stride64)?_b(32|64)", i.name):
        return _access_two(i, found[1][0] in "rl", bool(found[2]), int(found[3]) // 8)
    if found := re.fullmatch(r"(global|flat|buffer|ds)_(load|read|store|write)_(\w+)", i.name):
        space, verb, name = found.groups()
        size, kind, half = _unit(i, name)
        if verb in ("load", "read"):
            return _load(i, space, size, kind, half)
        return _store(i, space, size, half)
    if found := re.fullmatch(r"global_atomic_add_(u32|u64|x2)", i.name):
        return _atomic_add(i, 4 if found[1] == "u32" else 8)
    if i.name == "global_atomic_add":
        return _atomic_add(i, 4)
    return None


def _offset(i: Instruction) -> int:
    return int(i.modifiers.get("offset", "0"), 0)


def _expect(i: Instruction, *allowed: str) -> None:
    unknown = set(i.modifiers) - set(allowed) - CACHE_POLICY
    if unknown:
        raise UnknownInstruction(f"modifier {sorted(unknown)} of {i.text!r}")


def _load_scalar(i: Instruction, size: int) -> Step:
    """A multiple of 4 bytes for a whole wave, also from the kernel's arguments."""
    target, base, *offsets = i.operands
    _expect(i, "offset")
    address = read_scalar(base, "u64")
    more = [read_scalar(x, "u32") if x.kind != "int" else _constant(int(x.value)) for x in offsets]
    extra = np.uint64(_offset(i) % 2**64)
    if target.kind != "s" or target.count != size // 4:
        raise UnknownInstruction(i.text)

    def step(m: Waves) -> None:
        at = address(m) + extra
        for offset in more:
            at = at + offset(m)
        arguments = at >= np.uint64(ARGUMENTS)
        loaded = np.zeros((m.size, size), np.uint8)
        for memory, mask in ((m.arguments, arguments), (m.memory, ~arguments)):
            if mask.any():
                loaded |= memory.load(np.broadcast_to(at, m.size), size, np.broadcast_to(mask, m.size), align=4)
        m.s[m.at, target.index : target.index + size // 4] = loaded.view("<u4")

    return step


def _constant(value: int) -> Reader:
    array = np.array([value % 2**64], np.uint64)
    return lambda m: array


class _Address:
    """Addresses of an access, and the lanes that make one."""

    def __init__(self, i: Instruction, space: str, operands: tuple[Operand, ...]) -> None:
        # LLVM reads local memory and arguments at any alignment: the runtime turns `unaligned-access-mode` on.
        self.align = 1 if space == "ds" else 4
        self._offset = np.uint64(_offset(i) % 2**64)
        self._space = space
        if space == "buffer":
            self._bind_buffer(i, operands)
            return
        if space == "ds":
            _expect(i, "offset")
            (register,) = operands
            self._vector, self._base = read_vector(register, "u32"), None
            return
        _expect(i, "offset")
        register, *rest = operands
        scalar = rest and rest[0].kind == "s"
        self._vector = read_vector(register, "u32" if scalar else "u64")
        self._base = read_scalar(rest[0], "u64") if scalar else None

    def _bind_buffer(self, i: Instruction, operands: tuple[Operand, ...]) -> None:
        _expect(i, "offset", "offen")
        register, self._resource, zero = operands
        if "offen" not in i.modifiers or self._resource.count != 4:
            raise UnknownInstruction(i.text)
        if zero.kind != "null" and (zero.kind, zero.value) != ("int", 0):
            raise UnknownInstruction(f"scalar offset of {i.text!r}")
        self._vector = read_vector(register, "u32")

    def memory(self, m: Waves) -> Memory:
        return m.local if self._space == "ds" else m.memory

    def load(self, m: Waves, at: Array, size: int, mask: Array | None, align: int) -> Array:
        """Also from the kernel's arguments, of which vector loads read some that are hidden."""
        arguments = at >= np.uint64(ARGUMENTS)
        if self._space in ("ds", "buffer") or not arguments.any():
            return self.memory(m).load(at, size, mask, align)
        mask = np.ones(len(at), bool) if mask is None else mask
        hidden = m.arguments.load(at, size, mask & arguments, align=1)
        return hidden | self.memory(m).load(at, size, mask & ~arguments, align)

    def find(self, m: Waves, size: int) -> tuple[Array, Array | None]:
        """`[waves · lanes]` addresses, and the mask."""
        where = self._vector(m).astype(np.uint64)
        active = m.active
        if self._space == "buffer":
            return self._find_in_buffer(m, where, size)
        if self._space == "ds":
            where = where + self._offset + (m.group[m.at] << np.uint64(32))[:, None]
        elif self._base is not None:
            where = where + self._base(m)[:, None] + self._offset
        else:
            where = where + self._offset
        return _flat(m, where), None if active is None else active.ravel()

    def _find_in_buffer(self, m: Waves, where: Array, size: int) -> tuple[Array, Array]:
        """A raw buffer: what does not lie within its bytes is not accessed."""
        words = m.s[m.at, self._resource.index : self._resource.index + 4].astype(np.uint64)
        if (words[:, 1] >> np.uint64(16)).any():
            raise UnknownInstruction("buffer with a stride or a swizzle")
        base = words[:, 0] | words[:, 1] << np.uint64(32)
        offset = where + self._offset
        inside = offset + np.uint64(size) <= words[:, 2, None]
        if m.active is not None:
            inside = inside & m.active
        return _flat(m, base[:, None] + offset), _flat(m, inside)


def _flat(m: Waves, x: Array) -> Array:
    return np.broadcast_to(x, (m.size, m.lanes)).ravel()


def _load(i: Instruction, space: str, size: int, kind: str, half: str) -> Step:
    target, *operands = i.operands
    address = _Address(i, space, tuple(operands))
    align = min(size, address.align)
    count = max(1, size // 4)
    if target.kind != "v" or target.count != count:
        raise UnknownInstruction(i.text)
    if target.half:
        half = target.half

    def step(m: Waves) -> None:
        at, mask = address.find(m, size)
        loaded = address.load(m, at, size, mask, align).reshape(m.size, m.lanes, size)
        if size >= 4:
            words = loaded.view("<u4")
            for n in range(count):
                m.put(target.index + n, words[:, :, n], m.active)
            return
        value = loaded.view(f"<{kind}{size}")[:, :, 0].astype(np.int32).view(np.uint32)
        if half:
            old = m.v[target.index][m.at]
            value = old & ~LOW | value & LOW if half == "l" else old & LOW | value << HALF
        m.put(target.index, value, m.active)

    return step


def _store(i: Instruction, space: str, size: int, half: str) -> Step:
    if space == "buffer":
        data, *operands = i.operands
    elif space == "ds":
        register, data = i.operands
        operands = [register]
    else:
        register, data, *rest = i.operands
        operands = [register, *rest]
    address = _Address(i, space, tuple(operands))
    align = min(size, address.align)
    count = max(1, size // 4)
    if data.kind != "v" or data.count != count:
        raise UnknownInstruction(i.text)
    shift = HALF if (data.half or half) == "h" else np.uint32(0)

    def step(m: Waves) -> None:
        at, mask = address.find(m, size)
        words = np.stack([m.v[data.index + n][m.at].ravel() for n in range(count)], axis=1)
        if size < 4:
            words = (words >> shift).astype(f"<u{size}")
        address.memory(m).store(at, words.view(np.uint8), mask, align)

    return step


def _access_two(i: Instruction, loads: bool, far: bool, size: int) -> Step:
    """Two values at offset0 and offset1, in units of their size, or of 64 of those if `far`."""
    unit = size * (64 if far else 1)
    _expect(i, "offset0", "offset1")
    offsets = [np.uint64(int(i.modifiers.get(f"offset{n}", "0"), 0) * unit) for n in (0, 1)]
    words = size // 4
    register = i.operands[1] if loads else i.operands[0]
    first = [i.operands[0].index, i.operands[0].index + words] if loads else [x.index for x in i.operands[1:]]
    where = read_vector(register, "u32")

    def step(m: Waves) -> None:
        base = where(m).astype(np.uint64) + (m.group[m.at] << np.uint64(32))[:, None]
        mask = None if m.active is None else m.active.ravel()
        for offset, index in zip(offsets, first, strict=True):
            at = _flat(m, base + offset)
            if loads:
                loaded = m.local.load(at, size, mask, align=1).reshape(m.size, m.lanes, size).view("<u4")
                for n in range(words):
                    m.put(index + n, loaded[:, :, n], m.active)
            else:
                values = np.stack([m.v[index + n][m.at].ravel() for n in range(words)], axis=1)
                m.local.store(at, values.view(np.uint8), mask, align=1)

    return step


def _atomic_add(i: Instruction, size: int) -> Step:
    """Without its result, which no kernel here asks for."""
    register, data, *rest = i.operands
    if register.kind != "v" or data.kind != "v" or {"glc", "sc0", "th"} & set(i.modifiers):
        raise UnknownInstruction(f"{i.text}: an atomic that returns")
    address = _Address(i, "global", (register, *rest))
    value = read_vector(data, f"u{8 * size}")

    def step(m: Waves) -> None:
        at, mask = address.find(m, size)
        if mask is None or mask.any():
            m.memory.atomic_add(at, _flat(m, value(m)), mask)

    return step
