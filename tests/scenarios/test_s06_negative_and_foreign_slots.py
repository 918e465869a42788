"""S6: a negative slot is skipped, one past the last row is skipped and counted, or raises in checked mode."""

from __future__ import annotations

import functools

import pytest
import torch

from portakv import KVWriteLoc, LayerSpec, SlotFault, SlotOwnership
from portakv import device as devices
from portakv.formats import FAULT_KINDS

LAYERS = [LayerSpec(None, 2, 16), LayerSpec(8, 2, 16)]
SIZE, SWA = 16, 12


@pytest.fixture(params=[1, 4], ids="page{}".format)
def page(request):
    return request.param


def filled(make_pool, page, **options):
    pool = make_pool(LAYERS, size=SIZE, swa_size=SWA, page_size=page, **options)
    for group in pool.groups:
        for cache in (group.k_caches, group.v_caches):
            cache[:, page:] = torch.randn_like(cache[:, page:])
    return pool


def locations(pool, slots, dtype=torch.int64):
    loc = torch.tensor(slots, dtype=dtype, device=pool.device)
    return KVWriteLoc(loc, loc)


def changed_rows(pool, layer, before):
    rows = {len(before[0])}
    for old, new in zip(before, pool.get_kv_buffer(layer), strict=True):
        rows |= set((new != old).flatten(1).any(dim=1).nonzero().flatten().tolist())
    return sorted(rows - {len(before[0])})


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("negative", [-1, -4, -(2**31), -(2**62)])
def test_a_negative_slot_is_skipped(make_pool, page, layer, negative):
    dtype = torch.int64 if negative < -(2**31) else torch.int32
    pool = filled(make_pool, page)
    before = [x.clone() for x in pool.get_kv_buffer(layer)]
    x = torch.full((3, 2, 16), 9.0, device=pool.device)
    where = locations(pool, [negative, 5, negative], dtype)
    pool.set_kv_buffer(layer, where, x, x)
    assert changed_rows(pool, layer, before) == [5]
    k = torch.full((3, 2, 16), 3.0, dtype=pool.dtype, device=pool.device)
    pool.gather_kv(layer, where, k, k.clone())
    assert (k[[0, 2]] == 3).all()
    assert (k[1] == 9).all()
    assert not any(pool.faults().values())


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("over", [0, 1, 7, 2**31 - 64, 2**40, 2**62])
def test_a_slot_past_the_end_is_skipped_and_counted(make_pool, page, layer, over):
    pool = filled(make_pool, page)
    rows = pool.get_kv_buffer(layer)[0].shape[0]
    dtype = torch.int32 if rows + over < 2**31 else torch.int64
    before = [x.clone() for x in pool.get_kv_buffer(layer)]
    x = torch.full((2, 2, 16), 9.0, device=pool.device)
    where = locations(pool, [rows - 1, rows + over], dtype)
    pool.set_kv_buffer(layer, where, x, x)
    assert changed_rows(pool, layer, before) == [rows - 1]
    k = torch.full((2, 2, 16), 3.0, dtype=pool.dtype, device=pool.device)
    pool.gather_kv(layer, where, k, k.clone())
    assert (k[0] == 9).all()
    assert (k[1] == 3).all()
    assert pool.faults(clear=True) == dict.fromkeys(FAULT_KINDS, 0) | {"store_kv": 1, "gather_kv": 1}
    assert not any(pool.faults().values())


@pytest.mark.parametrize("layer", [0, 1])
def test_checked_mode_raises_before_it_writes(make_pool, page, layer, unchanged):
    pool = filled(make_pool, page, check=True)
    rows = pool.get_kv_buffer(layer)[0].shape[0]
    x = torch.ones(2, 2, 16, device=pool.device)
    out = torch.zeros(2, 2, 16, dtype=pool.dtype, device=pool.device)
    name = ("loc", "swa_loc")[layer]
    with (
        unchanged(pool),
        pytest.raises(SlotFault, match=rf"{name}\[1\]: expected a slot below {rows}, got {rows}"),
    ):
        pool.set_kv_buffer(layer, locations(pool, [5, rows]), x, x)
    with (
        unchanged(pool, out),
        pytest.raises(SlotFault, match=rf"\[0\]: expected a slot below {rows}, got {rows}"),
    ):
        pool.gather_kv(layer, locations(pool, [rows, 5]), out, out.clone())


def test_plans_of_foreign_slots(make_pool, page, unchanged):
    rows = SIZE + page
    slots = torch.tensor([-1, rows, -(2**62), rows + 9, 2**40])
    pool = filled(make_pool, page)
    assert pool.plan_write(slots).swa_loc.tolist() == [-1] * 5
    assert pool.faults()["translate_loc"] == 3
    checked = filled(make_pool, page, check=True)
    with (
        unchanged(checked),
        pytest.raises(SlotFault, match=rf"loc\[1\]: expected a slot below {rows}, got {rows}"),
    ):
        checked.plan_write(slots)
    graph = checked.graph_write_loc(8)
    with unchanged(checked, graph), pytest.raises(SlotFault):
        graph.fill(slots)
    assert checked.plan_write(slots[::2][:2]).swa_loc.tolist() == [-1, -1]


