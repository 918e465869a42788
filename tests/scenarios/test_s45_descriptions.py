"""S45: an outside layer gets each group's own geometry, and the buffers it names are the whole allocation."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from portakv import HybridKVPool, LayerSpec
from portakv.formats import FP8_DIALECTS

LAYERS = [
    LayerSpec(1024, 8, 256),
    LayerSpec(None, 4, 512),
    LayerSpec(512, 8, 256),
    LayerSpec(None, 4, 512, 128),
]


@pytest.fixture
def pool(make_pool):
    return make_pool(LAYERS, size=64, swa_size=64, page_size=16)


def test_each_group_has_its_own_geometry(pool):
    got = {
        g.layers: (g.side, g.windows, g.num_kv_heads, g.head_dim, g.v_head_dim, g.page_size, g.num_slots)
        for g in pool.describe()
    }
    assert got == {
        (0, 2): ("swa", (1024, 512), 8, 256, 256, 16, 80),
        (1,): ("full", (None,), 4, 512, 512, 16, 80),
        (3,): ("full", (None,), 4, 512, 128, 16, 80),
    }


def test_item_bytes_of_k_and_v(pool):
    got = {g.layers: (g.k_item_bytes, g.v_item_bytes) for g in pool.describe()}
    assert got == {(0, 2): (4096, 4096), (1,): (4096, 4096), (3,): (4096, 1024)}


def test_the_buffers_are_the_allocation(pool):
    spans = []
    for g in pool.describe():
        assert len(g.k_buffers) == len(g.v_buffers) == len(g.layers)
        for i, layer in enumerate(g.layers):
            for cache, item, (address, size) in zip(
                pool.get_kv_buffer(layer),
                (g.k_item_bytes, g.v_item_bytes),
                (g.k_buffers[i], g.v_buffers[i]),
                strict=True,
            ):
                assert address == cache.data_ptr()
                assert size == cache.nbytes == g.num_slots * item
                assert cache.is_contiguous()
                spans.append((address, address + size))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert sum(end - begin for begin, end in spans) == pool.kv_bytes


def test_bytes_read_by_address_are_the_rows():
    """In host memory, where a test can read them."""
    layers = [LayerSpec(None, 2, 16, 24), LayerSpec(8, 1, 8)]
    pool = HybridKVPool(layers, size=16, swa_size=16, device="cpu")
    loc = pool.allocator.alloc(4)
    for layer, spec in enumerate(pool.layers):
        k, v = (torch.randn(4, spec.num_kv_heads, d).to(pool.dtype) for d in (spec.head_dim, spec.v_dim))
        write_loc = pool.plan_write(loc)
        pool.set_kv_buffer(layer, write_loc, k, v)
        group = next(g for g in pool.describe() if layer in g.layers)
        slots = write_loc.loc if group.side == "full" else write_loc.swa_loc
        for x, item, buffers in (
            (k, group.k_item_bytes, group.k_buffers),
            (v, group.v_item_bytes, group.v_buffers),
        ):
            address = buffers[group.layers.index(layer)][0] + int(slots[2]) * item
            assert ctypes.string_at(address, item) == x[2].contiguous().view(torch.uint8).numpy().tobytes()


def test_tags_differ_where_the_bytes_do(make_pool):
    layers = [
        LayerSpec(None, 2, 16),
        LayerSpec(None, 2, 16, 24),
        LayerSpec(None, 4, 16),
        LayerSpec(None, 2, 32),
    ]
    tags = [
        g.tag
        for dtype in (torch.bfloat16, torch.float16, *FP8_DIALECTS)
        for g in make_pool(layers, size=4, dtype=dtype).describe()
    ]
    assert len(tags) == len(set(tags)) == 24


def test_a_transfer_with_another_item_size_is_refused(make_pool, unchanged):
    """Same layer count and side, other dims: the copy carries tags, so nothing is written."""
    mine = make_pool([LayerSpec(None, 4, 512)], size=16)
    theirs = make_pool([LayerSpec(None, 8, 256)], size=16)
    assert mine.describe()[0].k_item_bytes == theirs.describe()[0].k_item_bytes
    copy = theirs.copy_to_host(theirs.allocator.alloc(4))
    with unchanged(mine), pytest.raises(ValueError, match="copy: expected layer groups"):
        mine.load_from_host(copy)
