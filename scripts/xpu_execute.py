"""Run the XPU kernels without an Intel GPU: their SPIR-V on Intel's OpenCL runtime for CPUs.

    python scripts/xpu_execute.py [--every N] [--jobs N]

Each variant is compiled for PVC by Intel's Triton, its SPIR-V validated, executed on the inputs of
`portakv.testing` and compared with the reference, bit for bit. docs/xpu.md says what that proves and what not.
`nox -s xpu` makes the environment it needs, apart from all others: Intel's Triton and the stock one share a folder.
"""

from __future__ import annotations

import argparse
import ctypes
import enum
import functools
import multiprocessing
import os
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyopencl as cl
import torch
import triton

from portakv import buffers, testing
from portakv.compile import Target
from portakv.device import DeviceKind
from portakv.formats import FP8_DIALECTS, KVFormat, Variant
from portakv.kernels import _triton, reference, xpu
from portakv.kernels._triton.launch import Launcher, Source, compile_source
from portakv.table import TABLE, TRITON_XPU

Tensor = torch.Tensor

CPU = torch.device("cpu")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PVC = Target.parse("pvc").triton()

_scratch = tempfile.TemporaryDirectory()
_vendors = Path(_scratch.name) / "vendors"
_vendors.mkdir()
(_vendors / "cpu.icd").write_text(f"{sysconfig.get_path('data')}/lib/libintelocl.so\n")
os.environ |= {
    "OCL_ICD_VENDORS": str(_vendors),  # no other OpenCL platform of this machine
    "TRITON_CACHE_DIR": f"{_scratch.name}/triton",
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
    EXECUTION_MODE = 16
    CAPABILITY = 17
    TYPE_VECTOR = 23
    TYPE_STRUCT = 30
    DECORATE = 71
    FADD = 129
    FMUL = 133


KERNEL_ATTRIBUTES, MAX_WORKGROUP_SIZE, CONTRACTION_OFF, FAST_MATH_MODE = 5892, 5893, 31, 40
"""Operands: a capability, two execution modes and a decoration."""

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
    return words[0] & 0xFFFF == op and operand in (None, words[2])


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
    """`spirv-val`, and that every float operation is rounded once, as written. Raises `ValueError`.

    Triton stores single elements as vectors of one, which Intel's compilers take and the specification does not
    allow: the validator is shown a structure of one instead.
    """
    header, instructions = read_spirv(module)
    opcodes = {words[0] & 0xFFFF for words in instructions}
    unfused = any(is_op(i, Op.EXECUTION_MODE, CONTRACTION_OFF) for i in instructions)
    if {Op.FADD, Op.FMUL} <= opcodes and not unfused:
        raise ValueError("a multiply and an add may be fused: no ContractionOff")
    if any(is_op(i, Op.DECORATE, FAST_MATH_MODE) for i in instructions):
        raise ValueError("float arithmetic may be rewritten: FPFastMathMode")
    legal = ((3 << 16 | Op.TYPE_STRUCT, *i[1:3]) if is_op(i, Op.TYPE_VECTOR) and i[3] == 1 else i for i in instructions)
    done = subprocess.run([SPIRV_VAL, "-"], input=write_spirv(header, legal), capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"spirv-val: {(done.stderr + done.stdout).decode()}")


@functools.cache
def open_cl() -> tuple[cl.Context, cl.CommandQueue]:
    """Intel's CPU device, the only one that `OCL_ICD_VENDORS` shows."""
    (device,) = (d for platform in cl.get_platforms() for d in platform.get_devices())
    if not device.svm_capabilities & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM:
        raise RuntimeError(f"{device.name}: expected fine-grained system memory, as tensors are")
    context = cl.Context([device])
    return context, cl.CommandQueue(context)


class OpenCLKernel:
    """Stands where `launch.Kernel` does: called with a grid, CPU tensors and the int scalars."""

    def __init__(self, source: Source) -> None:
        self.rows, self.chunks = source.rows, source.chunks
        compiled = compile_source(source, PVC)
        validate(compiled.asm["spv"])
        context, self._queue = open_cl()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # its log says that the build succeeded
            program = cl.Program(context, for_cpu(compiled.asm["spv"])).build()
        self._kernel = cl.Kernel(program, compiled.name)
        self._lanes = compiled.metadata.num_warps * compiled.metadata.threads_per_warp
        self._shared = compiled.metadata.shared

    def __call__(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], scalars: Sequence[int]) -> None:
        # The runtime takes any host address, so tensors stay where they are.
        pointers = [cl.SVM((ctypes.c_char * 1).from_address(t.data_ptr())) for t in tensors]
        local = [cl.LocalMemory(self._shared)] if self._shared else []
        self._kernel.set_args(*pointers, *map(ctypes.c_int64, scalars), *local)
        size = (grid[0] * self._lanes, *grid[1:])
        cl.enqueue_nd_range_kernel(self._queue, self._kernel, size, (self._lanes, 1, 1)).wait()


