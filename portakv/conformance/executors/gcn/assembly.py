"""LLVM's text of an AMD GPU kernel, read into instructions.

Syntax: LLVM's "User Guide for AMDGPU Backend", sections "AMDGPU Operands" and "Modifiers"; the directives and the
metadata: its sections "Assembler", ".amdhsa_" and "Code Object V5 Metadata".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

from portakv.conformance.executors.errors import UnknownInstruction

VCC, TTMP, M0, EXEC = 106, 108, 124, 126
"""Where the scalar file of `Waves` keeps what has a name."""

_NAMED = {
    **{name: ("s", VCC, count) for name, count in (("vcc", 2), ("vcc_lo", 1))},
    **{name: ("s", EXEC, count) for name, count in (("exec", 2), ("exec_lo", 1))},
    "vcc_hi": ("s", VCC + 1, 1),
    "exec_hi": ("s", EXEC + 1, 1),
    "m0": ("s", M0, 1),
    "null": ("null", 0, 1),
    "off": ("off", 0, 1),
}

ENCODINGS = ("e64_dpp", "e32", "e64", "dpp", "sdwa")


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand. `kind`: "v" or "s" (registers `index` … `index + count - 1`), "null", "off", "int" and "float"
    (constants, in `value`), "label" (in `label`). `half` is "l" or "h" for one half of a register."""

    kind: str
    index: int = 0
    count: int = 1
    value: float = 0
    label: str = ""
    half: str = ""
    negate: bool = False
    absolute: bool = False
    extend: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """`name` is without its encoding. `second` is the other half of a dual instruction of RDNA."""

    name: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: Mapping[str, str]
    text: str
    second: Instruction | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """A kernel. `arch` as "gfx942"; `entry` is where a wave with preloaded arguments begins, 0 without any."""

    arch: str
    lanes: int
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]
    entry: int
    directives: Mapping[str, str]
    arguments: tuple[tuple[int, int, str], ...]
    """Offset, size and kind of each kernel argument."""

    def setting(self, name: str, default: int = 0) -> int:
        """The number after `.amdhsa_NAME`."""
        return int(self.directives[name], 0) if name in self.directives else default

    @property
    def generation(self) -> int:
        """9 for CDNA, 11 and 12 for RDNA 3 and 4."""
        return 9 if self.arch.startswith("gfx9") else int(self.arch[3:5])


def read_listing(text: str) -> Listing:
    """The one kernel of an assembly file. Raises `UnknownInstruction` for what it cannot read."""
    arch = _search(r'\.amdgcn_target\s+"[^"]*?(gfx\w+)', text, "no .amdgcn_target")
    kernel = _search(r"^\s*\.amdhsa_kernel\s+(\S+)", text, "no .amdhsa_kernel")
    directives = dict(re.findall(r"^\s*\.amdhsa_(\w+)[ \t]+(\S.*?)\s*$", text, re.M))
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    aligned: list[int] = []
    body = text.partition(f"\n{kernel}:")[2].partition(".section")[0].partition(".Lfunc_end")[0]
    for line in body.splitlines():
        line = line.partition(";")[0].strip()
        if not line:
            continue
        if line.endswith(":") and " " not in line:
            labels[line[:-1]] = len(code)
        elif line.split() == [".p2align", "8"]:
            aligned.append(len(code))
        elif not line.startswith("."):
            code.append(parse_instruction(line))
    lanes = 32 if directives.get("wavefront_size32") == "1" else 64
    entry = 0
    if int(directives.get("user_sgpr_kernarg_preload_length", "0")):
        # The prologue for firmware that preloads nothing takes the first 256 bytes, of 8 an instruction at most.
        entry = next((at for at in aligned if 0 < at <= 32), -1)
        if entry < 0:
            raise UnknownInstruction("kernarg preload: no second entry at 256 bytes")
    return Listing(arch, lanes, tuple(code), labels, entry, directives, _read_arguments(text))


def _search(pattern: str, text: str, complaint: str) -> str:
    found = re.search(pattern, text, re.M)
    if found is None:
        raise UnknownInstruction(complaint)
    return found[1]


