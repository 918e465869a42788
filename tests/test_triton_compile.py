"""What the Triton kernels compile to, read without their hardware; how a kernel is cached and launched.

Nothing here runs on a GPU: these checks say what a compiler made of a kernel, not that the kernel is right.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.compiler import CompilationError

from portakv import inspection
from portakv.compile import Target, compile_variant, needs_vectors
from portakv.conformance import mutations
from portakv.errors import NoKernel
from portakv.formats import FAULT_KINDS, KVFormat, Layout, Variant, list_variants
from portakv.kernels import _triton
from portakv.kernels._triton import launch
from portakv.kernels._triton.rows import Tile
from portakv.kernels.cuda import kernels as cuda
from portakv.kernels.hip import kernels as hip
from portakv.kernels.xpu import kernels as xpu

SM_90 = Target.parse("sm_90").triton()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

TARGETS = {"sm_80": cuda, "sm_90": cuda, "gfx942": hip, "gfx1100": hip}
FORMATS = (
    KVFormat(8, 128, 128, torch.bfloat16),
    KVFormat(6, 192, 128, torch.float8_e4m3fn, page_size=16),
    KVFormat(1, 512, 64, torch.bfloat16, layout=Layout.MLA),
    KVFormat(1, 512, 64, torch.float8_e4m3fn, 64, Layout.FLASHMLA_V32),
)
VARIANTS = list_variants(FORMATS)
ONE_OF_EACH = tuple({(v.op, v.fmt, needs_vectors(v)): v for v in reversed(VARIANTS)}.values())


@pytest.mark.parametrize("name", TARGETS)
def test_every_op_compiles(name: str) -> None:
    """One variant of each kind; `.ci/run` has `portakv compile` do all of them."""
    for variant in ONE_OF_EACH:
        report = compile_variant(variant, Target.parse(name))
        assert report.problems == ()
        assert report.registers
        assert report.spills == report.local_bytes == 0
        assert report.vectors is (True if needs_vectors(variant) else None)


@pytest.mark.parametrize("name", TARGETS)
def test_few_columns_need_no_shared_memory(name: str) -> None:
    """A tile of short rows has so many that a program could hold more slots than lanes."""
    fmt = KVFormat(2, 1, 3, torch.float8_e5m2, 4)
    for variant in (
        Variant("store_kv", fmt, torch.float16, alignment=2),
        Variant("move_kv", fmt, fmt.dtype, alignment=1),
    ):
        assert compile_variant(variant, Target.parse(name)).problems == ()


def test_the_kinds_that_must_move_vectors() -> None:
    kinds = {variant.op for variant in ONE_OF_EACH if needs_vectors(variant)}
    assert kinds == {"store_kv", "gather_kv", "move_kv"}
    assert not needs_vectors(Variant("move_kv", KVFormat(1, 120, 128, torch.bfloat16), torch.bfloat16))


@pytest.mark.parametrize("name", TARGETS)
def test_too_large_a_tile_is_objected_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp for 64 KiB of K and of V has no registers for them."""
    target = Target.parse(name)
    monkeypatch.setattr(TARGETS[name].LAUNCHER, "tiles", {target.lanes: (Tile(1 << 20, 1 << 16, 1),)})
    report = compile_variant(Variant("move_kv", KVFormat(1, 8192, 8192, torch.bfloat16), torch.bfloat16), target)
    assert report.spills
    assert report.local_bytes
    assert [problem for problem in report.problems if "spills" in problem]


