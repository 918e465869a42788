"""HybridKVPool: the life of a forward, mixtures of layers, sizes and accounting, copies, and checked mode."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import portakv
from portakv import (
    HybridKVPool,
    KVWriteLoc,
    LayerSpec,
    MissingSwaLoc,
    OutOfSlots,
    Rope,
    SlotFault,
    SlotOwnership,
    StaleWriteLoc,
    checks,
    dispatch,
    transfer,
)
from portakv.device import Device, Row
from portakv.formats import FAULT_KINDS, FLOAT_DTYPES, FP8_DIALECTS

PACKAGE = Path(portakv.__file__).parent
FACTS = dispatch.facts("cpu")
FULL, SWA = LayerSpec(None, 2, 8), LayerSpec(6, 2, 8)
MIXTURES = {
    "all full": [FULL, FULL],
    "all sliding": [SWA, SWA],
    "hybrid": [SWA, FULL, SWA],
    "several windows": [LayerSpec(3, 2, 8), LayerSpec(6, 2, 8), FULL, LayerSpec(5, 2, 8)],
    "other heads on sliding layers": [FULL, LayerSpec(6, 4, 16), LayerSpec(6, 1, 24, 8)],
    "V dim is not K dim": [LayerSpec(None, 3, 12, 8), LayerSpec(6, 3, 8, 12)],
    "aliases": [FULL, SWA, LayerSpec(None, 2, 8, alias_of=0), LayerSpec(4, 2, 8, alias_of=1)],
}


def rows_for(spec: LayerSpec, n: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, spec.num_kv_heads, spec.head_dim).to(dtype), torch.randn(n, spec.num_kv_heads, spec.v_dim).to(
        dtype
    )


@pytest.mark.parametrize("layers", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("swa_size", [None, 48])
def test_a_forward(layers: list[LayerSpec], page_size: int, swa_size: int | None, device: torch.device) -> None:
    """Every layer reads back what it stored, at the slots its side gave, and aliases read their producer's."""
    torch.manual_seed(0)
    pool = HybridKVPool(
        layers, size=96, swa_size=swa_size, page_size=page_size, dtype=torch.float32, device=device, check=True
    )
    pool.allocator.alloc(7)
    loc = pool.allocator.alloc(20)
    write_loc = pool.plan_write(loc)
    stored = {}
    for i, spec in enumerate(layers):
        if spec.alias_of is None:
            stored[i] = rows_for(spec, 20)
            pool.set_kv_buffer(i, write_loc, *(x.to(device) for x in stored[i]))
    for i, spec in enumerate(layers):
        owner = i if spec.alias_of is None else spec.alias_of
        k_cache, v_cache = pool.get_kv_buffer(i)
        assert k_cache is pool.get_kv_buffer(owner)[0]
        side = swa_size is not None and spec.window is not None
        slots = write_loc.swa_loc if side else write_loc.loc
        assert k_cache.shape[0] == (pool.swa_size if side else pool.size) + page_size
        for cache, rows in zip((k_cache, v_cache), stored[owner], strict=True):
            assert torch.equal(cache[slots].cpu(), rows)
            others = torch.ones(len(cache), dtype=torch.bool)
            others[slots.cpu()] = False
            assert not cache.cpu()[others].any()
        for got, rows in zip(pool.gather_kv(i, write_loc), stored[owner], strict=True):
            assert torch.equal(got.cpu(), rows)
    assert not any(pool.faults().values())
    pool.check_integrity()
    pool.allocator.free(loc)
    pool.check_integrity()


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, *FP8_DIALECTS], ids=str)
def test_bytes_are_what_was_allocated(dtype: torch.dtype) -> None:
    for layers, swa_size in itertools.product(MIXTURES.values(), (None, 64)):
        pool = HybridKVPool(layers, size=128, swa_size=swa_size, page_size=4, dtype=dtype)
        buffers = {x.data_ptr(): x.nbytes for i in range(len(layers)) for x in pool.get_kv_buffer(i)}
        assert pool.kv_bytes == sum(buffers.values())
        described = [size for g in pool.describe() for _, size in (*g.k_buffers, *g.v_buffers)]
        assert pool.kv_bytes == sum(described)


@pytest.mark.parametrize("page_size", [1, 16])
def test_overhead_per_slot(page_size: int) -> None:
    size = 200_000
    pool = HybridKVPool([FULL, SWA], size=size, swa_size=size, page_size=page_size)
    assert pool.nbytes - pool.kv_bytes <= 40 * size


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("swa_ratio", [None, 0.1, 0.5, 1.0])
def test_fit_uses_the_budget(page_size: int, swa_ratio: float | None) -> None:
    layers = [FULL, SWA, LayerSpec(6, 1, 16)]
    budget = 3_000_000
    pool = HybridKVPool.fit(layers, budget, swa_ratio=swa_ratio, page_size=page_size)
    assert pool.nbytes <= budget
    larger = pool.size + page_size
    swa_size = None if swa_ratio is None else int(larger * swa_ratio)
    assert HybridKVPool(layers, size=larger, swa_size=swa_size, page_size=page_size).nbytes > budget
    if swa_ratio is not None:
        assert pool.swa_size == int(pool.size * swa_ratio) // page_size * page_size