def test_moves_skip_foreign_slots_on_either_end(make_pool, page):
    pool = filled(make_pool, page)
    loc = pool.allocator.alloc(SWA)
    for group in pool.groups:
        group.k_caches[:, page:] = torch.randn_like(group.k_caches[:, page:])
    before = [pool.get_kv_buffer(layer)[0].clone() for layer in range(2)]
    a, b = int(loc[0]), int(loc[1])
    rows = SIZE + page
    pool.move_kv_cache(torch.tensor([a, -1, rows, a + 2]), torch.tensor([b, b, b, rows]))
    for layer, old in enumerate(before):
        source, target = (b, a) if layer == 0 else pool.full_to_swa[[b, a]].tolist()
        expected = old.clone()
        expected[target] = old[source]
        assert torch.equal(pool.get_kv_buffer(layer)[0], expected)
    assert pool.faults()["move_kv"] == 2


@pytest.mark.parametrize("layer", [0, 1])
def test_a_slot_twice_holds_the_last_row(make_pool, page, layer, unchanged, backend, request):
    """Unchecked, on CPUs and in the reference, the last one, K and V; elsewhere each element is of one of the rows. PAD
    and negative slots may repeat in either mode."""
    tokens = 4096
    x = torch.arange(tokens, dtype=torch.int16, device="cpu").view(torch.bfloat16)  # other bits in every row
    k = x.reshape(-1, 1, 1).expand(tokens, 2, 16).contiguous()
    pool = filled(make_pool, page)
    slots = [5, 7, 0, -1] * (tokens // 4)
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(4)
    pool.set_kv_buffer(layer, locations(pool, slots), k.to(pool.device), k.to(pool.device))
    device, row = backend
    exact = row == "reference" or devices.shares_host_memory(device)
    for cache in pool.get_kv_buffer(layer):
        for slot, first in ((5, 0), (7, 1)):
            held = cache[slot].cpu().view(torch.int16)
            assert (held % 4 == first).all()
            if exact:
                assert (held == tokens - 4 + first).all()
    assert not any(pool.faults().values())

    checked = filled(make_pool, page, check=True)
    swa = checked.plan_write(checked.allocator.alloc(4)) if layer else None
    y = torch.ones(4, 2, 16, device=pool.device)
    where = locations(checked, [5, 0, -1, 5]) if swa is None else KVWriteLoc(swa.loc, swa.swa_loc[[0, 1, 1, 2]])
    with unchanged(checked), pytest.raises(SlotFault, match=r"expected each slot once, got slot \d+ twice"):
        checked.set_kv_buffer(layer, where, y, y)
    checked.set_kv_buffer(0, locations(checked, [0, 0, -1, -1]), y, y)


def test_checked_moves_take_slots_that_are_held_and_have_the_same_sides(make_pool, unchanged):
    pool = make_pool([LayerSpec(None, 1, 8), LayerSpec(4, 1, 8)], size=64, swa_size=64, page_size=4, check=True)
    a, b, freed = (pool.allocator.alloc(4) for _ in range(3))
    dead = pool.allocator.alloc(4, swa_tail=0)
    restored = pool.allocator.alloc(4, swa_tail=0)
    pool.allocator.restore_swa(restored)
    pool.allocator.free(freed)
    pad, skipped = torch.zeros(4, dtype=torch.int64), torch.full((4,), -1)
    for tgt, src, message in (
        (freed, a, r"tgt\[0\]: expected a handed-out slot"),
        (a, freed, r"src\[0\]: expected a handed-out slot"),
        (a, pad, r"src\[0\]: expected a handed-out slot"),
        (a, dead, r"src\[0\]: expected a slot with live SWA bytes"),
        (a, restored, r"src\[0\]: expected a slot with live SWA bytes"),
        (dead, a, r"tgt\[0\]: expected a slot with an SWA peer"),
    ):
        with unchanged(pool), pytest.raises(SlotOwnership, match=message):
            pool.move_kv_cache(tgt, src)
    with unchanged(pool):
        for tgt, src in ((pad, a), (skipped, a), (a, skipped), (pad, freed)):
            pool.move_kv_cache(tgt, src)
    pool.move_kv_cache(a, b)
    pool.move_kv_cache(restored, a)
    one_side = make_pool([LayerSpec(None, 1, 8)], size=64, swa_size=64, page_size=4, slots_of=pool, check=True)
    one_side.move_kv_cache(a, dead)  # it has no SWA bytes


def test_checked_stores_of_windowed_layers_refuse_freed_slots(make_pool, unchanged):
    pool = make_pool([LayerSpec(4, 1, 8)], size=64, swa_size=64, page_size=4, check=True)
    loc, row = pool.allocator.alloc(4), torch.zeros(4, 1, 8, device=pool.device)
    pool.allocator.free(loc)
    write_loc = pool.plan_write(loc)
    with unchanged(pool), pytest.raises(SlotOwnership, match=r"loc\[0\]: expected a handed-out slot"):
        pool.set_kv_buffer(0, write_loc, row, row)
    pool.set_kv_buffer(0, pool.plan_write(pool.allocator.alloc(4, swa_tail=0)), row, row)  # held, without a peer
