"""S44: every kind of pool goes to the host and back by the same calls; what was evicted stays gone."""

from __future__ import annotations

import dataclasses
import pickle
from copy import deepcopy
from itertools import chain

import numpy as np
import pytest
import torch

from portakv import LayerSpec, OutOfSlots, SlotFault, SlotOwnership

FULL, SWA = LayerSpec(None, 2, 16, 24), LayerSpec(8, 1, 8)
KINDS = {
    "hybrid": ([FULL, SWA], {"swa_size": 32}),
    "all full": ([FULL, FULL], {}),
    "all swa": ([SWA, SWA], {"swa_size": 32}),
    "one side": ([FULL, SWA], {}),
    "several formats": ([FULL, SWA, LayerSpec(None, 1, 32), LayerSpec(4, 3, 8)], {"swa_size": 32}),
    "aliases": ([FULL, SWA, LayerSpec(8, 1, 8, alias_of=1)], {"swa_size": 32}),
    "fp8": ([FULL, SWA], {"swa_size": 32, "dtype": torch.float8_e5m2}),
    "a draft": ([FULL, SWA], {"swa_size": 32, "slots_of": True}),
}


@pytest.fixture(params=[1, 4], ids="page{}".format)
def page(request):
    return request.param


def build(make_pool, kind, page, **more):
    layers, options = KINDS[kind]
    options = options | more
    if options.get("slots_of") is True:
        options["slots_of"] = make_pool([FULL, SWA], size=64, swa_size=32, page_size=page)
    return make_pool(layers, size=64, page_size=page, **options)


def fill(pool, slots):
    """Random rows at `slots`; returns what each layer reads there."""
    write_loc = pool.plan_write(slots)
    for layer, spec in enumerate(pool.layers):
        if spec.alias_of is None:
            k, v = (
                torch.randn(len(slots), spec.num_kv_heads, dim, device=pool.device)
                for dim in (spec.head_dim, spec.v_dim)
            )
            pool.set_kv_buffer(layer, write_loc, k, v)
    return read(pool, slots)


def read(pool, slots):
    where = pool.plan_write(slots)
    return [[x.view(torch.uint8).cpu() for x in pool.gather_kv(layer, where)] for layer in range(len(pool.layers))]


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(make_pool, kind, page):
    pool = build(make_pool, kind, page)
    slots = pool.allocator.alloc(16)
    rows = fill(pool, slots)
    dead = 8 if pool.has_swa else 0
    pool.allocator.free_swa(slots[:dead])
    copy = pool.copy_to_host(slots)
    assert {x.device.type for x in copy.keys + copy.values} == {"cpu"}
    pool.allocator.free(slots)
    pool.allocator.alloc(12)  # so that the copy comes back to other slots

    back = pool.load_from_host(copy)
    assert back.tolist() != slots.tolist()
    if pool.has_swa:
        assert pool.allocator.is_live(back).tolist() == [False] * dead + [True] * (16 - dead)
        assert pool.plan_write(back).swa_loc[:dead].tolist() == [0] * dead
    for layer, (got, want) in enumerate(zip(read(pool, back), rows, strict=True)):
        spec = pool.layers[layer]
        start = dead if pool.has_swa and spec.window is not None else 0
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[start:], b[start:])
    pool.check_integrity()
    assert not any(pool.faults().values())


def test_a_sequence_that_begins_inside_a_page(make_pool):
    """A page is mapped whole, but its dead tokens do not come back live over garbage."""
    pool = make_pool([FULL, SWA], size=64, swa_size=32, page_size=4, check=True)
    slots = pool.allocator.alloc(16)
    rows = fill(pool, slots)
    pool.allocator.free_swa(slots[:8])
    copy = pool.copy_to_host(slots[6:])
    live = [False] * 2 + [True] * 8
    assert copy.live.tolist() == live
    pool.allocator.free(slots)
    fill(pool, pool.allocator.alloc(16))
    back = pool.load_from_host(copy)
    assert pool.allocator.is_live(back).tolist() == live
    for layer, dead in ((0, 0), (1, 2)):
        for a, b in zip(read(pool, back)[layer], rows[layer], strict=True):
            assert torch.equal(a[dead:], b[6 + dead :])
    assert pool.copy_to_host(back).live.tolist() == live


