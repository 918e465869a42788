"""S12: both slot widths store the same bytes, without a cast kernel; nothing wraps around."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec
from portakv.formats import FAULT_KINDS

LAYERS = [LayerSpec(None, 2, 16), *[LayerSpec(8, 2, 16)] * 46]
WIDTHS = (torch.int32, torch.int64)


@pytest.mark.parametrize("given", WIDTHS, ids=str)
def test_both_widths_hold_the_same_slots(make_pool, given):
    pool = make_pool(LAYERS[:2], size=32, swa_size=16)
    loc = pool.allocator.alloc(8)
    pool.allocator.free_swa(loc[:2])
    for width in WIDTHS:
        plan = pool.plan_write(loc.to(given), index_dtype=width)
        assert plan.loc.dtype == plan.swa_loc.dtype == width
        assert plan.loc.tolist() == loc.tolist()
        assert plan.swa_loc.tolist() == pool.full_to_swa[loc].tolist()


def test_a_store_takes_either_width(make_pool):
    k, v = (torch.randn(8, 2, 16) for _ in range(2))
    images = []
    for width in WIDTHS:
        pool = make_pool(LAYERS[:2], size=32, swa_size=16)
        write_loc = pool.plan_write(pool.allocator.alloc(8), index_dtype=width)
        for layer in (0, 1):
            pool.set_kv_buffer(layer, write_loc, k.to(pool.device), v.to(pool.device))
        images.append([x.cpu() for layer in (0, 1) for x in pool.get_kv_buffer(layer)])
        got = pool.gather_kv(1, write_loc)
        assert torch.equal(got[0].cpu(), k.to(pool.dtype))
    assert all(torch.equal(a, b) for a, b in zip(*images, strict=True))


@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_no_casts_in_a_forward_of_46_swa_layers(make_pool, launches, width):
    pool = make_pool(LAYERS, size=32, swa_size=16)
    loc = pool.allocator.alloc(4)
    x = torch.zeros(4, 2, 16, device=pool.device)
    launches.clear()
    write_loc = pool.plan_write(loc, index_dtype=width)
    for layer in range(len(LAYERS)):
        pool.set_kv_buffer(layer, write_loc, x, x)
    assert launches == {"translate_loc": 1, "store_kv": len(LAYERS)}


def test_a_second_width_costs_one_cast_per_side(make_pool, launches):
    pool = make_pool(LAYERS[:2], size=32, swa_size=16)
    write_loc = pool.plan_write(pool.allocator.alloc(4))
    launches.clear()
    narrow = pool.cast_write_loc(write_loc)
    assert launches == {"cast_loc": 2}
    assert narrow.loc.dtype == narrow.swa_loc.dtype == torch.int32
    assert narrow.loc.tolist() == write_loc.loc.tolist()
    assert narrow.swa_loc.tolist() == write_loc.swa_loc.tolist()


@pytest.mark.parametrize("slot", [2**31, 2**31 + 5, 2**32 + 1, 2**40, -(2**31) - 1, -(2**40)])
def test_what_does_not_fit_becomes_minus_one_and_a_fault(make_pool, kernel, slot):
    pool = make_pool(LAYERS[:1], size=32)
    write_loc = pool.cast_write_loc(pool.plan_write(torch.tensor([3, slot, 2**31 - 1, -(2**31)])))
    assert write_loc.loc.tolist() == [3, -1, 2**31 - 1, -(2**31)]
    assert pool.faults()["cast_loc"] == 1

    mapping = torch.zeros(33, dtype=torch.int64, device=pool.device)
    mapping[7] = slot
    faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64, device=pool.device)
    out = torch.full((2,), 5, dtype=torch.int32, device=pool.device)
    kernel("translate_loc")(mapping, torch.tensor([7], device=pool.device), out, None, None, None, faults)
    assert out.tolist() == [-1, 0]
    assert faults[FAULT_KINDS.index("cast_loc")] == 1


def test_an_int32_plan_of_foreign_slots_never_wraps(make_pool):
    pool = make_pool(LAYERS[:2], size=32, swa_size=16)
    write_loc = pool.plan_write(torch.tensor([2**31, 2**32 + 4]), index_dtype=torch.int32)
    assert write_loc.loc.tolist() == [-1, -1]
    assert write_loc.swa_loc.tolist() == [-1, -1]
    assert pool.faults()["translate_loc"] == 2
