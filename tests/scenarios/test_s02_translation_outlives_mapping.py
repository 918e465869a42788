"""S2: no translation outlives its forward: the next plan reads the live mapping, at one gather a forward."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec


@pytest.fixture
def pool(make_pool):
    return make_pool([LayerSpec(8, 2, 16)], size=32, swa_size=16)


def remap(pool, loc):
    """Another SWA slot behind `loc`: evicted, its peer given away, restored. Returns the old one."""
    old = pool.plan_write(loc).swa_loc
    pool.allocator.free_swa(loc)
    taken = pool.allocator.alloc(len(loc))
    pool.allocator.restore_swa(loc)
    assert torch.equal(pool.plan_write(taken).swa_loc, old)
    return old


def test_the_next_plan_sees_the_new_peer(pool):
    loc = pool.allocator.alloc(1)
    old = remap(pool, loc)
    new = pool.plan_write(loc).swa_loc
    assert new.tolist() == pool.full_to_swa[loc].tolist()
    assert new.tolist() != old.tolist()


def test_fixed_buffers_keep_their_addresses_and_write_the_new_row(pool):
    loc = pool.allocator.alloc(1)
    graph = pool.graph_write_loc(4, int32_twin=True)
    buffers = (graph.loc, graph.swa_loc, graph.int32.loc, graph.int32.swa_loc)
    addresses = [x.data_ptr() for x in buffers]
    graph.fill(loc)
    old = int(remap(pool, loc))
    graph.fill(loc)
    assert [x.data_ptr() for x in (graph.loc, graph.swa_loc, graph.int32.loc, graph.int32.swa_loc)] == addresses
    ones = torch.ones(4, 2, 16, device=pool.device)
    pool.set_kv_buffer(0, graph, ones, ones)
    k_cache, _ = pool.get_kv_buffer(0)
    assert k_cache.flatten(1).any(dim=1).nonzero().flatten().tolist() == pool.full_to_swa[loc].tolist()
    assert not k_cache[old].any()


def test_the_mapping_is_one_tensor_for_the_life_of_the_pool(pool):
    """A backend may keep `full_to_swa`, a captured graph its address: nothing replaces it."""
    mapping, address = pool.full_to_swa, pool.full_to_swa.data_ptr()
    loc = pool.allocator.alloc(4)
    copy = pool.copy_to_host(loc)
    pool.allocator.free_swa(loc[:2])
    with pool.allocator.group_frees():
        pool.allocator.free(loc[2:])
    pool.load_from_host(copy)
    pool.allocator.clear()
    loc = pool.load_from_host(copy)
    assert pool.full_to_swa is mapping
    assert mapping.data_ptr() == address
    assert pool.plan_write(loc).swa_loc.tolist() == mapping[loc].tolist()
    pool.check_integrity()


def test_one_translation_per_forward_however_many_layers(make_pool, launches):
    layers = 48
    pool = make_pool([LayerSpec(8, 1, 8), LayerSpec(None, 1, 8)] * (layers // 2), size=32, swa_size=16)
    loc = pool.allocator.alloc(2)
    x = torch.zeros(2, 1, 8, device=pool.device)
    launches.clear()
    write_loc = pool.plan_write(loc)
    for layer in range(layers):
        pool.set_kv_buffer(layer, write_loc, x, x)
    assert launches == {"translate_loc": 1, "store_kv": layers}


def test_one_launch_fills_all_fixed_buffers(make_pool, launches):
    pool = make_pool([LayerSpec(8, 1, 8)], size=32, swa_size=16)
    graph = pool.graph_write_loc(8, int32_twin=True)
    loc = pool.allocator.alloc(2)
    launches.clear()
    graph.fill(loc)
    assert launches == {"translate_loc": 1}
