"""S41: where a layer's KV lies says nothing about its window: one side gives what two give."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec, Structure
from portakv.integrations.transformers import PortaKVCache

LAYERS = [
    LayerSpec(8, 2, 8),
    LayerSpec(8, 2, 8),
    LayerSpec(4, 1, 8),
    LayerSpec(None, 2, 8),
    LayerSpec(None, 1, 8),
]
WINDOWS = [8, 8, 4, None, None]


@pytest.mark.parametrize("swa_size", [None, 32])
def test_layers_and_descriptions_keep_their_windows(make_pool, swa_size):
    pool = make_pool(LAYERS, size=64, swa_size=swa_size)
    assert [spec.window for spec in pool.layers] == WINDOWS
    described = {i: window for g in pool.describe() for i, window in zip(g.layers, g.windows, strict=True)}
    assert [described[i] for i in range(len(LAYERS))] == WINDOWS
    assert {g.side for g in pool.describe()} == ({"full"} if swa_size is None else {"full", "swa"})


def test_one_side_keeps_everything(make_pool):
    """Nothing may be evicted for a window where global layers share the slots."""
    pool = make_pool(LAYERS, size=64)
    assert pool.window is None
    slots = pool.allocator.alloc(40)
    with pytest.raises(ValueError, match="window"):
        pool.allocator.evict_swa(slots[None], [0], [0], [40])
    x = torch.randn(40, 2, 8, device=pool.device)
    write_loc = pool.plan_write(slots)
    assert write_loc.swa_loc is None
    for layer in (0, 3):
        pool.set_kv_buffer(layer, write_loc, x, x)
        assert torch.equal(pool.gather_kv(layer, write_loc)[0], x.to(pool.dtype))


def test_both_layouts_return_the_same_keys(make_pool):
    generator = torch.Generator().manual_seed(0)
    caches = [PortaKVCache(make_pool(LAYERS, size=64, swa_size=size, dtype=torch.float32)) for size in (None, 32)]
    for n in [5, 1, 1, 7, *[1] * 20]:
        for layer, spec in enumerate(LAYERS):
            x = torch.randn(1, spec.num_kv_heads, n, 8, generator=generator)
            one, hybrid = (cache.update(x.to(cache.pool.device), -x.to(cache.pool.device), layer) for cache in caches)
            for a, b in zip(one, hybrid, strict=True):
                assert torch.equal(a, b)
    assert [cache.pool.allocator.available("full") for cache in caches] == [64 - 34] * 2


@pytest.mark.parametrize("structure", Structure)
def test_both_layouts_read_the_same_positions(make_pool, structure):
    """A global layer reads all of it, whatever its slots are shared with; the slots differ in side alone."""
    lens, plans = torch.tensor([20]), []
    for swa_size in (None, 32):
        pool = make_pool(LAYERS, size=64, swa_size=swa_size)
        slots = pool.allocator.alloc(20)
        plan = pool.plan_read(slots[None].to(pool.device), torch.tensor([0]), lens, structure=structure)
        assert [plan.for_layer(i).lens.tolist() for i in range(5)] == [[min(20, w or 20)] for w in WINDOWS]
        plans.append([(read.window, read.starts.tolist(), read.lens.tolist()) for read in plan.structures])
    assert plans[0] == plans[1]
