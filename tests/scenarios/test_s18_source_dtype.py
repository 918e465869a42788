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


def test_k_and_v_share_a_dtype(make_pool, unchanged):
    pool = make_pool([LayerSpec(None, 1, 8)], size=8)
    write_loc = pool.plan_write(pool.allocator.alloc(1))
    x = torch.ones(1, 1, 8, device=pool.device)
    with (
        unchanged(pool),
        pytest.raises(TypeError, match=r"v: expected torch\.float32 as k, got torch\.float16"),
    ):
        pool.set_kv_buffer(0, write_loc, x, x.half())