def test_a_copy_that_could_not_be_loaded_is_not_made(make_pool, unchanged):
    """A page that is live in front and dead behind cannot be mapped."""
    pool = make_pool([FULL, SWA], size=64, swa_size=32, page_size=4)
    slots = pool.allocator.alloc(16)
    pool.allocator.free_swa(slots[4:8])
    pool.copy_to_host(slots)
    with (
        unchanged(pool),
        pytest.raises(ValueError, match="slots: expected no token without SWA bytes behind live ones"),
    ):
        pool.copy_to_host(slots[2:])


@pytest.mark.parametrize("check", [False, True])
def test_slots_that_a_copy_fills_have_swa_bytes_where_it_has(make_pool, unchanged, check):
    """A draft's copy beside its target's, with an eviction between the two."""
    pool = make_pool([FULL, SWA], size=64, swa_size=48, check=check)
    draft = make_pool([SWA], size=64, swa_size=48, slots_of=pool, check=check)
    slots = pool.allocator.alloc(12)
    fill(pool, slots), fill(draft, slots)
    early = pool.copy_to_host(slots), draft.copy_to_host(slots)
    pool.allocator.free_swa(slots[:4])
    late = pool.copy_to_host(slots), draft.copy_to_host(slots)
    pool.allocator.free(slots)
    for first, second, expected in (
        (early, late, "a slot without live SWA bytes for a token that was copied without"),
        (late, early, "a slot with an SWA peer for a token that was copied with one"),
    ):
        back = pool.load_from_host(first[0])
        with unchanged(pool, draft), pytest.raises(SlotOwnership, match=rf"slots\[0\]: expected {expected}"):
            draft.load_from_host(second[1], back)
        draft.load_from_host(first[1], back)
        twice = back.clone()
        twice[7] = twice[9]
        with unchanged(pool, draft), pytest.raises(SlotFault, match="slots: expected each slot once"):
            draft.load_from_host(first[1], twice)
        pool.allocator.free(back)
    # A draft without windows has no SWA bytes to lose.
    plain = make_pool([FULL], size=64, swa_size=48, slots_of=pool, check=check)
    back = pool.load_from_host(early[0])
    copy = plain.copy_to_host(back)
    pool.allocator.free_swa(back[:4])
    plain.load_from_host(copy, back)
    assert pool.allocator.is_live(back).tolist() == [False] * 4 + [True] * 8


def test_restored_slots_may_be_loaded(make_pool):
    pool = make_pool([FULL, SWA], size=64, swa_size=48, page_size=4, check=True)
    slots = pool.allocator.alloc(12)
    rows, copy = fill(pool, slots), pool.copy_to_host(slots)
    pool.allocator.free_swa(slots)
    fill(pool, pool.allocator.alloc(12))
    pool.allocator.restore_swa(slots)
    assert not pool.allocator.is_live(slots).any()
    pool.load_from_host(copy, slots)
    assert pool.allocator.is_live(slots).all()
    assert all(map(torch.equal, chain(*read(pool, slots)), chain(*rows)))


def test_a_load_without_room_in_a_group_of_frees_changes_nothing(make_pool, unchanged):
    pool = make_pool([FULL, SWA], size=64, swa_size=32, page_size=4)
    slots = pool.allocator.alloc(16)
    copy = pool.copy_to_host(slots)
    with pool.allocator.group_frees():
        pool.allocator.free(slots)
        other = pool.allocator.alloc(12)
        for _ in range(2):
            with unchanged(pool), pytest.raises(OutOfSlots) as error:
                pool.load_from_host(copy)
            assert (error.value.side, error.value.free) == ("swa", 4)
    assert pool.allocator.available() == 64 - len(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2fnuz])
def test_a_copy_crosses_processes(make_pool, dtype):
    pool = make_pool([FULL, SWA], size=64, swa_size=32, dtype=dtype)
    slots = pool.allocator.alloc(5)
    rows, copy = fill(pool, slots), pool.copy_to_host(slots)
    for other in (pickle.loads(pickle.dumps(copy)), deepcopy(copy)):
        back = pool.load_from_host(other)
        assert all(map(torch.equal, chain(*read(pool, back)), chain(*rows)))