@pytest.mark.parametrize("name", TARGETS)
def test_narrow_accesses_are_objected_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few bytes for the lanes: a lane has less than a vector."""
    target = Target.parse(name)
    monkeypatch.setattr(TARGETS[name].LAUNCHER, "tiles", {target.lanes: (Tile(1 << 20, 512, 4),)})
    report = compile_variant(Variant("store_kv", FORMATS[0], torch.bfloat16), target)
    assert report.vectors is False
    assert not report.ok


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        *(("dword", 4), ("dwordx2", 8), ("dwordx4", 16), ("ubyte", 1), ("byte_d16_hi", 1), ("short_d16_hi", 2)),
        *(("ushort", 2), ("b32", 4), ("b128", 16), ("u8", 1), ("d16_u8", 1), ("d16_b16", 2), ("d16_hi_b16", 2)),
    ],
)
def test_amd_access_widths(width: str, expected: int) -> None:
    assert inspection._amd_bytes(width) == expected


def test_fused_arithmetic_is_objected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(asm={"ptx": "fma.rn.f32 %r1, %r2;\nmul.ftz.f32 %r3;", "cubin": b""})
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: "REG:8 STACK:0 SHARED:0 LOCAL:0")
    monkeypatch.setattr(inspection, "_count_instructions", lambda _: 0)
    (problem,) = inspection.read_cuda(compiled).problems
    assert "fma.rn.f32" in problem
    assert "mul.ftz.f32" in problem


def test_instructions_are_those_of_the_disassembly(tmp_path: Path) -> None:
    """NVIDIA's own, which takes as long as compiling does; NOPs at the end fill up the section."""
    compiled = cuda.LAUNCHER.compile(Variant("move_kv", FORMATS[0], torch.bfloat16), Target.parse("sm_90").triton())
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    sass = subprocess.check_output([str(tool), "-sass", str(cubin)], text=True, stderr=subprocess.DEVNULL)
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", sass, re.MULTILINE)
    while opcodes[-1] == "NOP":
        opcodes.pop()
    assert inspection._count_instructions(compiled.asm["cubin"]) == len(opcodes) > 50


def test_spirv_accesses() -> None:
    """A module with one 16-byte load, one 4-byte store to global memory, and a load of something else."""
    instructions = (
        (21, 1, 32, 0),  # %1 = OpTypeInt 32
        (23, 2, 1, 4),  # %2 = OpTypeVector %1 4
        (32, 3, 5, 2),  # %3 = OpTypePointer CrossWorkgroup %2
        (32, 4, 5, 1),  # %4 = OpTypePointer CrossWorkgroup %1
        (32, 5, 1, 2),  # %5 = OpTypePointer Input %2
        (59, 5, 6, 1),  # %6 = OpVariable %5 Input
        (55, 3, 7),  # %7 = OpFunctionParameter %3
        (124, 4, 8, 7),  # %8 = OpBitcast %4 %7
        (61, 2, 9, 7),  # %9 = OpLoad %2 %7
        (61, 2, 10, 6),  # %10 = OpLoad %2 %6
        (62, 8, 11),  # OpStore %8 %11
    )
    words = [0x07230203, 0x10400, 0, 12, 0]
    for opcode, *operands in instructions:
        words += [(len(operands) + 1) << 16 | opcode, *operands]
    loads, stores = inspection._spirv_accesses(struct.pack(f"<{len(words)}I", *words))
    assert loads == {16: 1}
    assert stores == {4: 1}


@pytest.mark.parametrize("op", [op for op in _triton.OPS if op != "cast_loc"])
def test_a_slot_of_32_bits_is_refused(op: str) -> None:
    """Wherever a slot, or an offset into a table of slots, is added to an address, when the kernel is compiled."""
    variant = next(v for v in list_variants(FORMATS) if v.op == op)
    source = cuda.LAUNCHER.source(variant, 32)
    wide = r"(row \* table_stride \+ start)" if op == "build_read" else r"(load_slots\(.*\))"
    narrow = replace(source, fn=mutations._rewrite(source.fn, wide, r"(\1).to(tl.int32)"))
    target = Target.parse("sm_90").triton()
    launch.compile_ttir(source, target)
    with pytest.raises(CompilationError) as raised:
        launch.compile_ttir(narrow, target)
    causes = [raised.value]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    assert "expected 64-bit" in str(causes[-1])


