"""S28: fp8 pools where the hardware has no fp8: what a row needs is data, and ours need nothing."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec, NoKernel, dispatch
from portakv.device import DeviceFacts, Package
from portakv.dispatch import Request, select
from portakv.formats import FP8_DIALECTS, KVFormat
from portakv.kernels.reference import rows as reference

TRITON = {"triton": Package("3.6.0")}
OLD = [
    DeviceFacts(dispatch.CUDA, "sm_70", "V100", packages=TRITON),
    DeviceFacts(dispatch.CUDA, "sm_80", "A100", packages=TRITON),
    DeviceFacts(dispatch.CUDA, "sm_86", "RTX 3090", packages=TRITON),
    DeviceFacts(dispatch.HIP, "gfx90a", "MI250X", packages=TRITON),
    DeviceFacts(dispatch.HIP, "gfx1100", "RX 7900", packages=TRITON),
    DeviceFacts(dispatch.XPU, "PVC", "PVC", packages=TRITON),
]


@pytest.mark.parametrize("found", OLD, ids=lambda found: found.arch)
@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
@pytest.mark.parametrize("op", [op for op in dispatch.OPS if not op.endswith("_packed")])
def test_integer_arithmetic_needs_no_capability(op, dtype, found):
    selection = select(op, found, Request(KVFormat(8, 128, 128, dtype)))
    assert selection.row.name == "triton"
    assert {row.name: why for row, why in selection.rejected}["reference"] == "triton comes first"


@pytest.mark.parametrize("found", OLD, ids=lambda found: found.arch)
def test_without_the_compiler_the_reason_is_told_at_construction(found):
    bare = DeviceFacts(found.device, found.arch, found.name)
    selection = select("store_kv", bare, Request(KVFormat(8, 128, 128, torch.float8_e4m3fn)))
    assert selection.row.name == "reference"
    rejected = {row.name: why for row, why in selection.rejected}
    assert rejected.pop("triton") == "not installed"
    assert set(rejected) <= {"ipex"}  # the one row that needs more than integers: it is refused by dtype
    assert all("float8_e4m3fn" in why for why in rejected.values())
    with pytest.raises(NoKernel, match=rf"no kernel for store_kv on .*{found.arch}:\n  triton: not installed"):
        select("store_kv", bare, Request(wanted="triton"))


@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_the_bits_are_the_references_with_or_without_native_fp8(make_pool, dtype):
    """All 65,536 bf16 inputs."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(128, 4, 128)
    pool = make_pool([LayerSpec(None, 4, 128)], size=128, dtype=dtype)
    pool.set_scales(0, torch.tensor([1.0, 0.3, 7.0, 2.0**-100]), 3.0)
    write_loc = pool.plan_write(pool.allocator.alloc(128))
    pool.set_kv_buffer(0, write_loc, every.to(pool.device), every.to(pool.device))
    k, v = pool.gather_kv(0, write_loc)
    for got, scale in ((k, torch.tensor([1.0, 0.3, 7.0, 2.0**-100])), (v, torch.full((4,), 3.0))):
        want = reference.quantise(every, FP8_DIALECTS[dtype], 1 / scale)
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
