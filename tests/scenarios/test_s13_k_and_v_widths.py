"""S13: K and V of different width: every row in its place, its neighbours as they were."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec

SHAPES = [(4, 192, 128), (4, 128, 192), (1, 576, 512), (3, 40, 8)]


def raw(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 8], ids=["full", "swa"])
def test_rows_land_in_their_slots_only(make_pool, window, shape, dtype):
    heads, k_dim, v_dim = shape
    pool = make_pool([LayerSpec(window, heads, k_dim, v_dim)], size=96, swa_size=64, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    held = pool.allocator.alloc(64)
    loc = held[torch.randperm(64, generator=generator)[:21]]
    k, v = (torch.randn(21, heads, dim, generator=generator).to(dtype).to(pool.device) for dim in (k_dim, v_dim))
    expected = []
    for cache, rows in zip(pool.get_kv_buffer(0), (k, v), strict=True):
        cache.view(torch.uint8)[pool.page_size :] = 0x2A
        image = cache.view(torch.uint8).clone()
        image[loc if window is None else pool.full_to_swa[loc]] = raw(rows)
        expected.append(image)

    write_loc = pool.plan_write(loc)
    pool.set_kv_buffer(0, write_loc, k, v)
    for cache, image in zip(pool.get_kv_buffer(0), expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), image)
    for got, want in zip(pool.gather_kv(0, write_loc), (k, v), strict=True):
        assert torch.equal(raw(got), raw(want))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_moves_and_host_copies_keep_both_widths(make_pool, shape):
    heads, k_dim, v_dim = shape
    pool = make_pool([LayerSpec(None, heads, k_dim, v_dim), LayerSpec(8, heads, v_dim, k_dim)], size=64, swa_size=64)
    loc = pool.allocator.alloc(16)
    rows = [
        [torch.randn(16, heads, d, device=pool.device).to(pool.dtype) for d in dims]
        for dims in ((k_dim, v_dim), (v_dim, k_dim))
    ]
    for layer in (0, 1):
        pool.set_kv_buffer(layer, pool.plan_write(loc), *rows[layer])
    target = pool.allocator.alloc(16)
    pool.move_kv_cache(target, loc.flip(0))
    restored = pool.load_from_host(pool.copy_to_host(target))
    for layer in (0, 1):
        for got, want in zip(pool.gather_kv(layer, pool.plan_write(restored)), rows[layer], strict=True):
            assert torch.equal(got, want.flip(0))


def test_item_bytes_are_told_apart(make_pool):
    pool = make_pool([LayerSpec(None, 4, 192, 128)], size=64)
    (group,) = pool.describe()
    assert (group.k_item_bytes, group.v_item_bytes) == (4 * 192 * 2, 4 * 128 * 2)