@pytest.mark.parametrize("device", [cuda, hip, xpu], ids=lambda device: device.LAUNCHER.backend)
def test_a_device_lists_no_ops_and_has_all(device: ModuleType) -> None:
    text = Path(device.__file__).read_text()
    for op, (_, run) in _triton.OPS.items():
        assert op not in text
        assert getattr(device, op).func is run
        assert getattr(device, op).args == (device.LAUNCHER,)
    with pytest.raises(AttributeError, match=f"{device.LAUNCHER.backend} has no op 'store'"):
        device.__getattr__("store")


def test_a_failed_compile_is_remembered() -> None:
    calls = []

    def broken(*args: Any) -> Any:
        calls.append(args)
        raise RuntimeError("no such instruction")

    launcher = launch.Launcher("cuda", {"patch_map": launch.Op(broken, None)}, cuda.LAUNCHER.tiles)
    errors = []
    for _ in range(2):
        with pytest.raises(NoKernel, match="RuntimeError: no such instruction") as raised:
            launcher.warm(Variant("patch_map"), torch.device("cuda", 0))
        errors.append(raised.value)
    assert errors[0] is errors[1]
    assert len(calls) == 1


def test_a_failed_load_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may have been recording a graph, or full."""
    compiled = []

    class Compiled:
        function, packed_metadata = "function", "packed"

        @property
        def run(self) -> str:
            if len(compiled) == 1:
                raise RuntimeError("operation not permitted when stream is capturing")
            return "run"

    def compile_source(*_: Any) -> Compiled:
        compiled.append(Compiled())
        return compiled[-1]

    target = Target.parse("sm_90").triton()
    active = SimpleNamespace(get_current_target=lambda: target, get_current_stream=None)
    monkeypatch.setattr(launch, "driving", lambda _: contextlib.nullcontext(active))
    monkeypatch.setattr(launch, "compile_source", compile_source)
    module = SimpleNamespace(device=lambda _: contextlib.nullcontext(), current_device=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    variant, device = Variant("patch_map"), torch.device("cuda", 0)
    source = cuda.LAUNCHER.source(variant, 32)
    launcher = launch.Launcher("cuda", {"patch_map": launch.Op(lambda *_: source, None)}, cuda.LAUNCHER.tiles)
    with pytest.raises(NoKernel, match=r"not permitted when stream is capturing; portakv\.warmup\(pool\)"):
        launcher.warm(variant, device)
    kernel = launcher.warm(variant, device)
    assert launcher.warm(variant, device) is kernel
    assert len(compiled) == 2


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(NoKernel, match="expected tensors on a cuda device, got cpu"):
        cuda.patch_map(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)))


@pytest.mark.parametrize("op", ["store_kv", "gather_kv", "store_kv_rope", "move_kv", "store_kv_flashmla"])
def test_more_rows_than_32_bits_count_are_refused(op: str) -> None:
    """Before anything is compiled; the tensors are expanded, and take no memory."""
    packed = op.endswith("flashmla")
    fmt = KVFormat(1, 448, 64, torch.float8_e4m3fn, 64, Layout.FLASHMLA) if packed else KVFormat(8, 8, 8, torch.float16)
    tokens = 2**28 + 1
    loc = torch.ones(1, dtype=torch.int32).expand(tokens)
    ones, faults = torch.ones(fmt.num_kv_heads), torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    dims = fmt.head_dim, fmt.v_head_dim
    k, v = (torch.zeros(1, fmt.num_kv_heads, n, dtype=torch.float16).expand(tokens, -1, -1) for n in dims)
    caches = [torch.zeros(2, 8, 8, dtype=torch.float16) for _ in "kv"]
    kernel = getattr(cuda, op)
    with pytest.raises(ValueError, match="expected at most 268435456 tokens of 8 rows in one launch, got 268435457"):
        match op:
            case "gather_kv":
                kernel(*caches, loc, k, v, ones, ones, faults, fmt)
            case "move_kv":
                kernel(*(x[None] for x in caches), loc, loc, faults, fmt)
            case "store_kv_rope":
                angles, positions = torch.zeros(4, 8), torch.zeros(1, dtype=torch.int32).expand(tokens)
                kernel(k, v, *caches, loc, ones, ones, angles, positions, False, faults, fmt)
            case _:
                kernel(k, v, *caches, loc, ones, ones, faults, fmt)


@pytest.mark.parametrize("current", [0, 1])
def test_launch_arguments(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches Triton's launcher: grid, stream, pointers, scalars, a None for each constexpr."""
    launched, guarded = [], []

    @contextlib.contextmanager
    def guard(index: int) -> Iterator[None]:
        guarded.append(index)
        yield

    def run(*args: Any) -> None:
        launched.append(args)

    compiled = SimpleNamespace(run=run, function="function", packed_metadata="packed")
    active = SimpleNamespace(get_current_stream=lambda i: f"stream {i}")
    monkeypatch.setattr(launch, "driving", lambda _: contextlib.nullcontext(active))
    monkeypatch.setattr(launch, "compile_source", lambda *_: compiled)
    device_module = SimpleNamespace(device=guard, current_device=lambda: current)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device_module)
    fmt = KVFormat(2, 16, 24, torch.bfloat16)
    source = cuda.LAUNCHER.source(Variant("store_kv", fmt, torch.bfloat16), 32)
    kernel = launch.Kernel(source, torch.device("cuda", 0), SM_90)
    guarded.clear()
    monkeypatch.setattr(cuda.LAUNCHER, "find", lambda *_: kernel)

    k, v = (torch.zeros(5, 2, dim, dtype=fmt.dtype) for dim in (16, 24))
    k_cache, v_cache = (torch.zeros(8, 2, dim, dtype=fmt.dtype) for dim in (16, 24))
    loc, ones, faults = torch.arange(5), torch.ones(2), torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    cuda.store_kv(k, v, k_cache, v_cache, loc, ones, ones, faults, fmt)

    (args,) = launched
    assert args[:9] == (1, 1, 1, "stream 0", "function", "packed", None, None, None)
    tensors = (k, v, k_cache, v_cache, loc, ones, ones, faults)
    named = dict(zip(source.fn.arg_names, args[9:], strict=True))
    assert list(source.tensors) == ["k", "v", "k_cache", "v_cache", "loc", "k_inv", "v_inv", "faults"]
    assert [named.pop(name) for name in source.arguments[:8]] == [t.data_ptr() for t in tensors]
    scalars = {n: x for n, x in named.items() if n not in source.constants}
    assert scalars == {
        "num_tokens": 5,
        "loc_stride": 1,
        "num_slots": 8,
        "page_size": 1,
        "k_token": 32,
        "k_head": 16,
        "v_token": 48,
        "v_head": 24,
        "k_page": 0,
        "k_slot": 32,
        "k_cache_head": 16,
        "v_page": 0,
        "v_slot": 48,
        "v_cache_head": 24,
    }
    assert all(named[name] is None for name in source.constants)
    assert guarded == ([] if current == 0 else [0])


def test_another_triton_is_launched_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled kernel without the fast protocol gets the tensors themselves, by `compiled[grid](...)`."""
    launched = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *args: launched.append((grid, args))

    active = SimpleNamespace(get_current_stream=lambda i: f"stream {i}")
    monkeypatch.setattr(launch, "driving", lambda _: contextlib.nullcontext(active))
    monkeypatch.setattr(launch, "compile_source", lambda *_: Compiled())
    device_module = SimpleNamespace(device=lambda _: contextlib.nullcontext(), current_device=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device_module)
    source = cuda.LAUNCHER.source(Variant("patch_map"), 32)
    tensors = [torch.zeros(1, dtype=torch.int64) for _ in source.tensors]
    launch.Kernel(source, torch.device("cuda", 0), SM_90)((1, 1, 1), tensors, (7, 8))
    ((grid, args),) = launched
    assert grid == (1, 1, 1)
    assert all(a is b for a, b in zip(args, tensors, strict=False))
    assert args[len(tensors) :] == (7, 8, *[None] * len(source.constants))