def test_a_copy_goes_to_pools_of_another_page_size(make_pool, unchanged):
    """Tags say what the bytes mean; pages are the pool's own affair."""
    source = make_pool([FULL, SWA], size=64, swa_size=32)
    target = make_pool([FULL, SWA], size=64, swa_size=32, page_size=4)
    slots = source.allocator.alloc(16)
    rows = fill(source, slots)
    source.allocator.free_swa(slots[:4])
    back = target.load_from_host(source.copy_to_host(slots))
    for layer, dead in ((0, 0), (1, 4)):
        for a, b in zip(read(target, back)[layer], rows[layer], strict=True):
            assert torch.equal(a[dead:], b[dead:])
    assert target.allocator.is_live(back).tolist() == [False] * 4 + [True] * 12

    source.allocator.free_swa(slots[6:7])
    copy = source.copy_to_host(slots)
    with unchanged(target), pytest.raises(ValueError, match="copy: expected no token without SWA bytes behind live"):
        target.load_from_host(copy)


def test_a_copy_that_came_in_part_is_refused(make_pool, unchanged):
    """As over a network: the pool has no slots to lose, nor bytes of some layers to write."""
    pool = make_pool([FULL, SWA], size=64, swa_size=48)
    slots = pool.allocator.alloc(16)
    fill(pool, slots)
    copy = pool.copy_to_host(slots)
    (first, second), (_, values) = copy.keys, copy.values
    for part, what in (
        ({"keys": (first, second[:, :3])}, "keys: expected tensors of"),
        ({"keys": (first,)}, "keys: expected tensors of"),
        ({"values": (values.float(), values)}, "values: expected tensors of"),
        ({"values": (values[:0], values)}, "values: expected tensors of"),
        ({"live": copy.live[:4]}, "keys: expected tensors of"),
        ({"live": ~copy.live}, "keys: expected tensors of"),
        ({"live": copy.live.astype(int)}, "live: expected a vector of bools"),
        ({"live": [True] * 16}, "live: expected a vector of bools"),
    ):
        with unchanged(pool), pytest.raises(ValueError, match=f"copy.{what}"):
            pool.load_from_host(dataclasses.replace(copy, **part))


@pytest.mark.parametrize("side", ["full", "swa"])
def test_a_load_without_room_changes_nothing(make_pool, page, side, unchanged):
    pool = build(make_pool, "hybrid", page)
    slots = pool.allocator.alloc(16)
    copy = pool.copy_to_host(slots)
    pool.allocator.alloc(36, swa_tail=0) if side == "full" else pool.allocator.alloc(8)
    with unchanged(pool), pytest.raises(OutOfSlots) as error:
        pool.load_from_host(copy)
    assert error.value.side == side
    assert error.value.need == 16


@pytest.mark.parametrize(
    "layers",
    [
        [FULL],
        [SWA, FULL, FULL],
        [FULL, FULL, SWA],
        [FULL, SWA, SWA],
        [FULL, LayerSpec(8, 1, 16)],
        [LayerSpec(None, 2, 16), SWA],
        [FULL, LayerSpec(None, 1, 8)],
    ],
    ids=["fewer", "more", "more of one side", "more of the other", "other dim", "other V dim", "other side"],
)
def test_a_copy_of_other_layers_is_refused(make_pool, layers, unchanged):
    pool = build(make_pool, "hybrid", 1)
    other = make_pool(layers, size=64, swa_size=32)
    copy = other.copy_to_host(other.allocator.alloc(4))
    with unchanged(pool), pytest.raises(ValueError, match=r"copy: expected layer groups .*, got"):
        pool.load_from_host(copy)


@pytest.mark.parametrize("slots", [[0], [-1], [40], [10**6], [1, 2, 3, 60]])
def test_slots_that_are_not_handed_out_are_not_exported(make_pool, page, slots, unchanged):
    pool = build(make_pool, "hybrid", page)
    pool.allocator.alloc(16)
    with unchanged(pool), pytest.raises(SlotOwnership, match="slots: expected handed-out slots, got"):
        pool.copy_to_host(torch.tensor(slots))


def test_exported_slots_are_those_of_the_side(make_pool):
    """What goes on the wire for the SWA side is `plan_write`'s translation, in that group's range."""
    pool = build(make_pool, "hybrid", 1)
    pool.allocator.alloc(20, swa_tail=0)
    write_loc = pool.plan_write(pool.allocator.alloc(8))
    full, swa = pool.describe()
    assert (full.side, swa.side) == ("full", "swa")
    assert full.num_slots == 65
    assert swa.num_slots == 33
    assert int(write_loc.swa_loc.max()) < swa.num_slots <= int(write_loc.loc.max()) + 33
    assert np.array_equal(pool.allocator.mapping[write_loc.loc.cpu().numpy()], write_loc.swa_loc.cpu().numpy())