def test_fit_refuses() -> None:
    with pytest.raises(ValueError, match="budget: expected at least"):
        HybridKVPool.fit([FULL], 100)
    for ratio in (0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="swa_ratio"):
            HybridKVPool.fit([FULL, SWA], 10**6, swa_ratio=ratio)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
def test_plan_write_in_both_widths(index_dtype: torch.dtype, loc_dtype: torch.dtype, device: torch.device) -> None:
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=32, device=device)
    loc = torch.cat([torch.tensor([-1, 0]), pool.allocator.alloc(4), pool.allocator.alloc(2, swa_tail=0)])
    expected = pool.plan_write(loc)
    plan = pool.plan_write(loc.to(loc_dtype), index_dtype)
    for got, want in ((plan.loc, expected.loc), (plan.swa_loc, expected.swa_loc)):
        assert got.dtype == index_dtype
        assert torch.equal(got.long(), want)
    assert expected.swa_loc.tolist() == [-1, 0, *pool.full_to_swa[loc[2:6]].tolist(), 0, 0]
    cast = pool.cast_write_loc(expected)
    assert cast.loc.dtype == cast.swa_loc.dtype == torch.int32
    assert torch.equal(cast.swa_loc.long(), expected.swa_loc)


def test_write_loc_rules() -> None:
    loc = torch.tensor([4, 5])
    assert len(KVWriteLoc(loc, torch.tensor([1, 2, 3])).swa_loc) == 2
    with pytest.raises(ValueError, match="swa_loc: expected at least 2 slots, got 1"):
        KVWriteLoc(loc, loc[:1])
    for bad in (loc.float(), [4, 5]):
        with pytest.raises(TypeError, match="loc: expected an int32 or int64 tensor"):
            KVWriteLoc(bad)
    with pytest.raises(ValueError, match="1-D"):
        KVWriteLoc(loc.view(1, 2))
    with pytest.raises(ValueError, match="swa_loc: expected a tensor on cpu"):
        KVWriteLoc(loc, torch.empty(2, dtype=torch.int64, device="meta"))
    columns = KVWriteLoc(torch.arange(6), torch.arange(6) + 10)[2:4]
    assert columns.loc.tolist() == [2, 3]
    assert columns.swa_loc.tolist() == [12, 13]
    with pytest.raises(AttributeError):
        columns.loc = loc


def test_graph_write_loc(device: torch.device) -> None:
    """Fixed addresses, the whole tail reset, int32 copies, and a refusal that writes nothing."""
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=32, device=device)
    graph = pool.graph_write_loc(8, int32_twin=True)
    buffers = (graph.loc, graph.swa_loc, graph.int32.loc, graph.int32.swa_loc)
    addresses = [x.data_ptr() for x in buffers]
    long, short = pool.allocator.alloc(6), pool.allocator.alloc(2)
    for loc in (long, short, short.int(), long[:0]):
        graph.fill(loc)
        swa = pool.full_to_swa[loc.long().to(device)].tolist()
        tail = [0] * (8 - len(loc))
        assert graph.loc.tolist() == graph.int32.loc.tolist() == loc.tolist() + tail
        assert graph.swa_loc.tolist() == graph.int32.swa_loc.tolist() == swa + tail
    assert [x.data_ptr() for x in buffers] == addresses
    graph.fill(long)
    before = [x.clone() for x in buffers]
    with pytest.raises(ValueError, match="at most 8 slots, got 9"):
        graph.fill(torch.arange(9))
    assert all(map(torch.equal, buffers, before))
    k, v = (x.to(device) for x in rows_for(FULL, 8))
    pool.set_kv_buffer(0, graph, k, v)
    assert torch.equal(pool.get_kv_buffer(0)[0][long.to(device)], k[:6].to(pool.dtype))
    pool.set_kv_buffer(1, graph[2:4], k[2:4], v[2:4])
    pool.check_integrity()


def test_missing_swa_loc() -> None:
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=32)
    loc = pool.allocator.alloc(3)
    k, v = rows_for(SWA, 3)
    pool.set_kv_buffer(0, KVWriteLoc(loc), k, v)
    with pytest.raises(MissingSwaLoc, match="layer 1"):
        pool.set_kv_buffer(1, KVWriteLoc(loc), k, v)