def _read_arguments(text: str) -> tuple[tuple[int, int, str], ...]:
    """From `.args` of the metadata, which LLVM writes with a key a line."""
    items = text.partition(".amdgpu_metadata")[2].partition(".args:")[2].partition("\n    .")[0]
    arguments = []
    for item in re.split(r"^      - ", items, flags=re.M)[1:]:
        keys = dict(re.findall(r"\.(\w+): +(\S+)", item))
        arguments.append((int(keys["offset"]), int(keys["size"]), keys["value_kind"]))
    return tuple(arguments)


def parse_instruction(line: str) -> Instruction:
    first, dual, second = line.partition(" :: ")
    if dual:
        x, y = parse_instruction(first), parse_instruction(second)
        return Instruction(x.name, "dual", x.operands, x.modifiers, line, y)
    mnemonic, _, rest = line.partition(" ")
    name = mnemonic.replace("v_dual_", "v_")
    encoding = next((e for e in ENCODINGS if name.endswith(f"_{e}")), "")
    name = name.removesuffix(f"_{encoding}") if encoding else name
    if name.startswith(("s_wait", "s_delay_alu", "s_sendmsg")):  # operands of their own, none of which matters here
        return Instruction(name, "", (), {}, line)
    operands, modifiers = [], {}
    for word in _split(rest):
        key, _, value = word.partition(":")
        if word in FLAGS or (value and re.fullmatch(r"[a-z]\w*", key)):
            modifiers[key] = value
        else:
            operands.append(parse_operand(word, line))
    return Instruction(name, encoding, tuple(operands), modifiers, line)


FLAGS = frozenset(
    (
        "clamp",
        "offen",
        "idxen",
        "lds",
        "glc",
        "slc",
        "dlc",
        "nt",
        "sc0",
        "sc1",
        "nv",
        "wave_shl",
        "wave_shr",
        "row_mirror",
        "row_half_mirror",
        "gds",
    )
)
"""Modifiers that are one word."""


def _split(text: str) -> list[str]:
    """At commas and spaces, outside brackets and parentheses."""
    return [word for word in re.split(r"[ ,\t]+(?![^\[]*\])(?![^(]*\))", text) if word]


def parse_operand(word: str, line: str = "") -> Operand:
    core = word
    extend = negate = absolute = False
    if found := re.fullmatch(r"sext\((.*)\)", core):
        core, extend = found[1], True
    if core.startswith("-") and not re.match(r"-[\d.]", core):
        core, negate = core[1:], True
    if core.startswith("|") and core.endswith("|"):
        core, absolute = core[1:-1], True
    plain = _parse_plain(core)
    if plain is None:
        raise UnknownInstruction(f"operand {word!r} of {line!r}")
    return replace(plain, negate=negate, absolute=absolute, extend=extend)


def _parse_plain(core: str) -> Operand | None:
    """Without modifiers."""
    if core in _NAMED:
        return Operand(*_NAMED[core])
    if found := re.fullmatch(r"(v|s|ttmp)(\d+)(?:\.([lh]))?", core):
        base = TTMP if found[1] == "ttmp" else 0
        return Operand(found[1][0].replace("t", "s"), base + int(found[2]), 1, half=found[3] or "")
    if found := re.fullmatch(r"(v|s|ttmp)\[(\d+):(\d+)\]", core):
        base = TTMP if found[1] == "ttmp" else 0
        low, high = int(found[2]), int(found[3])
        return Operand(found[1][0].replace("t", "s"), base + low, high - low + 1)
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", core):
        return Operand("int", value=int(core, 0))
    if re.fullmatch(r"-?\d+\.\d*(e[-+]?\d+)?", core):
        return Operand("float", value=float(core))
    if core.startswith(".L"):
        return Operand("label", label=core)
    return None


def constant_bits(operand: Operand, kind: str) -> int:
    """The bits of a constant as an operand of this type ("u32", "i64", "f16" …).

    ISA, "Scalar ALU operands": inline integers are sign-extended, inline floats have the operand's own width.
    """
    width = int(kind[1:])
    if operand.kind == "int":
        value = int(operand.value)
        if width == 64 and value >= 1 << 31 and kind[0] != "u":
            raise UnknownInstruction(f"literal {value:#x} of 64 bits: its extension depends on the instruction")
        return value & ((1 << width) - 1)
    if width == 16 and kind[0] != "f":
        raise UnknownInstruction(f"float constant {operand.value} as {kind}")
    packed = struct.pack({16: "<e", 32: "<f", 64: "<d"}[width], operand.value)
    return int.from_bytes(packed, "little")
