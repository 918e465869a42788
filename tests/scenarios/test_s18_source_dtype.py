"""S18: rows of another dtype are converted by value or refused; bits are never taken for another dtype's."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS


def store(make_pool, dtype, x):
    pool = make_pool([LayerSpec(None, 1, x.shape[-1])], size=8, dtype=dtype)
    write_loc = pool.plan_write(pool.allocator.alloc(len(x)))
    pool.set_kv_buffer(0, write_loc, x.to(pool.device), x.to(pool.device))
    return pool, write_loc


def test_a_bf16_value_in_an_fp16_pool(make_pool):
    x = torch.full((1, 1, 8), 0.1621, dtype=torch.bfloat16)
    pool, write_loc = store(make_pool, torch.float16, x)
    k, v = pool.gather_kv(0, write_loc)
    assert k.dtype == torch.float16
    assert (k == x.to(pool.device)).all()
    assert abs(float(v[0, 0, 0]) - 0.162) < 5e-4


@pytest.mark.parametrize("source", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_every_float_into_every_float(make_pool, source, dtype):
    """To nearest even, with overflow to infinity, subnormals and signed zeros."""
    special = [0.0, -0.0, 1e-40, -6e-8, 65504.0, 65520.0, -1e30, 3.4e38, float("inf"), -float("inf")]
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]
    x = torch.cat((torch.tensor(special + ties), torch.randn(242))).to(source).reshape(1, 1, 256)
    pool, write_loc = store(make_pool, dtype, x)
    for got in pool.gather_kv(0, write_loc):
        assert torch.equal(got.cpu().view(torch.uint8), x.to(dtype).view(torch.uint8))
    for out in FLOAT_DTYPES:
        got, _ = pool.gather_kv(0, write_loc, dtype=out)
        assert torch.equal(got.cpu().view(torch.uint8), x.to(dtype).to(out).view(torch.uint8))


@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_raw_bytes_go_in_as_the_storage_dtype_only(make_pool, dtype, unchanged):
    raw = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 256)
    pool, write_loc = store(make_pool, dtype, raw.view(dtype))
    pool.set_scales(0, 3.0, 0.3)  # bytes are not scaled
    pool.set_kv_buffer(0, write_loc, raw.view(dtype).to(pool.device), raw.view(dtype).to(pool.device))
    for got in pool.gather_kv(0, write_loc):
        assert torch.equal(got.view(torch.uint8).cpu(), raw)
    raw = raw.to(pool.device)
    others = [raw, raw.view(torch.int8), *(raw.view(other) for other in FP8_DIALECTS if other != dtype)]
    for x in others:
        with unchanged(pool), pytest.raises(TypeError, match=f"k: expected a dtype of .*, got {x.dtype}"):
            pool.set_kv_buffer(0, write_loc, x, x)


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FP8_DIALECTS], ids=str)
@pytest.mark.parametrize("source", [torch.float64, torch.int8, torch.int32, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_refused(make_pool, dtype, source, unchanged):
    pool = make_pool([LayerSpec(None, 1, 8)], size=8, dtype=dtype)
    write_loc = pool.plan_write(pool.allocator.alloc(1))
    x = torch.ones(1, 1, 8, dtype=source, device=pool.device)
    with unchanged(pool), pytest.raises(TypeError, match=f"k: expected a dtype of .*, got {source}"):
        pool.set_kv_buffer(0, write_loc, x, x)
    with unchanged(pool, x), pytest.raises(TypeError, match=f"k_out: expected a dtype of .*, got {source}"):
        pool.gather_kv(0, write_loc, x, x)
    with unchanged(pool), pytest.raises(TypeError, match=f"dtype: expected one of .*, got {source}"):
        pool.gather_kv(0, write_loc, dtype=source)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz])
@pytest.mark.parametrize("check", [False, True])
def test_k_and_v_are_each_converted_on_their_own(make_pool, kept, check):
    """As under autocast, where a rope in float32 meets a projection in bfloat16."""
    pool = make_pool([LayerSpec(None, 2, 16), LayerSpec(4, 2, 16)], size=16, swa_size=16, dtype=kept, check=check)
    write_loc = pool.plan_write(pool.allocator.alloc(5))
    wide = torch.randn(5, 2, 16, device=pool.device) * 3
    for layer in range(2):
        pool.set_scales(layer, 0.5, 0.37)
        for k_dtype, v_dtype in ((torch.float32, torch.float16), (torch.bfloat16, torch.float32)):
            k, v = wide.to(k_dtype), wide.to(v_dtype)
            pool.set_kv_buffer(layer, write_loc, k, v)
            got = [x.view(torch.uint8) for x in pool.gather_kv(layer, write_loc)]
            for i, x in enumerate((k, v)):
                pool.set_kv_buffer(layer, write_loc, x, x)
                assert torch.equal(got[i], pool.gather_kv(layer, write_loc)[i].view(torch.uint8))