class OpenCLLauncher(Launcher):
    """The sources and tiles of the XPU folder, on the CPU runtime."""

    def __init__(self) -> None:
        super().__init__(xpu.LAUNCHER.backend, _triton.SOURCES, xpu.TILES)

    def _build(self, variant: Variant, device: torch.device) -> OpenCLKernel:
        return OpenCLKernel(self.source(variant, PVC.warp_size))


class BrokenLauncher(OpenCLLauncher):
    """Kernels that take the reserved page for an ordinary one."""

    def source(self, variant: Variant, warp_size: int) -> Source:
        source = super().source(variant, warp_size)
        return replace(source, constants={**source.constants, "RESERVED": 0})


def bind(op: str, launcher: Launcher) -> Callable[..., None]:
    """The op as `portakv.kernels.xpu` has it, on another launcher."""
    return functools.partial(getattr(xpu, op).func, launcher)


def check_variant(op: str, cases: Sequence[testing.Case]) -> None:
    """The shared inputs of one variant, which is compiled once."""
    kernel = bind(op, OpenCLLauncher())
    for case in cases:
        testing.check(op, kernel, case, CPU, last_wins=False)  # programs run on any thread


def check_floats(kept: torch.dtype, dtype: torch.dtype) -> None:
    """Every 16-bit pattern (for float32 as the upper half) stored and read again, under scales that take inputs
    and results through the subnormals of both dtypes."""
    fmt = KVFormat(1, 256, 256, kept)
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    bits = (patterns << 16 | 0x1234) if dtype is torch.float32 else patterns.to(torch.int16)
    k, slots = bits.view(256, 1, 256).view(dtype), torch.arange(1, 257)
    launcher = OpenCLLauncher()
    for factor in (1.0, 0.37, 2.0**125, 1e-39):
        scale, results = torch.tensor([factor]), []
        for store, gather in (
            (bind("store_kv", launcher), bind("gather_kv", launcher)),
            (reference.store_kv, reference.gather_kv),
        ):
            caches = [torch.zeros((257, 1, 256 * kept.itemsize), dtype=torch.uint8).view(kept) for _ in "kv"]
            outs = [torch.zeros_like(k) for _ in "kv"]
            faults = testing.faults().tensor
            store(k, k.flip(0), *caches, slots, scale, 3 * scale, faults, fmt)
            gather(*caches, slots, *outs, scale, 3 * scale, faults, fmt)
            results.append([*caches, *outs, faults])
        for got, want in zip(*results, strict=True):
            differ = int((got.view(torch.uint8) != want.view(torch.uint8)).sum())
            if differ:
                raise buffers.Mismatch(f"{dtype} in {kept}, scale {factor}: {differ} bytes differ")


