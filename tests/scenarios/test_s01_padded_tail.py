"""S1: refilling a plan of fixed buffers with fewer tokens leaves no slot of the step before in the tail."""

from __future__ import annotations

import pytest
import torch

from portakv import KVWriteLoc, LayerSpec
from portakv.formats import PAD

CAPTURED = 8
LAYERS = [LayerSpec(None, 2, 16), LayerSpec(8, 2, 16), LayerSpec(16, 1, 24)]


@pytest.fixture
def pool(make_pool):
    return make_pool(LAYERS, size=64, swa_size=24)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("live", [0, 1, 3, CAPTURED])
def test_refill_resets_the_whole_tail(pool, live, dtype):
    graph = pool.graph_write_loc(CAPTURED, int32_twin=True)
    graph.fill(pool.allocator.alloc(CAPTURED))
    loc = pool.allocator.alloc(live)
    graph.fill(loc.to(dtype))
    assert graph.loc.tolist() == loc.tolist() + [PAD] * (CAPTURED - live)
    assert graph.swa_loc.tolist() == pool.full_to_swa[loc].tolist() + [PAD] * (CAPTURED - live)
    for wide, narrow in ((graph.loc, graph.int32.loc), (graph.swa_loc, graph.int32.swa_loc)):
        assert wide.dtype == torch.int64
        assert narrow.dtype == torch.int32
        assert narrow.tolist() == wide.tolist()


@pytest.mark.parametrize("twin", [False, True])
def test_junk_in_padded_rows_goes_nowhere(pool, twin):
    before, one = pool.allocator.alloc(4), pool.allocator.alloc(1)
    graph = pool.graph_write_loc(CAPTURED, int32_twin=True)
    graph.fill(before)
    for layer, spec in enumerate(LAYERS):
        k = torch.randn(CAPTURED, spec.num_kv_heads, spec.head_dim, device=pool.device)
        pool.set_kv_buffer(layer, graph, k, k)
    stored = [[x.clone() for x in pool.get_kv_buffer(i)] for i in range(len(LAYERS))]

    graph.fill(one)
    for layer, spec in enumerate(LAYERS):
        junk = torch.full((CAPTURED, spec.num_kv_heads, spec.head_dim), torch.nan, device=pool.device)
        junk[0] = 7
        pool.set_kv_buffer(layer, graph.int32 if twin else graph, junk, junk)
        target = int(one) if spec.window is None else int(pool.full_to_swa[one])
        for old, new in zip(stored[layer], pool.get_kv_buffer(layer), strict=True):
            assert (new != old).flatten(1).any(dim=1).nonzero().flatten().tolist() == [target]
            assert (new[target] == 7).all()


def test_padded_input_of_full_length_is_the_same(pool):
    """What a captured `fill` reads: a fixed device tensor, padded to the captured size."""
    loc = pool.allocator.alloc(3)
    padded = torch.zeros(CAPTURED, dtype=torch.int64, device=pool.device)
    padded[:3] = loc.to(pool.device)
    short, full = pool.graph_write_loc(CAPTURED), pool.graph_write_loc(CAPTURED)
    short.fill(loc)
    full.fill(padded)
    assert torch.equal(short.loc, full.loc)
    assert torch.equal(short.swa_loc, full.swa_loc)


def test_too_many_tokens_are_refused(pool, unchanged):
    graph = pool.graph_write_loc(CAPTURED, int32_twin=True)
    graph.fill(pool.allocator.alloc(4))
    loc = pool.allocator.alloc(CAPTURED + 1)
    with unchanged(pool, graph), pytest.raises(ValueError, match="loc: expected at most 8 slots, got 9"):
        graph.fill(loc)


def test_a_padded_swa_loc_is_cut_to_the_live_batch(pool):
    """Metadata padded for the captured size over a batch that shrank."""
    loc = pool.allocator.alloc(2)
    graph = pool.graph_write_loc(CAPTURED)
    graph.fill(loc)
    write_loc = KVWriteLoc(loc.to(pool.device), graph.swa_loc)
    assert write_loc.swa_loc.tolist() == pool.full_to_swa[loc].tolist()
    with pytest.raises(ValueError, match="swa_loc: expected at least 2 slots, got 1"):
        KVWriteLoc(loc.to(pool.device), graph.swa_loc[:1])
