"""S17: real strides on token, head and page axes of rows and caches; only the last axis must be dense."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec
from portakv.formats import FAULT_KINDS, KVFormat

T, H, D, DV = 5, 2, 16, 24


def views(x):
    """`x [T, H, D]` in other memory orders."""
    t, h, d = x.shape
    fused = torch.zeros(t, 3 * h * d + 7, dtype=x.dtype, device=x.device)
    fused[:, : h * d] = x.flatten(1)
    wide = torch.zeros(2 * t, h, d + 3, dtype=x.dtype, device=x.device)
    wide[1::2, :, 2 : d + 2] = x
    flipped = x.flip(1).contiguous()
    return {
        "a slice of a fused QKV": fused[:, : h * d].view(t, h, d),
        "head-major": x.transpose(0, 1).contiguous().transpose(0, 1),
        "every second token, columns offset": wide[1::2, :, 2 : d + 2],
        "batch-first attention output": x.reshape(1, t, h, d).transpose(1, 2).contiguous().transpose(1, 2)[0],
        "a contiguous copy": flipped.flip(1),
    }


@pytest.fixture
def rows(backend):
    device, _ = backend
    return torch.randn(T, H, D).to(device), torch.randn(T, H, DV).to(device)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_strided_rows_store_what_contiguous_ones_do(make_pool, rows, source, dtype):
    k, v = (x.to(source) for x in rows)
    pool = make_pool([LayerSpec(None, H, D, DV)], size=16, dtype=dtype)
    write_loc = pool.plan_write(pool.allocator.alloc(T))
    pool.set_kv_buffer(0, write_loc, k, v)
    expected = [x.view(torch.uint8).clone() for x in pool.get_kv_buffer(0)]
    for (name, k_view), v_view in zip(views(k).items(), views(v).values(), strict=True):
        assert torch.equal(k_view, k)
        for cache in pool.get_kv_buffer(0):
            cache.view(torch.uint8).zero_()
        pool.set_kv_buffer(0, write_loc, k_view, v_view)
        for cache, want in zip(pool.get_kv_buffer(0), expected, strict=True):
            assert torch.equal(cache.view(torch.uint8), want), name


def test_rows_that_share_memory(make_pool, rows):
    """One row expanded over all tokens, and one KV head over all heads: strides of 0."""
    k, v = (x.to(torch.bfloat16) for x in rows)
    pool = make_pool([LayerSpec(None, H, D, DV)], size=16)
    write_loc = pool.plan_write(pool.allocator.alloc(T))
    for shape in ((1, H, D), (T, 1, D)):
        narrow = k[: shape[0], : shape[1]]
        pool.set_kv_buffer(0, write_loc, narrow.expand(T, H, D), v)
        got, _ = pool.gather_kv(0, write_loc)
        assert torch.equal(got, narrow.expand(T, H, D))


def test_gathers_write_strided_outputs(make_pool, rows):
    k, v = (x.to(torch.bfloat16) for x in rows)
    pool = make_pool([LayerSpec(None, H, D, DV)], size=16)
    write_loc = pool.plan_write(pool.allocator.alloc(T))
    pool.set_kv_buffer(0, write_loc, k, v)
    for name, k_out in views(torch.zeros_like(k)).items():
        v_out = views(torch.zeros_like(v))[name]
        pool.gather_kv(0, write_loc, k_out, v_out)
        assert torch.equal(k_out, k), name
        assert torch.equal(v_out, v), name


@pytest.mark.parametrize(
    ("size", "stride", "row"),
    [
        ((8, H, D), (2 * H * D, D, 1), lambda c, s: c[s]),  # doubled row stride: K beside V in one buffer
        ((8, H, D), (D, 8 * D, 1), lambda c, s: c[s]),  # head-major
        ((4, 2, H, D), (4 * H * D, H * D, D, 1), lambda c, s: c[s // 2, s % 2]),  # pages apart
        (
            (4, 2, H, D),
            (2 * H * D, D, 2 * D, 1),
            lambda c, s: c[s // 2, s % 2],
        ),  # heads before tokens in a page
    ],
    ids=["row stride", "head-major", "page stride", "heads first"],
)
def test_cache_views(kernel, backend, rows, size, stride, row):
    device, _ = backend
    fmt = KVFormat(H, D, D, torch.float32, page_size=2)
    k = rows[0]
    storage = torch.full((2048,), -7.0, device=device)
    caches = [storage.as_strided(size, stride, offset) for offset in (64, 1024)]
    loc = torch.tensor([3, -1, 7, 2, 0], device=device)
    one, faults = (
        torch.ones(H, device=device),
        torch.zeros(len(FAULT_KINDS), dtype=torch.int64, device=device),
    )
    kernel("store_kv")(k, k + 1, *caches, loc, one, one, faults, fmt)

    expected = torch.full((2048,), -7.0, device=device)
    for offset, x in ((64, k), (1024, k + 1)):
        for t, slot in ((0, 3), (2, 7), (3, 2)):
            row(expected.as_strided(size, stride, offset), slot)[:] = x[t]
    assert torch.equal(storage, expected)

    outs = torch.zeros_like(k), torch.zeros_like(k)
    kernel("gather_kv")(*caches, loc, *outs, one, one, faults, fmt)
    for t, slot in ((0, 3), (2, 7), (3, 2), (4, 0)):
        assert torch.equal(outs[0][t], row(caches[0], slot))
        assert torch.equal(outs[1][t], row(caches[1], slot))


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_sparse_last_axis_is_refused(make_pool, rows, unchanged, which):
    pool = make_pool([LayerSpec(None, H, D, DV)], size=16)
    write_loc = pool.plan_write(pool.allocator.alloc(T))
    sparse = {name: x.repeat_interleave(2, dim=2)[..., ::2] for name, x in zip("kv", rows, strict=True)}
    dense = dict(zip("kv", rows, strict=True))
    given = dense | {which: sparse[which]}
    with (
        unchanged(pool),
        pytest.raises(ValueError, match=f"{which}: expected a dense last axis, got strides"),
    ):
        pool.set_kv_buffer(0, write_loc, given["k"], given["v"])
    with (
        unchanged(pool, *given.values()),
        pytest.raises(ValueError, match=f"{which}_out: expected a dense last axis"),
    ):
        pool.gather_kv(0, write_loc, given["k"], given["v"])