def check_far() -> None:
    """Slot 3 of a cache whose slot stride is 2^31 lies past 2^32 bytes; only touched memory pages exist."""
    fmt, stride = KVFormat(2, 16, 16, torch.float8_e4m3fn), 2**31
    storage = torch.empty(3 * stride + 32, dtype=torch.uint8)
    far = storage.view(fmt.dtype).as_strided((4, 2, 16), (stride, 16, 1))
    near = torch.zeros((4, 2, 16), dtype=torch.uint8).view(fmt.dtype)
    k = torch.arange(32, dtype=torch.uint8).view(1, 2, 16).view(fmt.dtype)
    ones, faults, launcher = torch.ones(2), testing.faults().tensor, OpenCLLauncher()
    for slot in (torch.tensor([3]), torch.tensor([3], dtype=torch.int32)):
        out = torch.zeros((1, 2, 16), dtype=torch.uint8).view(fmt.dtype)
        bind("store_kv", launcher)(k, k, far, near, slot, ones, ones, faults, fmt)
        bind("gather_kv", launcher)(far, near, slot, out, out.clone(), ones, ones, faults, fmt)
        if not (
            torch.equal(storage[-32:], k.view(torch.uint8).flatten())
            and torch.equal(out.view(torch.uint8), k.view(torch.uint8))
        ):
            raise buffers.Mismatch("an offset past 2^31 was cut")


def check_checks() -> None:
    """What must fail does: a kernel that writes the reserved page, SPIR-V that is broken or that may fuse."""
    case = next(c for c in testing.cases("store_kv") if c.tokens == max(testing.TOKENS))
    expect(buffers.Mismatch, lambda: testing.check("store_kv", bind("store_kv", BrokenLauncher()), case, CPU))
    variant = Variant("gather_kv", KVFormat(1, 256, 256, torch.float8_e4m3fn), torch.float16)
    header, good = read_spirv(xpu.LAUNCHER.compile(variant, PVC).asm["spv"])
    fused = [i for i in good if not is_op(i, Op.EXECUTION_MODE, CONTRACTION_OFF)]
    untyped = [i for i in good if not is_op(i, Op.TYPE_VECTOR)]
    for bad in (fused, untyped):
        expect(ValueError, lambda: validate(write_spirv(header, bad)))  # noqa: B023 (called at once)


def expect(error: type[Exception], call: Callable[[], None]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}: the checks cannot fail")


Task = tuple[str, Callable[..., None], tuple[object, ...]]
"""A line of the table, and a check with its arguments; a failed one raises."""


def tasks(every: int) -> list[Task]:
    """All checks; of the variants with a format every `every`-th."""
    out: list[Task] = [("checks that must fail", check_checks, ()), ("offsets past 2^31", check_far, ())]
    for op, columns in TABLE.items():
        if TRITON_XPU not in columns[DeviceKind.XPU]:
            continue
        by_variant: dict[Variant, list[testing.Case]] = {}
        for case in testing.cases(op):
            by_variant.setdefault(case.variant, []).append(case)
        step = every if any(variant.fmt for variant in by_variant) else 1
        out += [(op, check_variant, (op, cases)) for cases in list(by_variant.values())[::step]]
    for kept in (*FP8_DIALECTS, *FLOATS):
        out += [("every bit pattern", check_floats, (kept, dtype)) for dtype in FLOATS]
    return out


def run(task: Task) -> tuple[str, str | None]:
    name, check, args = task
    torch.set_num_threads(1)
    try:
        check(*args)
    except Exception as e:
        return name, f"{type(e).__name__}: {e}"
    return name, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every N-th variant (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes (default: one a core)")
    args = parser.parse_args()
    start = time.perf_counter()
    lines: dict[str, list[str | None]] = {}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for name, failure in pool.map(run, tasks(args.every)):
            lines.setdefault(name, []).append(failure)
            if failure:
                print(f"{name}: {failure}", file=sys.stderr)
    device = open_cl()[0].devices[0]
    print(f"SPIR-V of triton {triton.__version__} for PVC on {device.name}, OpenCL {device.driver_version}")
    for name, results in lines.items():
        failed = sum(failure is not None for failure in results)
        print(f"  {name}: {len(results)} checked, {f'{failed} FAILED' if failed else 'passed'}")
    print(f"{time.perf_counter() - start:.0f} s")
    return any(failure for results in lines.values() for failure in results)


if __name__ == "__main__":
    sys.exit(main())