def test_checked_mode_raises_before_it_writes(device: torch.device) -> None:
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=32, device=device, check=True)
    loc = pool.allocator.alloc(3)
    stale = pool.plan_write(loc)
    pool.allocator.free_swa(loc[1:2])
    k, v = (x.to(device) for x in rows_for(FULL, 3))
    twice = loc.clone()
    twice[2] = twice[0]
    past = loc.clone()
    past[1] = 65
    for error, message, layer, write_loc in (
        (StaleWriteLoc, f"slot {loc[1]} was translated to 2, the mapping says 0 now", 1, stale),
        (SlotFault, f"slot {loc[0]} twice", 0, KVWriteLoc(twice.to(device), twice.to(device))),
        (SlotFault, r"loc\[1\]: expected a slot below 65, got 65", 0, KVWriteLoc(past.to(device), past.to(device))),
    ):
        with pytest.raises(error, match=message):
            pool.set_kv_buffer(layer, write_loc, k, v)
    with pytest.raises(SlotFault, match="got 65"):
        pool.plan_write(past)
    for layer, num_rows in ((0, 65), (1, 33)):  # each side has its own
        last, over = (KVWriteLoc(*[torch.tensor([slot], device=device)] * 2) for slot in (num_rows - 1, num_rows))
        pool.gather_kv(layer, last)
        for call in (pool.gather_kv, lambda *at: pool.set_kv_buffer(*at, k[:1], v[:1])):
            with pytest.raises(SlotFault, match=f"expected a slot below {num_rows}, got {num_rows}"):
                call(layer, over)
    assert not any(x.any() for i in (0, 1) for x in pool.get_kv_buffer(i))
    assert not any(pool.faults().values())
    padded = KVWriteLoc(torch.tensor([0, 0, -1, -1]).to(device), torch.tensor([0, 0, -1, -1]).to(device))
    pool.set_kv_buffer(0, padded, k[:1].expand(4, -1, -1), v[:1].expand(4, -1, -1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_checked_pool_of_one_side_checks_what_it_plans(dtype: torch.dtype, device: torch.device) -> None:
    """Nothing is translated there, so that the plan itself has to look; in graphs' buffers `translate_loc` is run."""
    pool = HybridKVPool([FULL, SWA], size=64, page_size=4, device=device, check=True)
    buffers = pool.graph_write_loc(4)
    for plan in (lambda loc: pool.plan_write(loc, dtype), buffers.fill):
        plan(torch.tensor([67, 0, -1], dtype=dtype))
        with pytest.raises(SlotFault, match=r"loc\[1\]: expected a slot below 68, got 68"):
            plan(torch.tensor([4, 68, -1], dtype=dtype))
        with pytest.raises(SlotFault, match=r"loc\[0\]: expected a slot below 68, got 68"):
            plan(torch.tensor([68], dtype=dtype, device=device))
    assert buffers.loc.tolist() == [67, 0, -1, 0]
    assert not any(pool.faults().values())


def test_faults_are_counted_and_named(device: torch.device) -> None:
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=32, device=device, check=False)
    write_loc = pool.plan_write(torch.tensor([65, 1000, -1]))
    k, v = (x.to(device) for x in rows_for(FULL, 3))
    pool.set_kv_buffer(0, write_loc, k, v)
    pool.gather_kv(0, write_loc)
    assert pool.faults() == dict.fromkeys(FAULT_KINDS, 0) | {"translate_loc": 2, "store_kv": 2, "gather_kv": 2}
    assert not pool.get_kv_buffer(0)[0].any()
    pool.faults(clear=True)
    assert not any(pool.faults().values())


@pytest.mark.parametrize("page_size", [1, 4])
def test_move(page_size: int, device: torch.device) -> None:
    """A rotation of live slots, on both sides, as if every source were read first."""
    layers = MIXTURES["other heads on sliding layers"]
    pool = HybridKVPool(layers, size=64, swa_size=48, page_size=page_size, dtype=torch.float32, device=device)
    loc = pool.allocator.alloc(12)
    write_loc = pool.plan_write(loc)
    stored = [rows_for(spec, 12) for spec in layers]
    for i, rows in enumerate(stored):
        pool.set_kv_buffer(i, write_loc, *(x.to(device) for x in rows))
    pool.move_kv_cache(loc.roll(5), loc)
    for i, rows in enumerate(stored):
        for got, want in zip(pool.gather_kv(i, write_loc), rows, strict=True):
            assert torch.equal(got.cpu(), want.roll(-5, 0))
    with pytest.raises(ValueError, match="src: expected 2 slots"):
        pool.move_kv_cache(loc[:2], loc[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_host_copy_round_trip(page_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """The bytes come back to other slots; what had left the window stays gone and takes no SWA slot."""
    layers = 2 * MIXTURES["other heads on sliding layers"]
    pool = HybridKVPool(layers, size=64, swa_size=48, page_size=page_size, dtype=dtype, device=device)
    pool.allocator.alloc(page_size, swa_tail=0)  # so that no slot equals its peer
    loc = pool.allocator.alloc(14)
    for i, spec in enumerate(layers):
        pool.set_kv_buffer(i, pool.plan_write(loc), *(x.to(device) for x in rows_for(spec, 14, torch.bfloat16)))
    pool.allocator.free_swa(loc[:8])
    before = [[x.cpu() for x in pool.gather_kv(i, pool.plan_write(loc))] for i in range(len(layers))]
    copy = pool.copy_to_host(loc)
    assert copy.live.tolist() == [False] * 8 + [True] * 6
    blocker = pool.allocator.alloc(3)
    pool.allocator.free(loc)
    for group in pool.groups:
        for buffer in group.buffers:
            buffer[:, page_size:] = 0xA5  # the same slots may come back, but not with what they held
    free = pool.allocator.available("swa")
    new = pool.load_from_host(copy)
    assert free - pool.allocator.available("swa") == -(-6 // page_size) * page_size
    write_loc = pool.plan_write(new)
    assert (write_loc.swa_loc.cpu() > 0).tolist() == copy.live.tolist()
    for i, rows in enumerate(before):
        for got, want in zip(pool.gather_kv(i, write_loc), rows, strict=True):
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
    pool.allocator.free(torch.cat([new, blocker]))
    pool.check_integrity()


def test_host_copy_refusals() -> None:
    pool = HybridKVPool([FULL, SWA], size=16, swa_size=16, page_size=4)
    loc = pool.allocator.alloc(8)
    copy = pool.copy_to_host(loc)
    with pytest.raises(SlotOwnership):
        pool.copy_to_host(loc + 8)
    other = HybridKVPool([FULL, LayerSpec(6, 2, 16)], size=16, swa_size=16, page_size=4)
    with pytest.raises(ValueError, match="copy: expected layer groups"):
        other.load_from_host(copy)
    blocker = pool.allocator.alloc(4)
    pool.allocator.alloc(4, swa_tail=0)
    mapping = pool.allocator.mapping.copy()
    with pytest.raises(OutOfSlots) as full:
        pool.load_from_host(copy)
    assert full.value.side == "full"
    pool.allocator.free(blocker)
    pool.allocator.free(loc)
    taken = pool.allocator.alloc(12)
    pool.allocator.free(taken)
    pool.check_integrity()
    assert not np.array_equal(mapping, pool.allocator.mapping)


def test_host_copy_without_room_on_the_swa_side() -> None:
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=16)
    loc = pool.allocator.alloc(10)
    copy = pool.copy_to_host(loc)
    free = pool.allocator.available("full"), pool.allocator.available("swa")
    with pytest.raises(OutOfSlots) as error:
        pool.load_from_host(copy)
    assert (error.value.side, error.value.short) == ("swa", 4)
    assert free == (pool.allocator.available("full"), pool.allocator.available("swa"))
    pool.check_integrity()


def test_a_host_copy_knows_its_scales(device: torch.device) -> None:
    """The same bytes under another scale are other numbers."""
    layers, fp8 = [FULL, SWA], torch.float8_e4m3fn
    pool, other = (HybridKVPool(layers, size=16, swa_size=16, dtype=fp8, device=device) for _ in range(2))
    pool.set_scales(1, 4.0, torch.tensor([2.0, 0.5]))
    loc = pool.allocator.alloc(3)
    copy = pool.copy_to_host(loc)
    for k_scale, v_scale in ((None, None), (4.0, 2.0), (2.0, torch.tensor([2.0, 0.5]))):
        other.set_scales(1, k_scale, v_scale)
        with pytest.raises(ValueError, match=r"copy.scales: expected those of layers \(1,\)"):
            other.load_from_host(copy)
        other.check_integrity()
        assert other.allocator.available() == 16
    for wrong in ((), copy.scales[:1], tuple(x[:1] for x in copy.scales), tuple(x.double() for x in copy.scales)):
        with pytest.raises(ValueError, match=r"copy.scales: expected tensors of "):
            other.load_from_host(dataclasses.replace(copy, scales=wrong))
    other.set_scales(1, 4.0, torch.tensor([2.0, 0.5]))
    assert len(other.load_from_host(copy)) == 3
    assert copy.nbytes == sum(x.nbytes for x in (*copy.keys, *copy.values, *copy.scales))
    floats = HybridKVPool(layers, size=16, swa_size=16, device=device)
    copy = floats.copy_to_host(floats.allocator.alloc(3))
    floats.set_scales(0, 4.0)  # of no use to floats, and no hindrance
    floats.load_from_host(copy)
    for group, described in zip(pool.groups, pool.describe(), strict=True):
        assert described.scales == (group.scales.data_ptr(), 2 * len(group.layers) * FULL.num_kv_heads * 4)
    assert {described.scales for described in floats.describe()} == {None}


@pytest.mark.parametrize("at", ["restore_swa", "_plan", "load_from_host"])
def test_a_host_copy_that_cannot_be_stored_leaves_no_slots(
    at: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HybridKVPool([FULL, SWA], size=16, swa_size=16, device=device)
    copy = pool.copy_to_host(pool.allocator.alloc(3))

    def no_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("of the device")

    monkeypatch.setattr({"restore_swa": pool.allocator, "_plan": pool, "load_from_host": transfer}[at], at, no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pool.load_from_host(copy)
    assert pool.allocator.available("full") == pool.allocator.available("swa") == 13
    pool.check_integrity()


def test_a_host_copy_through_one_layer_of_a_devices_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a device apart, with memory for a layer at a time: here it is the host's."""
    pool = HybridKVPool([FULL, SWA, FULL, SWA], size=16, swa_size=16, dtype=torch.float8_e5m2, device=device)
    loc = pool.allocator.alloc(5)
    for layer_id in range(4):
        pool.set_kv_buffer(layer_id, pool.plan_write(loc), *(x.to(device) for x in rows_for(FULL, 5)))
    want = pool.copy_to_host(loc)
    monkeypatch.setattr(transfer.devices, "shares_host_memory", lambda _: False)
    got = pool.copy_to_host(loc)
    for mine, theirs in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
        assert mine.view(torch.uint8).any()
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_scales(device: torch.device) -> None:
    """Per tensor and per head; read back times the scale; the inputs stay as they were."""
    pool = HybridKVPool([FULL], size=16, dtype=torch.float8_e4m3fn, device=device)
    loc = pool.plan_write(pool.allocator.alloc(4))
    k, v = (x.to(device) for x in rows_for(FULL, 4))
    kept = k.clone(), v.clone()
    pool.set_scales(0, torch.tensor([0.5, 4.0]), 2.0)
    pool.set_kv_buffer(0, loc, k, v)
    got_k, got_v = pool.gather_kv(0, loc, dtype=torch.float32)
    assert torch.equal(k, kept[0])
    assert torch.equal(v, kept[1])
    raw_k, raw_v = (x.view(torch.uint8)[loc.loc].view(x.dtype).float() for x in pool.get_kv_buffer(0))
    assert torch.equal(got_k, raw_k * torch.tensor([0.5, 4.0], device=device)[:, None])
    assert torch.equal(got_v, raw_v * 2)
    torch.testing.assert_close(got_k, k, rtol=0.07, atol=0.02)
    with pytest.raises(ValueError, match="k_scale: expected 1 value or 2"):
        pool.set_scales(0, torch.ones(3))


def test_kernels_argument_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HybridKVPool([FULL], size=8, device="cpu", kernels={"store_kv": "reference"})
    assert pool.kernels["store_kv"] == "reference"
    monkeypatch.setenv("PORTAKV_CHECK", "1")
    assert HybridKVPool([FULL], size=8).check
    monkeypatch.setenv("PORTAKV_CHECK", "yes")
    with pytest.raises(ValueError, match="PORTAKV_CHECK"):
        HybridKVPool([FULL], size=8)
    assert not HybridKVPool([FULL], size=8, check=False).check


def test_kernels_names_what_serves_the_pools_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that comes first but cannot store the pool's dtype is not the one in use."""
    refuses = lambda fmt, num_rows: None if fmt.dtype is torch.bfloat16 else "too wide"  # noqa: E731
    picky = Row("picky", "portakv.kernels.reference.rows:{op}", "this test", refuses=refuses)
    device = Device(name="toy", torch_type="cpu", count=lambda: 1, rows=(picky,))
    for dtype, name in ((torch.bfloat16, "picky"), (torch.float8_e5m2, "reference")):
        assert HybridKVPool([FULL], size=8, dtype=dtype, device=device).kernels["store_kv"] == name


@pytest.mark.parametrize(
    ("layout", "options", "unused"),
    [
        ("rows", {}, "store_kv_packed"),
        ("rows", {}, "gather_kv_flashmla"),
        ("cpu_vec", {}, "store_kv"),
        ("cpu_amx", {}, "move_kv"),
        ("cpu_amx", {}, "store_kv_rope"),
        ("flashmla", {"dtype": torch.float8_e4m3fn}, "store_kv_rope"),
        ("flashmla", {"dtype": torch.float8_e4m3fn}, "gather_kv_packed"),
    ],
)
def test_rows_of_ops_that_a_pool_does_not_run_are_refused(
    layout: str, options: dict[str, Any], unused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the process they are a preference."""
    layer = LayerSpec(None, 1, 448, 64, mla=True) if layout == "flashmla" else LayerSpec(None, 2, 64)
    build = functools.partial(HybridKVPool, [layer], size=64, page_size=32, layout=layout, device="cpu", **options)
    pool = build(kernels={"translate_loc": "reference"})
    assert dict.fromkeys(pool.kernels, "reference") == build(kernels=dict.fromkeys(pool.kernels, "reference")).kernels
    assert unused not in pool.kernels
    with monkeypatch.context() as patch:
        patch.setattr("portakv.device.zeros", lambda *_: pytest.fail("allocated"))
        with pytest.raises(
            ValueError, match=f"kernels: expected ops that this pool runs, .*'build_read', .*'{unused}'"
        ):
            build(kernels={"translate_loc": "reference", unused: "reference"})
    monkeypatch.setenv("PORTAKV_KERNELS", f"{unused}=reference")
    assert build().kernels == build(kernels={}).kernels


def test_a_cpu_pool_beside_another_device() -> None:
    """A pool's kernels follow its tensors: meta stands for any device without kernels of its own."""
    other = HybridKVPool([FULL, SWA], size=8, swa_size=8, device="meta")
    assert set(other.kernels.values()) == {"reference"}
    assert set(HybridKVPool([FULL], size=8, device="cpu").kernels.values()) == {"native"}
    assert other.get_kv_buffer(1)[0].device.type == "meta"


@pytest.mark.parametrize("where", ["device", "meta"])
def test_a_dropped_pool_gives_its_memory_back_at_once(device, where):
    """No reference cycle: the caches go with the last reference, not with the next run of the garbage collector."""
    target = device if where == "device" else torch.device("meta")
    gc.disable()
    try:
        pool = HybridKVPool([SWA, FULL], size=32, swa_size=32, device=target)
        loc = pool.allocator.alloc(4)
        if where == "device":
            pool.plan_read(loc[None].to(target), torch.tensor([0]), torch.tensor([4]))
            pool.graph_write_loc(4).fill(loc)
        pool.graph_read_plan(2, 8)
        left = [weakref.ref(x) for x in (pool, pool.allocator, pool.full_to_swa, *pool.groups[0].buffers)]
        del pool
        assert [ref() for ref in left] == [None] * len(left)
    finally:
        gc.enable()


def no_window_pools(page_size: int, size: int = 96, swa_size: int = 48, window: int = 9) -> list[HybridKVPool]:
    """One pool with a layer of `window`, and one without, as the next rank of a pipeline may be."""
    options = {"size": size, "swa_size": swa_size, "page_size": page_size, "device": "cpu"}
    ranks = [HybridKVPool([FULL, LayerSpec(window, 2, 8)], **options)]
    ranks.append(HybridKVPool([FULL], swa_window=window, **options))
    return ranks


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_rank_without_windows_hands_out_the_same_slots(page_size: int) -> None:
    """10,000 random calls of every kind on two allocators, among them refused ones: every answer is the same."""
    ranks = no_window_pools(page_size)
    assert [pool.window for pool in ranks] == [9, 9]
    assert [group.side for group in ranks[1].groups] == ["full"]
    allocators = [pool.allocator for pool in ranks]
    rng, calls = np.random.default_rng(page_size), 0
    sequences: dict[int, torch.Tensor] = {}
    evicted: dict[int, int] = {}
    answers: dict[str, set[str]] = {}

    def both(name: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        results = []
        for allocator in allocators:
            try:
                results.append(getattr(allocator, name)(*args, **kwargs))
            except (OutOfSlots, SlotOwnership) as error:
                results.append(f"{type(error).__name__}: {error}")
        one, other = results
        assert type(one) is type(other)
        assert np.array_equal(one, other), name
        answers.setdefault(name, set()).add(type(one).__name__)
        return None if isinstance(one, str) else one

    while calls < 10_000:
        op, key = rng.integers(10), int(rng.choice([*sequences, -1]))
        if key < 0 or op == 0:
            key, n = calls, int(rng.integers(1, 30))
            slots = both("alloc", n, swa_tail=[None, 0, 9][rng.integers(3)])
            if slots is not None:
                sequences[key], evicted[key] = slots, 0
            continue
        slots = sequences[key]
        n = len(slots)
        if op in (1, 2):
            more = int(rng.integers(1, 9))
            got = both("alloc_extend", [n], [n + more], [slots[-1]])
        elif op in (3, 4):
            got = both("alloc_decode", [n + 1], [slots[-1]])
        else:
            got = None
        if got is not None:
            sequences[key] = torch.cat((slots, got))
        elif op == 5:
            table, query = slots[None], int(rng.integers(0, n + 1))
            cursors = both("evict_swa", table, [0], [evicted[key]], [query])
            if cursors is not None:
                evicted[key] = int(cursors[0])
        elif op == 6:
            both("restore_swa", slots)
        elif op == 7:
            both("free_swa", slots[: int(rng.integers(0, n + 1))])
        elif op == 8 and n > 1:
            kept = int(rng.integers(1, n))
            both("rewind", slots[kept:])
            sequences[key], evicted[key] = slots[:kept], min(evicted[key], kept // page_size * page_size)
        elif op == 9:
            both("free", slots)
            del sequences[key], evicted[key]
        assert np.array_equal(allocators[0].mapping, allocators[1].mapping)
    assert [a.available("swa") for a in allocators] == [allocators[0].available("swa")] * 2
    assert {"Tensor", "str"} <= answers["alloc"] & answers["alloc_extend"] & answers["restore_swa"]
    assert "ndarray" in answers["evict_swa"]
    for pool in ranks:
        pool.check_integrity()


def test_a_fitted_pool_without_windows_has_one_side() -> None:
    """An SWA side that no layer needs would run out first: 724 slots of it, beside 7276 full ones."""
    full = [LayerSpec(None, 2, 16)]
    for ratio in (0.1, 0.5, 1.0, 1):
        pool = HybridKVPool.fit(full, 1_000_000, swa_ratio=ratio, page_size=4, device="cpu")
        assert (pool.swa_size, pool.window, pool.allocator.swa_size) == (None, None, 0)
        assert len(pool.allocator.alloc(pool.size)) == pool.size
        assert pool.size == HybridKVPool.fit(full, 1_000_000, page_size=4, device="cpu").size
    # An alias has its producer's storage, and a window of its own only where that has one.
    shared = [*full, LayerSpec(None, 2, 16, alias_of=0)]
    assert HybridKVPool.fit(shared, 1_000_000, swa_ratio=0.1, device="cpu").swa_size is None
    windowed = HybridKVPool.fit([*full, LayerSpec(8, 2, 16)], 1_000_000, swa_ratio=0.1, page_size=4, device="cpu")
    assert windowed.swa_size


def test_a_fitted_rank_without_windows_keeps_the_side_it_asks_for() -> None:
    full, budget = [LayerSpec(None, 2, 16)], 1_000_000
    pool = HybridKVPool.fit(full, budget, swa_ratio=0.25, swa_window=8, page_size=4, device="cpu")
    assert (pool.window, pool.swa_size) == (8, pool.size // 4 // 4 * 4)
    assert pool.nbytes <= budget
    assert [group.side for group in pool.groups] == ["full"]
    assert pool.kv_bytes == (pool.size + 4) * 2 * 2 * 16 * 2
    bigger = HybridKVPool(full, size=pool.size + 4, swa_size=pool.swa_size + 4, page_size=4, device="cpu")
    assert bigger.nbytes > budget
    # Ranks agree on the smallest sizes.
    peer = HybridKVPool.fit([LayerSpec(8, 2, 16)] * 3, budget, swa_ratio=0.25, page_size=4, device="cpu")
    sizes = {"size": min(pool.size, peer.size), "swa_size": min(pool.swa_size, peer.swa_size)}
    ranks = [HybridKVPool(full, swa_window=8, page_size=4, device="cpu", **sizes) for _ in range(2)]
    assert ranks[0].allocator.available("swa") == sizes["swa_size"]


def test_the_side_keeps_the_wider_of_both_windows() -> None:
    options = {"size": 64, "swa_size": 32, "device": "cpu"}
    for given, kept in ((None, 6), (3, 6), (6, 6), (11, 11)):
        pool = HybridKVPool([FULL, SWA], swa_window=given, **options)
        assert (pool.window, pool.allocator.window) == (kept, kept)
        assert pool.layers[1].window == 6
        loc = pool.allocator.alloc(20)
        pool.allocator.evict_swa(loc[None], [0], [0], [20])
        assert pool.allocator.is_live(loc).tolist() == [p > 20 - kept for p in range(20)]
    # A target whose draft looks further back, and one without windows.
    wide = LayerSpec(11, 2, 8)
    for layers in ([FULL, SWA], [FULL]):
        target = HybridKVPool(layers, swa_window=11, **options)
        draft = HybridKVPool([wide], slots_of=target, **options)
        assert draft.allocator is target.allocator
        with pytest.raises(ValueError, match="swa_window: expected windows the shared slots keep, at most 11, got 12"):
            HybridKVPool([wide], slots_of=target, swa_window=12, **options)
        narrow = HybridKVPool(layers, swa_window=10, **options)
        with pytest.raises(ValueError, match="layers: expected windows the shared slots keep, at most 10, got 11"):
            HybridKVPool([wide], slots_of=narrow, **options)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        *((x, TypeError, "swa_window: expected an int, got") for x in (True, 2.0, "8", torch.tensor(8.0))),
        (0, ValueError, "swa_window: expected at least 1, got 0"),
        (-3, ValueError, "swa_window: expected at least 1, got -3"),
        (2**63, ValueError, "swa_window: expected at most"),
        (40, ValueError, "swa_size: expected at least 41 slots"),
    ],
)
def test_what_is_no_window_of_an_swa_side(window: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HybridKVPool([FULL, SWA], size=64, swa_size=32, swa_window=window, device="cpu")
    with pytest.raises(error, match=message.partition(",")[0] if window != 40 else "swa_size: expected"):
        HybridKVPool.fit([FULL], 10_000, swa_ratio=0.1, swa_window=window, device="cpu")


def test_a_window_needs_a_side() -> None:
    with pytest.raises(ValueError, match="swa_window: expected None without swa_size, got 8"):
        HybridKVPool([FULL, SWA], size=64, swa_window=8, device="cpu")
    with pytest.raises(ValueError, match="swa_window: expected None without swa_ratio, got 8"):
        HybridKVPool.fit([FULL, SWA], 100_000, swa_window=8, device="cpu")


@pytest.mark.parametrize("kernels", [None, {"gather_kv": "reference"}], ids=["chosen", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["float", "fp8"])
def test_rows_of_a_batch_are_gathered_where_heads_lie_together(
    device: torch.device, dtype: torch.dtype, kernels: dict[str, str] | None
) -> None:
    layers = [LayerSpec(None, 3, 16, 24), LayerSpec(8, 3, 16, 24)]
    pool = HybridKVPool(layers, size=64, swa_size=64, dtype=dtype, device=device, kernels=kernels)
    write_loc = pool.plan_write(pool.allocator.alloc(12))
    for layer in range(2):
        k, v = (torch.randn(12, 3, dim, device=device) for dim in (16, 24))
        pool.set_kv_buffer(layer, write_loc, k, v)
        want = pool.gather_kv(layer, write_loc, dtype=torch.float32)
        for batch in (1, 3, 12):
            out = [torch.empty(batch, 3, 12 // batch, dim, device=device) for dim in (16, 24)]
            pool.gather_kv(layer, write_loc, *(x.transpose(1, 2) for x in out))
            for x, rows in zip(out, want, strict=True):
                assert torch.equal(x.transpose(1, 2).reshape(rows.shape), rows)
                assert torch.equal(x.view(batch * 3, -1, x.shape[3])[-1], rows[-(12 // batch) :, 2])
        for shapes in (((4, 4), (4, 4)), ((3, 4), (4, 3))):
            outs = [torch.empty(*lead, 3, dim, device=device) for lead, dim in zip(shapes, (16, 24), strict=True)]
            with pytest.raises(ValueError, match="out: expected shape"):
                pool.gather_kv(layer, write_loc, *outs)
        with pytest.raises(ValueError, match="k: expected shape"):
            pool.set_kv_buffer(layer, write_loc, k.view(3, 4, 3, 16), v.view(3, 4, 3, 24))


def frames(call: Callable[[], Any]) -> list[str]:
    """The functions of portakv that a call goes through."""
    seen: list[str] = []

    def look(frame: Any, event: str, arg: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.skipif(
    dispatch.select("store_kv", FACTS).row.name != "native", reason="the reference has frames of its own"
)
@pytest.mark.parametrize(("check", "rotates", "most"), [(False, False, 2), (False, True, 4), (True, False, 8)])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_store_is_few_frames(check: bool, rotates: bool, most: int, layer: int) -> None:
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=32, device="cpu", check=check)
    write_loc = pool.plan_write(pool.allocator.alloc(3))
    rows = torch.ones(3, FULL.num_kv_heads, FULL.head_dim)
    rope = Rope(torch.ones(4, FULL.head_dim), torch.arange(3)) if rotates else None
    assert len(frames(lambda: pool.set_kv_buffer(layer, write_loc, rows, rows.clone(), rope))) <= most


def test_checked_mode_reads_each_slot_tensor_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HybridKVPool([FULL, SWA], size=64, swa_size=32, device="cpu", check=True)
    loc = pool.allocator.alloc(6)
    rows = torch.ones(3, FULL.num_kv_heads, FULL.head_dim)
    seen: list[int] = []
    read_back = checks.read_back
    monkeypatch.setattr(checks, "read_back", lambda *slots: seen.append(len(slots)) or read_back(*slots))
    write_loc = pool.plan_write(loc[:3])
    calls: list[tuple[Callable[[], Any], list[int]]] = [
        (lambda: pool.plan_write(loc[:3]), [1]),
        (lambda: pool.set_kv_buffer(0, write_loc, rows, rows), [1]),
        (lambda: pool.set_kv_buffer(1, write_loc, rows, rows), [2]),
        (lambda: pool.gather_kv(1, write_loc), [1]),
        (lambda: pool.move_kv_cache(loc[3:], loc[:3]), [2]),
        (lambda: pool.load_from_host(pool.copy_to_host(loc[:3]), loc[3:]), []),  # its allocator has read them
    ]
    for call, expected in calls:
        seen.clear()
        call()
        assert seen == expected
