"""What the Triton kernels compile to, read without their hardware; how a kernel is cached and launched.

Nothing here runs on a GPU: these checks say what a compiler made of a kernel, not that the kernel is right.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from portakv.errors import NoKernel
from portakv.formats import FAULT_KINDS, KVFormat, Variant, list_variants
from portakv.kernels import cuda, hip
from portakv.kernels._triton import launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

TARGETS = {
    "sm_80": (cuda, GPUTarget("cuda", 80, 32)),
    "sm_90": (cuda, GPUTarget("cuda", 90, 32)),
    "gfx942": (hip, GPUTarget("hip", "gfx942", 64)),
    "gfx1100": (hip, GPUTarget("hip", "gfx1100", 32)),
}
FORMATS = (
    KVFormat(8, 128, 128, torch.bfloat16),
    KVFormat(6, 192, 128, torch.float8_e4m3fn, page_size=16),
)
VARIANTS = [v for v in list_variants(FORMATS) if v.fmt is None or v.index_dtype == torch.int64]
VARIANTS.append(Variant("store_kv", FORMATS[0], torch.bfloat16, torch.int32))
SLOT_ARGUMENTS = ("loc", "tgt", "src", "slots")


@pytest.fixture(scope="module", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile afresh, and leave no kernel in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("name", TARGETS)
def test_compiled_code(name: str, tmp_path: Path) -> None:
    module, target = TARGETS[name]
    for variant in VARIANTS:
        compiled = module.LAUNCHER.compile(variant, target)
        check_slot_arithmetic(compiled.asm["ttir"])
        if target.backend == "cuda":
            check_cuda(compiled, variant, tmp_path / "kernel.cubin")
        else:
            check_hip(compiled, variant, target.warp_size)


def check_cuda(compiled: Any, variant: Variant, cubin: Path) -> None:
    cubin.write_bytes(compiled.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.check_output([str(cuobjdump), "-res-usage", str(cubin)], text=True)
    assert {"STACK:0", "LOCAL:0"} <= set(usage.split()), (variant, usage)
    assert compiled.metadata.shared == 0, variant
    assert not re.search(r"\b(div|fma)\.", "".join(re.findall(r".*\.f32.*", compiled.asm["ptx"]))), variant
    if moves_vectors(variant):
        assert "ld.global.v4.b32" in compiled.asm["ptx"], variant
        assert set(re.findall(r"\bst\.global\S*", compiled.asm["ptx"])) == {"st.global.v4.b32"}, variant


def check_hip(compiled: Any, variant: Variant, wave: int) -> None:
    code = compiled.asm["amdgcn"]
    facts = dict(re.findall(r"\.(\w+(?:_spill_count|_segment_fixed_size|wavefront_size)):\s+(\d+)", code))
    facts |= dict(re.findall(r"\.(wavefront_size):\s+(\d+)", code))
    assert facts == {
        "vgpr_spill_count": "0",
        "sgpr_spill_count": "0",
        "private_segment_fixed_size": "0",
        "group_segment_fixed_size": "0",
        "wavefront_size": str(wave),
    }, variant
    if moves_vectors(variant):
        assert re.search(r"\bglobal_load_(dwordx4|b128)\b", code), variant
        assert set(re.findall(r"\bglobal_store_(\w+)", code)) <= {"dwordx4", "b128"}, variant


def moves_vectors(variant: Variant) -> bool:
    """A row mover of one dtype, with aligned rows of at least 256 bytes."""
    return variant.fmt is not None and variant.dtype == variant.fmt.dtype and variant.alignment == 16


def check_slot_arithmetic(ttir: str) -> None:
    """Every pointer offset that derives from a slot is 64-bit, and was at no point narrower on its way."""
    from_slots = {f"%{name}" for name in SLOT_ARGUMENTS}
    pointers, narrowed, open_ifs = set(from_slots), set(), []
    slots: set[str] = set()
    offsets = 0
    for line in ttir.splitlines():
        line = line.split(" loc(")[0]
        names, _, body = line.partition(" = ") if re.match(r"\s*%[\w:]+ = ", line) else ("", "", line)
        result = names.strip().split(":")[0]
        used = set(re.findall(r"%\w+", body))
        if "scf.if" in body:
            open_ifs.append(result)
        if "scf.yield" in body and open_ifs:
            result = open_ifs[-1]
        if re.match(r"\s*}\s*$", line) and open_ifs:
            open_ifs.pop()
        if "tt.addptr" in body:
            offset = re.findall(r"%\w+", body)[1]
            if offset in slots:
                offsets += 1
                assert offset not in narrowed, line
                assert re.search(r"i64>?\s*$", line), line
            if used & pointers:
                pointers.add(result)
        elif "tt.load" in body:
            if re.findall(r"%\w+", body)[0] in pointers:
                slots.add(result)
        elif used & pointers:
            pointers.add(result)
        elif used & slots:
            slots.add(result)
            if used & narrowed or "arith.trunci" in body:
                narrowed.add(result)
    writes_rows_or_map = "%mapping" in ttir or "ptr<i8>" in ttir
    assert offsets or not writes_rows_or_map, "no pointer was found to derive from a slot"


@triton.jit
def _narrow(out, loc, stride):
    slot = tl.load(loc + tl.arange(0, 16))
    tl.store(out + slot * stride, slot)


@triton.jit
def _widened_late(out, loc, stride):
    slot = tl.load(loc + tl.arange(0, 16))
    tl.store(out + (slot.to(tl.int32) * 8).to(tl.int64) * stride, slot)


@pytest.mark.parametrize(("kernel", "width"), [(_narrow, "i32"), (_widened_late, "i64")])
def test_checker_objects_to_32_bit_offsets(kernel: Any, width: str) -> None:
    source = ASTSource(kernel, {"out": f"*{width}", "loc": f"*{width}", "stride": width})
    ttir = triton.compile(source, target=TARGETS["sm_90"][1]).asm["ttir"] + "ptr<i8>"
    with pytest.raises(AssertionError):
        check_slot_arithmetic(ttir)


def test_a_failed_compile_is_remembered() -> None:
    calls = []

    def broken(*args: Any) -> Any:
        calls.append(args)
        raise RuntimeError("no such instruction")

    launcher = launch.Launcher("cuda", {"patch_map": broken}, cuda.TILES)
    errors = []
    for _ in range(2):
        with pytest.raises(NoKernel, match="RuntimeError: no such instruction") as raised:
            launcher.warm(Variant("patch_map"), torch.device("cuda", 0))
        errors.append(raised.value)
    assert errors[0] is errors[1]
    assert len(calls) == 1


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(NoKernel, match="expected tensors on a cuda device, got cpu"):
        cuda.patch_map(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)))


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
    target = TARGETS["sm_90"][1]
    active = SimpleNamespace(get_current_target=lambda: target, get_current_stream=lambda i: f"stream {i}")
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "compile_source", lambda *_: compiled)
    device_module = SimpleNamespace(device=guard, current_device=lambda: current)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device_module)
    fmt = KVFormat(2, 16, 24, torch.bfloat16)
    source = cuda.LAUNCHER.source(Variant("store_kv", fmt, torch.bfloat16), 32)
    kernel = launch.Kernel(source, torch.device("cuda", 0))
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
    assert [named[name] for name in source.tensors] == [t.data_ptr() for t in tensors]
    scalars = {n: x for n, x in named.items() if n not in source.tensors and n not in source.constants}
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
