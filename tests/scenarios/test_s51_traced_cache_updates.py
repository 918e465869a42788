"""S51: a compiled decode step writes the cache in place, equals eager, and is compiled twice at most."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import scaled_dot_product_attention

from portakv import HybridKVPool, LayerSpec
from portakv import device as devices

WINDOW = 8
HEADS = [LayerSpec(None, 2, 16, 24), LayerSpec(WINDOW, 2, 16, 24)]
FP8 = torch.float8_e4m3fn


def mla(latent, rope):
    return [LayerSpec(window, 1, latent, rope, mla=True) for window in (None, WINDOW)]


POOLS = [
    pytest.param(HEADS, torch.bfloat16, "rows", id="rows"),
    pytest.param(HEADS, FP8, "rows", id="fp8"),
    pytest.param(mla(32, 16), torch.bfloat16, "rows", id="mla"),
    pytest.param(mla(32, 16), FP8, "rows", id="mla-fp8"),
    pytest.param(mla(448, 64), FP8, "flashmla", id="flashmla"),
    pytest.param(mla(512, 64), FP8, "flashmla_v32", id="flashmla_v32"),
]
SIZES = {"size": 96, "swa_size": 52}
"""97 and 53 rows with the reserved one: numbers that no other shape of these tests has."""


def decode(pool, loc, reads, k, v, q):
    """One token through all layers: stored, read back with what came before, in place too, and attended to."""
    write_loc = pool.plan_write(loc)
    out = []
    for layer, spec in enumerate(pool.layers):
        pool.set_kv_buffer(layer, write_loc, k + layer, v - layer)
        keys, values = pool.gather_kv(layer, reads[layer % 2], dtype=k.dtype)
        slots = write_loc.loc if spec.window is None else write_loc.swa_loc
        out += [keys, values, *(indexable(x)[slots] for x in pool.get_kv_buffer(layer))]
        if not spec.mla:
            heads = (x.transpose(0, 1)[None] for x in (q, keys, values))
            out.append(scaled_dot_product_attention(*heads))
    return out


def indexable(cache):
    """A cache, or its bytes where torch may lack the op for fp8."""
    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


class Sequence:
    """A sequence of a pool: its slots, and what its next step takes."""

    def __init__(self, pool, tokens):
        self.pool, self.slots = pool, pool.allocator.alloc(tokens)

    def step(self, seed):
        """Arguments of `decode`; full layers read everything, the others the window."""
        pool, spec = self.pool, self.pool.layers[0]
        loc = pool.allocator.alloc(1)
        self.slots = torch.cat((self.slots, loc))
        read = pool.plan_write(self.slots)
        numbers = torch.Generator().manual_seed(seed)
        k, v, q = (
            torch.randn(1, spec.num_kv_heads, dim, generator=numbers).bfloat16().to(pool.device)
            for dim in (spec.head_dim, spec.v_dim, spec.head_dim)
        )
        return pool, loc.to(pool.device), (read, read[-WINDOW:]), k, v, q


def same_bytes(one, other):
    return one.faults() == other.faults() and all(
        torch.equal(a, b)
        for mine, theirs in zip(one.groups, other.groups, strict=True)
        for a, b in zip(mine.buffers, theirs.buffers, strict=True)
    )


@pytest.mark.parametrize(("layers", "dtype", "layout"), POOLS)
@torch.no_grad()
def test_compiled_decode_equals_eager(make_pool, backend, layers, dtype, layout):
    torch._dynamo.reset()
    # Inductor takes long; what it makes of the other layouts is read below.
    inductor = backend[1] != "reference" and layers is HEADS
    counter = CompileCounterWithBackend("inductor" if inductor else "aot_eager")
    compiled = torch.compile(decode, fullgraph=True, backend=counter)
    one, other = (make_pool(layers * 2, dtype=dtype, layout=layout, **SIZES) for _ in range(2))
    for pool in (one, other):
        pool.set_scales(0, 0.5, torch.tensor([2.0, 0.25])[: pool.layers[0].num_kv_heads])
    eager, traced = Sequence(one, WINDOW + 1), Sequence(other, WINDOW + 1)
    for seed in range(20):
        want, got = decode(*eager.step(seed)), compiled(*traced.step(seed))
        for a, b in zip(want, got, strict=True):
            if a.dim() == 3:
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b)
        assert same_bytes(one, other)
    assert counter.frame_count <= 2


@torch.no_grad()
def test_locations_of_captured_graphs_are_filled_in_the_step(make_pool):
    torch._dynamo.reset()

    def step(pool, graph, loc, k, v):
        graph.fill(loc)
        for layer in (0, 1):
            pool.set_kv_buffer(layer, graph, k, v)
            pool.set_kv_buffer(layer + 2, graph.int32[:2], k[:2], v[:2])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    pools = [make_pool(HEADS * 2, **SIZES) for _ in range(2)]
    graphs = [pool.graph_write_loc(4, int32_twin=True) for pool in pools]
    for tokens in (4, 3, 2, 4):
        k, v = torch.randn(4, 2, 16), torch.randn(4, 2, 24)
        for pool, graph, run in zip(pools, graphs, (step, compiled), strict=True):
            run(pool, graph, pool.allocator.alloc(tokens).to(pool.device), k.to(pool.device), v.to(pool.device))
        assert same_bytes(*pools)
        assert graphs[0].loc.tolist() == graphs[1].loc.tolist() != [0] * 4
    assert counter.frame_count <= 2


@pytest.mark.parametrize("fixed", [False, True], ids=["made", "filled"])
def test_a_read_plan_is_traced_with_lengths_on_a_device_only(make_pool, monkeypatch, fixed):
    torch._dynamo.reset()
    pool = make_pool(HEADS, **SIZES)
    table = pool.allocator.alloc(12)[None].to(pool.device)
    rows, lens = torch.zeros(1, dtype=torch.int64), torch.tensor([11])
    plan = pool.graph_read_plan(1, 12, consumer="triton") if fixed else None

    def step(table, rows, lens):
        return [x.indices + 0 for x in pool.plan_read(table, rows, lens, consumer="triton", out=plan).structures]

    want = step(table, rows, lens)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="plan_read looks at lengths that are on the host"):
        compiled(table, rows, lens)
    monkeypatch.setattr(devices, "shares_host_memory", lambda device: False)
    for got, slots in zip(compiled(table, rows.to(pool.device), lens.to(pool.device)), want, strict=True):
        assert torch.equal(got[: len(slots)], slots)
        assert not got[len(slots) :].any()


def buffers_of_a_cache(step, *args):
    """Lines of Inductor's program that allocate something with as many rows as a cache has."""
    torch._dynamo.reset()
    _, codes = run_and_get_code(torch.compile(step, fullgraph=True), *args)
    assert any("portakv.store_kv" in code for code in codes)
    lines = [line for code in codes for line in code.splitlines() if "empty_strided" in line and " = " in line]
    return [line for line in lines if "(97," in line or "(53," in line]


@pytest.mark.parametrize(("layers", "dtype", "layout"), POOLS)
@torch.no_grad()
def test_no_cache_is_cloned(layers, dtype, layout):
    pool = HybridKVPool(layers, dtype=dtype, layout=layout, **SIZES)
    args = Sequence(pool, WINDOW + 1).step(0)
    assert buffers_of_a_cache(decode, *args) == []


@torch.no_grad()
def test_a_clone_of_a_cache_would_be_seen():
    def cloning(pool, *args):
        before = pool.get_kv_buffer(0)[0].clone()
        decode(pool, *args)
        return before

    assert buffers_of_a_cache(cloning, *Sequence(HybridKVPool(HEADS, **SIZES), WINDOW + 1).step(0))
