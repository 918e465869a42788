"""Executes the SPIR-V that Intel's Triton emits, on Intel's OpenCL runtime for CPUs.

    run(parse(compiled.asm["spv"]), [*addresses, *scalars], grid, num_threads, shared_bytes, memory)

docs/xpu.md says what that proves and what not. `nox -s xpu` makes the environment it needs, apart from all others:
Intel's Triton and the stock one share a folder. Opcodes and operands are those of the SPIR-V specification, section 3.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import random
import struct
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyopencl as cl
import triton

from portakv.conformance.executors.errors import ExecutionError, UnknownInstruction
from portakv.conformance.executors.memory import Memory

CHECKS_ACCESSES = False
"""The runtime looks at none, so that a wild one may end the process, and has a schedule of its own."""

_scratch = tempfile.TemporaryDirectory()
_vendors = Path(_scratch.name) / "vendors"
_vendors.mkdir()
(_vendors / "cpu.icd").write_text(f"{sysconfig.get_path('data')}/lib/libintelocl.so\n")
os.environ |= {
    "OCL_ICD_VENDORS": str(_vendors),  # no other OpenCL platform of this machine
    "TRITON_DISABLE_LINE_INFO": "1",  # line info asks for an extension that the runtime lacks
}

# Intel's backend builds a C++ helper against SYCL and Level Zero, only to name the architecture for a tool that
# is not called here.
INTEL = triton.backends.backends["intel"].compiler
INTEL.__init__.__globals__["compile_module_from_src"] = lambda *_: SimpleNamespace(parse_device_arch=lambda _: "pvc")

SPIRV_VAL = Path(sysconfig.get_path("purelib")) / "cmeel.prefix/bin/spirv-val"


class Op(enum.IntEnum):
    """Opcodes, as the SPIR-V specification numbers them."""

    EXTENSION = 10
    ENTRY_POINT = 15
    EXECUTION_MODE = 16
    CAPABILITY = 17
    TYPE_VECTOR = 23
    TYPE_STRUCT = 30
    TYPE_POINTER = 32
    FUNCTION = 54
    FUNCTION_PARAMETER = 55
    FUNCTION_END = 56
    DECORATE = 71
    FADD = 129
    FMUL = 133


KERNEL_ATTRIBUTES, MAX_WORKGROUP_SIZE, CONTRACTION_OFF, FAST_MATH_MODE = 5892, 5893, 31, 40
"""Operands: a capability, two execution modes and a decoration."""

WORKGROUP, CROSS_WORKGROUP = 4, 5
"""Storage classes: shared memory and global memory."""

Instruction = tuple[int, ...]
"""The words of one; the first holds its length and its opcode."""


def read_spirv(module: bytes) -> tuple[Instruction, list[Instruction]]:
    """The five words of the header, and the instructions."""
    words = struct.unpack(f"<{len(module) // 4}I", module)
    instructions, at = [], 5
    while at < len(words):
        end = at + (words[at] >> 16)
        instructions.append(words[at:end])
        at = end
    return words[:5], instructions


def write_spirv(header: Instruction, instructions: Iterable[Instruction]) -> bytes:
    words = [*header, *(word for instruction in instructions for word in instruction)]
    return struct.pack(f"<{len(words)}I", *words)


def is_op(words: Instruction, op: int, operand: int | None = None) -> bool:
    """Whether it is the instruction `op`, with this second operand if one is asked for."""
    return words[0] & 0xFFFF == op and (operand is None or words[2] == operand)


def for_cpu(module: bytes) -> bytes:
    """The module without its bound on the work-group size, whose capability the CPU runtime refuses."""
    header, instructions = read_spirv(module)
    bound = (
        (2 << 16 | Op.CAPABILITY, KERNEL_ATTRIBUTES),
        (9 << 16 | Op.EXTENSION, *struct.unpack("<8I", b"SPV_INTEL_kernel_attributes".ljust(32, b"\0"))),
    )
    return write_spirv(
        header, (i for i in instructions if i not in bound and not is_op(i, Op.EXECUTION_MODE, MAX_WORKGROUP_SIZE))
    )


def validate(module: bytes) -> None:
    """`spirv-val`, and that every float operation is rounded once, as written. Raises `UnknownInstruction`.

    Triton stores single elements as vectors of one, which Intel's compilers take and the specification does not
    allow: the validator is shown a structure of one instead.
    """
    header, instructions = read_spirv(module)
    opcodes = {words[0] & 0xFFFF for words in instructions}
    unfused = any(is_op(i, Op.EXECUTION_MODE, CONTRACTION_OFF) for i in instructions)
    if {Op.FADD, Op.FMUL} <= opcodes and not unfused:
        raise UnknownInstruction("a multiply and an add may be fused: no ContractionOff")
    if any(is_op(i, Op.DECORATE, FAST_MATH_MODE) for i in instructions):
        raise UnknownInstruction("float arithmetic may be rewritten: FPFastMathMode")
    legal = ((3 << 16 | Op.TYPE_STRUCT, *i[1:3]) if is_op(i, Op.TYPE_VECTOR) and i[3] == 1 else i for i in instructions)
    done = subprocess.run([SPIRV_VAL, "-"], input=write_spirv(header, legal), capture_output=True, check=False)
    if done.returncode:
        raise UnknownInstruction(f"spirv-val: {(done.stderr + done.stdout).decode()}")


@functools.cache
def open_cl() -> tuple[cl.Context, cl.CommandQueue]:
    """Intel's CPU device, the only one that `OCL_ICD_VENDORS` shows."""
    (device,) = (d for platform in cl.get_platforms() for d in platform.get_devices())
    if not device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM:
        raise RuntimeError(f"{device.name}: expected fine-grained system memory, as tensors are")
    context = cl.Context([device])
    return context, cl.CommandQueue(context)


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel that the runtime built. `parameters` are the sizes in bytes of those that Triton's caller gives."""

    kernel: Any
    pointers: tuple[bool, ...]

    @property
    def parameters(self) -> tuple[int, ...]:
        return (8,) * len(self.pointers)


