"""S38: W tokens are visible, the current one among them: exact at lengths W - 1, W and W + 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from portakv import CONSUMERS, HybridKVPool, LayerSpec

W = 8


def live_positions(allocator, slots):
    return np.flatnonzero(allocator.is_live(slots)).tolist()


@pytest.mark.parametrize("query", [0, 1, W - 1, W, W + 1, 2 * W, 23])
def test_what_the_next_query_sees_is_retained(query):
    """A query at p sees keys at positions > p - W: before it, those below p are kept and nothing else."""
    pool = HybridKVPool([LayerSpec(W, 1, 8)], size=32, swa_size=32, device="cpu")
    slots = pool.allocator.alloc(24)
    (cursor,) = pool.allocator.evict_swa(slots[None], [0], [0], [query])
    assert cursor == max(0, query - W + 1)
    assert live_positions(pool.allocator, slots) == list(range(cursor, 24))


@pytest.mark.parametrize("prefill", [1, 3, 6, W - 1, W, W + 1])
@pytest.mark.parametrize("page", [1, 4])
def test_a_decode_keeps_w_minus_one_and_the_rest_of_their_page(prefill, page):
    pool = HybridKVPool([LayerSpec(W, 1, 8)], size=64, swa_size=16 + page, page_size=page, device="cpu")
    a, row = pool.allocator, torch.full((1, 64), -1, dtype=torch.int64)
    row[0, :prefill] = a.alloc(prefill)
    cursor = [0]
    for p in range(prefill, 40):
        cursor = a.evict_swa(row, [0], cursor, [p])
        first = max(0, p - W + 1) // page * page
        assert live_positions(a, row[0, :p]) == list(range(first, p))
        row[0, p : p + 1] = a.alloc_decode([p + 1], row[0, p - 1 : p])
        seen = a.is_live(row[0, max(0, p - W + 1) : p + 1])
        assert seen.all()
        assert len(seen) == min(p + 1, W)


@pytest.mark.parametrize("p", [W - 1, W, W + 1, 20])
def test_a_prefix_is_reusable_with_w_minus_one_live_keys(p):
    """The request that goes on at position p needs p - W + 1 … p - 1, and not one more."""
    for missing, reusable in ((1, True), (0, False)):
        pool = HybridKVPool([LayerSpec(W, 1, 8)], size=32, swa_size=32, device="cpu")
        slots = pool.allocator.alloc(p)
        oldest_needed = max(0, p - W + 1)
        dead = slots[: oldest_needed + 1 - missing]
        pool.allocator.free_swa(dead)
        assert (pool.allocator.reusable_prefix(slots) == p) is reusable


@pytest.mark.parametrize(
    "chunks", [[6] + [1] * 20, [3] + [1] * 20, [W] * 3, [W - 1, 2, W + 1, 1, 1], [20, 1, 1]], ids=str
)
@pytest.mark.parametrize("page", [1, 4])
def test_the_cache_returns_the_window_in_order(chunks, page):
    """Keys that say their position: a layer returns the last W - 1 before the chunk, then the chunk."""
    from portakv.integrations.transformers import PortaKVCache

    layers = [LayerSpec(None, 1, 4), LayerSpec(W, 1, 4), LayerSpec(2 * W, 1, 4)]
    pool = HybridKVPool(layers, size=64, swa_size=64, page_size=page, dtype=torch.float32, device="cpu")
    cache, seen = PortaKVCache(pool), 0
    for n in chunks:
        positions = torch.arange(seen, seen + n, dtype=torch.float32)
        x = positions[None, None, :, None].repeat(1, 1, 1, 4)
        for layer, spec in enumerate(layers):
            before = seen if spec.window is None else min(seen, spec.window - 1)
            for got in cache.update(x, x, layer):
                assert got[0, 0, :, 0].tolist() == list(range(seen - before, seen + n))
        seen += n
    pool.check_integrity()


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("tokens", [1, 3, 6, W - 1, W, W + 1, 2 * W, 23])
def test_a_decode_reads_exactly_the_window(tokens, consumer):
    """After 8 tokens the last query sees all 8, after 9 the last 8 of them: flash attention's 7 to the left."""
    pool = HybridKVPool([LayerSpec(W, 1, 8)], size=32, swa_size=32, device="cpu")
    slots = pool.allocator.alloc(tokens)
    plan = pool.plan_read(slots[None], torch.tensor([0]), torch.tensor([tokens]), consumer=consumer)
    read, seen = plan.for_layer(0), min(tokens, W)
    assert (read.starts.tolist(), read.lens.tolist()) == ([tokens - seen], [seen])
    assert read.indices.flatten()[:seen].tolist() == pool.full_to_swa[slots[tokens - seen :]].tolist()
