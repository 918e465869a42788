"""S24: the pool owns its fp8 dialect: no view, copy, source or description takes its bytes for another's."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec, dispatch
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS, KVFormat

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
OTHERS = [(a, b) for a in FP8_DIALECTS for b in (*FP8_DIALECTS, *FLOAT_DTYPES, torch.uint8) if a != b]


@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_one_and_negative_zero_come_back(make_pool, dtype):
    pool = make_pool([LayerSpec(None, 1, 2)], size=4, dtype=dtype)
    write_loc = pool.plan_write(pool.allocator.alloc(1))
    x = torch.tensor([[[1.0, -0.0]]], device=pool.device)
    pool.set_kv_buffer(0, write_loc, x, x)
    for got in pool.gather_kv(0, write_loc, dtype=torch.float32):
        assert got.flatten().tolist() == [1.0, 0.0]
    k_cache, _ = pool.get_kv_buffer(0, dtype=dtype)
    assert k_cache.dtype == dtype


@pytest.mark.parametrize(("dtype", "other"), OTHERS, ids=str)
def test_a_view_of_another_dialect_is_refused(make_pool, dtype, other, unchanged):
    pool = make_pool([LayerSpec(None, 1, 2)], size=4, dtype=dtype)
    with unchanged(pool), pytest.raises(TypeError, match=f"dtype: expected the pool's {dtype}, got {other}"):
        pool.get_kv_buffer(0, dtype=other)


@pytest.mark.parametrize(("dtype", "other"), [(a, b) for a, b in OTHERS if b in FP8_DIALECTS], ids=str)
def test_bytes_of_another_dialect_are_refused(make_pool, dtype, other, unchanged):
    pool = make_pool([LayerSpec(None, 1, 2)], size=4, dtype=dtype)
    loc = pool.allocator.alloc(1)
    x = torch.zeros(1, 1, 2, device=pool.device).to(other)
    with unchanged(pool), pytest.raises(TypeError, match=f"k: expected a dtype of .*, got {other}"):
        pool.set_kv_buffer(0, pool.plan_write(loc), x, x)
    with unchanged(pool, x), pytest.raises(TypeError, match=f"k_out: expected a dtype of .*, got {other}"):
        pool.gather_kv(0, pool.plan_write(loc), x, x)
    with unchanged(pool), pytest.raises(TypeError, match=f"dtype: expected one of .*, got {other}"):
        pool.gather_kv(0, pool.plan_write(loc), dtype=other)

    foreign = make_pool([LayerSpec(None, 1, 2)], size=4, dtype=other)
    copy = foreign.copy_to_host(foreign.allocator.alloc(1))
    with unchanged(pool), pytest.raises(ValueError, match="copy: expected layer groups"):
        pool.load_from_host(copy)


def test_tags_tell_all_four_apart():
    assert len({KVFormat(2, 8, 8, dtype).tag for dtype in (*FP8_DIALECTS, *FLOAT_DTYPES)}) == 7


@pytest.mark.parametrize(
    ("device", "arch", "dialect"),
    [
        (dispatch.HIP, "gfx942", FNUZ),
        (dispatch.HIP, "gfx940", FNUZ),
        (dispatch.HIP, "gfx950", FN),
        (dispatch.HIP, "gfx90a", FN),
        (dispatch.HIP, "gfx1100", FN),
        (dispatch.HIP, "gfx1201", FN),
        (dispatch.CUDA, "sm_80", FN),
        (dispatch.CUDA, "sm_90", FN),
        (dispatch.XPU, "Intel(R) Data Center GPU Max 1550", FN),
        (dispatch.CPU, "x86_64", FN),
    ],
)
def test_the_default_dialect_is_the_devices_own(device, arch, dialect):
    assert device.fp8(arch) == dialect


def test_fp8_without_a_dialect_is_resolved_once(make_pool):
    pool = make_pool([LayerSpec(None, 1, 2)], size=4, dtype="fp8")
    assert pool.dtype in (FN, FNUZ)
    assert pool.get_kv_buffer(0)[0].dtype == pool.dtype
