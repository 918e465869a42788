"""S7: no write path reaches a reserved row, so what padding reads stays finite."""

from __future__ import annotations

import pytest
import torch

from portakv import IntegrityError, KVWriteLoc, LayerSpec
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS

LAYERS = [LayerSpec(None, 2, 24, 16), LayerSpec(8, 1, 16, 24)]
DTYPES = [*FLOAT_DTYPES, *FP8_DIALECTS]


def assert_reserved_rows_are_zero(pool):
    for layer in range(len(pool.layers)):
        for cache in pool.get_kv_buffer(layer):
            assert not cache[: pool.page_size].contiguous().view(torch.uint8).any()
    pool.check_integrity()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, None], ids=["float32", "bfloat16", "same dtype"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_store_of_nan_to_reserved_slots(make_pool, dtype, source, page):
    pool = make_pool(LAYERS, size=16, swa_size=16, page_size=page, dtype=dtype)
    slots = torch.arange(-1, page, device=pool.device)
    for width in (torch.int32, torch.int64):
        for layer, spec in enumerate(LAYERS):
            k, v = (
                torch.full((len(slots), spec.num_kv_heads, dim), torch.nan).to(source or dtype).to(pool.device)
                for dim in (spec.head_dim, spec.v_dim)
            )
            loc = slots.to(width)
            pool.set_kv_buffer(layer, KVWriteLoc(loc, loc), k, v)
    assert_reserved_rows_are_zero(pool)
    assert not any(pool.faults().values())


@pytest.mark.parametrize("page", [1, 4])
def test_a_move_to_reserved_slots(make_pool, page):
    pool = make_pool(LAYERS, size=16, swa_size=16, page_size=page)
    loc = pool.allocator.alloc(page)
    for layer, spec in enumerate(LAYERS):
        k, v = (
            torch.full((page, spec.num_kv_heads, d), torch.nan, device=pool.device) for d in (spec.head_dim, spec.v_dim)
        )
        pool.set_kv_buffer(layer, pool.plan_write(loc), k, v)
    pool.move_kv_cache(torch.arange(page), loc)
    assert_reserved_rows_are_zero(pool)


@pytest.mark.parametrize("page", [1, 4])
def test_rows_whose_swa_side_is_gone(make_pool, page):
    """Stores, moves and loads of tokens without a peer: their SWA slot is PAD."""
    pool = make_pool(LAYERS, size=32, swa_size=16, page_size=page)
    loc = pool.allocator.alloc(8)
    pool.allocator.free_swa(loc[:4])
    for layer, spec in enumerate(LAYERS):
        k, v = (
            torch.full((8, spec.num_kv_heads, d), torch.nan, device=pool.device) for d in (spec.head_dim, spec.v_dim)
        )
        pool.set_kv_buffer(layer, pool.plan_write(loc), k, v)
    pool.move_kv_cache(loc[:4], loc[4:])
    pool.load_from_host(pool.copy_to_host(loc))
    assert_reserved_rows_are_zero(pool)


def test_integrity_check_sees_a_written_reserved_row(make_pool):
    pool = make_pool(LAYERS, size=16, swa_size=16, page_size=4)
    for layer in range(2):
        for cache in pool.get_kv_buffer(layer):
            cache[3, 0, 1] = 1
            with pytest.raises(IntegrityError, match=rf"a reserved row of layers \({layer},\) was written"):
                pool.check_integrity()
            cache[3, 0, 1] = 0
    pool.check_integrity()
