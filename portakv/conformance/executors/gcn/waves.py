"""All waves of a grid: their registers as numpy arrays, and how an instruction reads and writes them.

An instruction becomes a function of `Waves` that acts on the waves which `focus` names. A value of a vector
instruction is `[waves, lanes]`, one that is the same in all lanes `[waves, 1]` and a constant `[1, 1]`; of a scalar
instruction it is `[waves]` or `[1]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portakv.conformance.executors.errors import UnknownInstruction
from portakv.conformance.executors.gcn.assembly import EXEC, Listing, Operand, constant_bits
from portakv.conformance.executors.memory import Memory

Array = np.ndarray[Any, Any]
Reader = Callable[["Waves"], Array]
Writer = Callable[["Waves", Array], None]
Step = Callable[["Waves"], None]

UNDEFINED = 0xA5C35A3C
"""What a register holds that nothing has written: no address, and no number that a kernel would compute."""

HALF = np.uint32(16)
WORD = np.uint64(32)
LOW = np.uint32(0xFFFF)


class Waves:
    """`v` uint32 `[registers, waves, lanes]`, `s` uint32 `[waves, 128]` and `wide`, the same in pairs; `scc` bool.

    `v` has 256 registers at most, `s` those of `assembly`: s0 …, vcc, ttmp0 …, m0, exec.
    """

    def __init__(self, listing: Listing, count: int, vectors: int, memory: Memory, local: Memory, arguments: Memory):
        self.listing, self.count, self.lanes = listing, count, listing.lanes
        self.memory, self.local, self.arguments = memory, local, arguments
        self.v = np.full((vectors, count, self.lanes), UNDEFINED, np.uint32)
        self.s = np.full((count, 128), UNDEFINED, np.uint32)
        self.wide = self.s.view(np.uint64)
        self.scc = np.zeros(count, bool)
        self.group = np.zeros(count, np.uint64)
        self.focus(slice(None))

    def focus(self, at: Any) -> None:
        """Act on waves `at` (a slice of all, or their numbers) from now on."""
        self.at = at
        self.size = self.count if isinstance(at, slice) else len(at)
        self._active: Array | None = None
        self._known = False

    @property
    def active(self) -> Array | None:
        """exec as bool `[waves, lanes]`; None if every lane is active."""
        if not self._known:
            bits = self.mask(EXEC)
            self._active = None if int(bits.min()) == (1 << self.lanes) - 1 else self.lanes_of(bits)
            self._known = True
        return self._active

    def every(self) -> Array:
        """`active`, always as an array."""
        return np.ones((self.size, self.lanes), bool) if self.active is None else self.active

    def mask(self, index: int) -> Array:
        """One bit a lane, from a register (wave32) or a pair."""
        return np.asarray(self.s[self.at, index] if self.lanes == 32 else self.wide[self.at, index >> 1])

    def set_mask(self, index: int, bits: Array) -> None:
        if self.lanes == 32:
            self.s[self.at, index] = bits
        else:
            self.wide[self.at, index >> 1] = bits
        if index == EXEC:
            self._known = False

    def lanes_of(self, bits: Array) -> Array:
        """bool `[waves, lanes]` of one bit a lane."""
        raw = np.ascontiguousarray(bits).view(np.uint8).reshape(len(bits), -1)
        return np.unpackbits(raw, axis=1, bitorder="little").view(bool)

    def bits_of(self, lanes: Array) -> Array:
        raw = np.packbits(np.broadcast_to(lanes, (self.size, self.lanes)), axis=1, bitorder="little")
        return raw.view(f"<u{self.lanes // 8}")[:, 0]

    def restrict(self, bits: int) -> None:
        """Only lanes of this mask stay active."""
        mask = self.mask(EXEC)
        self.set_mask(EXEC, mask & mask.dtype.type(bits % (1 << self.lanes)))

    def put(self, index: int, value: Array, where: Array | None) -> None:
        """Vector register `index` becomes `value` in the lanes of `where`."""
        row = self.v[index]
        if where is None:
            row[self.at] = value
        elif isinstance(self.at, slice):
            np.copyto(row, value, where=where)
        else:
            row[self.at] = np.where(where, value, row[self.at])


def view(kind: str) -> str:
    """numpy's name of a type: "b32" are bits, read as "u32"."""
    return {"u": "<u", "b": "<u", "i": "<i", "f": "<f"}[kind[0]] + str(int(kind[1:]) // 8)


def read_vector(operand: Operand, kind: str) -> Reader:
    """Operand of a vector instruction as `kind`: "u32", "i64", "f16" …, or "mask" for bool lanes."""
    if kind == "mask":
        return _read_lanes(operand)
    return _modify(_read_raw(operand, kind, True), operand, kind)


def read_scalar(operand: Operand, kind: str) -> Reader:
    return _modify(_read_raw(operand, kind, False), operand, kind)


def _read_raw(operand: Operand, kind: str, vector: bool) -> Reader:
    """The bits, as an unsigned integer of the type's width."""
    width, index = int(kind[1:]), operand.index
    column = (slice(None), None) if vector else slice(None)
    if operand.kind in ("int", "float", "null"):
        bits = 0 if operand.kind == "null" else constant_bits(operand, kind)
        constant = np.full((1, 1) if vector else 1, bits, f"<u{width // 8}")
        return lambda m: constant
    if operand.kind not in ("v", "s") or (operand.kind == "v" and not vector):
        raise UnknownInstruction(f"operand of kind {operand.kind!r}")
    if operand.count != max(1, width // 32):
        raise UnknownInstruction(f"{operand.count} registers as {kind}")
    if width == 64:
        if operand.kind == "s":
            _check_pair(operand)
            return lambda m: m.wide[m.at, index >> 1][column]
        return lambda m: m.v[index + 1][m.at].astype(np.uint64) << WORD | m.v[index][m.at]
    word: Reader = (lambda m: m.v[index][m.at]) if operand.kind == "v" else (lambda m: m.s[m.at, index][column])
    if width == 32:
        return word
    if operand.half == "h":
        return lambda m: (word(m) >> HALF).astype(np.uint16)
    return lambda m: word(m).astype(np.uint16)


def _check_pair(operand: Operand) -> None:
    if operand.index % 2:
        raise UnknownInstruction(f"pair that begins at s{operand.index}")


def _modify(raw: Reader, operand: Operand, kind: str) -> Reader:
    """The sign modifiers of floats (of bits too: `v_cndmask_b32` takes them), then numpy's type."""
    width, name = int(kind[1:]), view(kind)
    if operand.negate or operand.absolute:
        if kind[0] not in "fb":
            raise UnknownInstruction(f"sign modifier of an operand of type {kind}")
        sign = np.array(1 << (width - 1), f"<u{width // 8}")
        plain = raw
        magnitude: Reader = (lambda m: plain(m) & ~sign) if operand.absolute else plain
        raw = (lambda m: magnitude(m) ^ sign) if operand.negate else magnitude
    if kind[0] in "ub":
        return raw
    bits = raw
    return lambda m: bits(m).view(name)


def _read_lanes(operand: Operand) -> Reader:
    if operand.kind == "int" and operand.value in (0, -1):
        every = np.full((1, 1), operand.value == -1)
        return lambda m: every
    if operand.kind != "s":
        raise UnknownInstruction(f"mask of kind {operand.kind!r}")
    index = operand.index
    return lambda m: m.lanes_of(m.mask(index))


def write_scalar(operand: Operand, kind: str) -> Writer:
    index = operand.index
    if operand.kind == "null":
        return lambda m, value: None
    if operand.kind != "s" or operand.count != max(1, int(kind[1:]) // 32):
        raise UnknownInstruction(f"result {kind} in {operand.count} registers of kind {operand.kind!r}")
    touches = index + operand.count > EXEC
    if kind[1:] == "64":
        _check_pair(operand)

        def pair(m: Waves, value: Array) -> None:
            m.wide[m.at, index >> 1] = value.view(np.uint64)
            if touches:
                m.focus(m.at)

        return pair

    def word(m: Waves, value: Array) -> None:
        m.s[m.at, index] = value.view(np.uint32)
        if touches:
            m.focus(m.at)

    return word


def write_lanes(operand: Operand) -> Writer:
    """A mask register gets a bit a lane, 0 for inactive ones (ISA, "VOPC" and "VOP3SD")."""
    if operand.kind == "null":
        return lambda m, value: None
    if operand.kind != "s":
        raise UnknownInstruction(f"mask in a register of kind {operand.kind!r}")
    index = operand.index

    def write(m: Waves, value: Array) -> None:
        m.set_mask(index, m.bits_of(value if m.active is None else value & m.active))

    return write


VectorWriter = Callable[[Waves, Array, "Array | None"], None]


def write_vector(operand: Operand, kind: str, keep: bool) -> VectorWriter:
    """Of 16 bits either half; the other one is kept if `keep`, else zero (the low half's result on CDNA)."""
    width, index = int(kind[1:]), operand.index
    if operand.kind != "v" or operand.count != max(1, width // 32):
        raise UnknownInstruction(f"result {kind} in {operand.count} registers of kind {operand.kind!r}")
    if width == 64:

        def pair(m: Waves, value: Array, where: Array | None) -> None:
            bits = value.view(np.uint64)
            low, high = bits.astype(np.uint32), (bits >> WORD).astype(np.uint32)
            m.put(index, low, where)
            m.put(index + 1, high, where)

        return pair
    if width == 32:
        return lambda m, value, where: m.put(index, value.view(np.uint32), where)
    if operand.half == "h":

        def high(m: Waves, value: Array, where: Array | None) -> None:
            bits = value.view(np.uint16).astype(np.uint32) << HALF
            m.put(index, bits | m.v[index][m.at] & LOW, where)

        return high
    if not (keep or operand.half):
        return lambda m, value, where: m.put(index, value.view(np.uint16).astype(np.uint32), where)

    def low(m: Waves, value: Array, where: Array | None) -> None:
        m.put(index, value.view(np.uint16) | m.v[index][m.at] & ~LOW, where)

    return low