def parse(module: bytes) -> Program:
    """Validate and build a module of one kernel. Raises `UnknownInstruction` for what `validate` refuses."""
    validate(module)
    _, instructions = read_spirv(module)
    (name, function), *_ = (
        (struct.pack(f"<{len(i) - 3}I", *i[3:]).split(b"\0")[0].decode(), i[2])
        for i in instructions
        if is_op(i, Op.ENTRY_POINT)
    )
    classes = {i[1]: i[2] for i in instructions if is_op(i, Op.TYPE_POINTER)}
    begin = next(at for at, i in enumerate(instructions) if is_op(i, Op.FUNCTION, function))
    end = next(at for at, i in enumerate(instructions) if at > begin and is_op(i, Op.FUNCTION_END))
    kinds = [classes.get(i[1]) for i in instructions[begin:end] if is_op(i, Op.FUNCTION_PARAMETER)]
    context, _ = open_cl()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cl.CompilerWarning)  # its log says that the build succeeded
        built = cl.Program(context, for_cpu(module)).build()
    pointers = tuple(kind == CROSS_WORKGROUP for kind in kinds if kind != WORKGROUP)
    return Program(cl.Kernel(built, name), pointers)


def run(
    program: Program,
    args: Sequence[int],
    grid: tuple[int, int, int],
    num_threads: int,
    shared_bytes: int,
    memory: Memory,
    schedule: random.Random | None = None,
) -> None:
    """As `ptx.run`. The runtime takes any host address, and schedules as it likes: no access is checked."""
    if schedule is not None:
        raise ExecutionError("the runtime takes no schedule")
    values = [
        cl.SVM((ctypes.c_char * 1).from_address(arg)) if pointer else ctypes.c_int64(arg)
        for arg, pointer in zip(args, program.pointers, strict=True)
    ]
    program.kernel.set_args(*values, *([cl.LocalMemory(shared_bytes)] if shared_bytes else []))
    size = (grid[0] * num_threads, *grid[1:])
    cl.enqueue_nd_range_kernel(open_cl()[1], program.kernel, size, (num_threads, 1, 1)).wait()
