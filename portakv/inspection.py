"""What the code of a compiled Triton kernel shows: registers, spills, and the width of its accesses."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portakv.formats import VECTOR_BYTES


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled kernel as its target's own code: accesses to global memory are counted by the bytes of one lane.

    None is what the code does not say: SPIR-V is no machine's.
    """

    registers: int | None
    spills: int | None
    local_bytes: int | None
    loads: Counter[int]
    stores: Counter[int]
    instructions: int | None
    problems: tuple[str, ...] = ()

    @property
    def moves_vectors(self) -> bool:
        # Loads of slots are narrower, but rows are loaded as many times as they are stored.
        return set(self.stores) == {VECTOR_BYTES} and self.loads[VECTOR_BYTES] == self.stores[VECTOR_BYTES]


def read_cuda(compiled: Any) -> Code:
    """What Triton's compiled kernel for NVIDIA asks of a GPU."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.check_output([str(cuobjdump), "-res-usage", cubin.name], text=True)
    found = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = compiled.asm["ptx"]
    accesses = re.findall(r"\b(ld|st)\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    loads, stores = (
        Counter(int(n or 1) * int(bits) // 8 for op, n, bits in accesses if op == want) for want in ("ld", "st")
    )
    inexact = sorted(set(re.findall(r"\b(?:div|fma)\.\S*f32|\b\w+\S*\.ftz\S*", ptx)))
    problems = (f"float arithmetic that is not IEEE's, step by step: {inexact}",) if inexact else ()
    local = found["STACK"] + found["LOCAL"]
    instructions = _count_instructions(compiled.asm["cubin"])
    return Code(found["REG"], local // 4, local, loads, stores, instructions, problems)


def _count_instructions(cubin: bytes) -> int:
    """Of 16 bytes each, as since Volta, without the NOPs that fill up a section.

    Sections are those of ELF64's header: offset, size and count of their descriptions at 40, 58 and 60.
    """
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 58)
    instructions = 0
    for at in range(table, table + size * count, size):
        kind, flags, _, begin, length = struct.unpack_from("<IQQQQ", cubin, at + 4)
        if kind == 1 and flags & 4:  # SHT_PROGBITS, SHF_EXECINSTR
            opcodes = [word & 0xFFF for word, _ in struct.iter_unpack("<QQ", cubin[begin : begin + length])]
            while opcodes and opcodes[-1] == 0x918:  # NOP
                opcodes.pop()
            instructions += len(opcodes)
    return instructions


def read_hip(compiled: Any) -> Code:
    """The same for AMD."""
    isa = compiled.asm["amdgcn"]
    found = {name: int(n) for name, n in re.findall(r"^\s+\.(\w+):\s+(\d+)$", isa, re.MULTILINE)}
    lanes = compiled.metadata.warp_size
    problems = () if found["wavefront_size"] == lanes else (f"waves of {found['wavefront_size']} lanes, not {lanes}",)
    accesses = re.findall(r"\b(?:global|buffer|flat)_(load|store)_(\w+)", isa)
    loads, stores = (Counter(_amd_bytes(width) for op, width in accesses if op == want) for want in ("load", "store"))
    spills = found["vgpr_spill_count"] + found["sgpr_spill_count"]
    instructions = len(re.findall(r"^\s+(?:s|v|ds|global|buffer|flat|scratch)_\w+", isa, re.MULTILINE))
    scratch = found["private_segment_fixed_size"]
    return Code(found["vgpr_count"], spills, scratch, loads, stores, instructions, problems)


def _amd_bytes(width: str) -> int:
    """Of an access named "dwordx4", "short_d16_hi" or "ubyte" (CDNA), "b128" or "d16_u8" (RDNA)."""
    if dwords := re.match(r"dword(?:x(\d))?", width):
        return 4 * int(dwords[1] or 1)
    if bits := re.search(r"(?<!d)[biu](\d+)$", width):
        return int(bits[1]) // 8
    return 1 if "byte" in width else 2


def read_xpu(compiled: Any) -> Code:
    """The same for Intel."""
    loads, stores = _spirv_accesses(compiled.asm["spv"])
    return Code(None, None, None, loads, stores, None)


def _spirv_accesses(spirv: bytes) -> tuple[Counter[int], Counter[int]]:
    """Loads and stores of global memory in a SPIR-V module, by bytes.

    Opcodes and operands are those of the SPIR-V specification, section 3 ("Binary Form").
    """
    words = struct.unpack(f"<{len(spirv) // 4}I", spirv)
    type_bytes: dict[int, int] = {}
    pointees: dict[int, int] = {}  # type of a pointer to global memory -> bytes of what it points at
    pointers: dict[int, int] = {}  # such a pointer -> the same
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    at = 5
    while at < len(words):
        opcode, length = words[at] & 0xFFFF, words[at] >> 16
        operands = words[at + 1 : at + length]
        at += length
        match opcode:
            case 21 | 22:  # OpTypeInt, OpTypeFloat
                type_bytes[operands[0]] = operands[1] // 8
            case 23:  # OpTypeVector
                type_bytes[operands[0]] = type_bytes[operands[1]] * operands[2]
            case 32 if operands[1] == 5:  # OpTypePointer to CrossWorkgroup
                pointees[operands[0]] = type_bytes.get(operands[2], 0)
            case 61 if operands[2] in pointers:  # OpLoad
                loads[type_bytes[operands[0]]] += 1
            case 62 if operands[0] in pointers:  # OpStore
                stores[pointers[operands[0]]] += 1
            case _ if len(operands) > 1 and operands[0] in pointees:
                pointers[operands[1]] = pointees[operands[0]]
    return loads, stores
