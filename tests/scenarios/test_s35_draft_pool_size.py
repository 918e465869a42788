"""S35: pools that share slots are checked at construction: the draft has every slot of the target."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec

FULL, SWA = LayerSpec(None, 2, 16), LayerSpec(8, 2, 16)


@pytest.fixture
def target(make_pool):
    """All layers hybrid: 64 full slots, 32 SWA slots."""
    return make_pool([FULL, SWA], size=64, swa_size=32)


@pytest.mark.parametrize(
    ("layers", "options", "error"),
    [
        ([FULL], {"size": 60}, "size: expected at least 64 .*, got 60"),
        ([FULL], {"size": 63}, "size: expected at least 64 .*, got 63"),
        ([FULL, SWA], {"size": 60, "swa_size": 32}, "size: expected at least 64 .*, got 60"),
        ([FULL, SWA], {"size": 64, "swa_size": 31}, "swa_size: expected at least 32 .*, got 31"),
        ([FULL], {"size": 64, "page_size": 2}, "page_size: expected 1 .*, got 2"),
        ([LayerSpec(9, 2, 16)], {"size": 64, "swa_size": 32}, "layers: expected windows .* at most 8, got 9"),
    ],
)
def test_a_pool_that_does_not_cover_the_slots(target, make_pool, layers, options, error, unchanged):
    with unchanged(target), pytest.raises(ValueError, match=error):
        make_pool(layers, slots_of=target, **options)


def test_an_swa_side_that_the_slots_do_not_have(make_pool, unchanged):
    target = make_pool([FULL], size=64)
    with unchanged(target), pytest.raises(ValueError, match=r"swa_size: expected (?!at least None)"):
        make_pool([SWA], size=64, swa_size=32, slots_of=target)


def test_sizes_are_compared_in_whole_pages(make_pool):
    target = make_pool([FULL], size=64, page_size=16)
    make_pool([FULL], size=79, page_size=16, slots_of=target)
    with pytest.raises(ValueError, match=r"size: expected at least 64 .*, got 63"):
        make_pool([FULL], size=63, page_size=16, slots_of=target)


@pytest.mark.parametrize(
    ("layers", "options"),
    [([FULL], {}), ([SWA], {}), ([FULL, SWA], {"swa_size": 32}), ([LayerSpec(4, 1, 8)], {"swa_size": 40})],
    ids=["full", "windows on the full side", "hybrid", "smaller window"],
)
def test_the_top_slot_works(target, make_pool, layers, options):
    draft = make_pool(layers, size=64, slots_of=target, **options)
    assert draft.allocator is target.allocator
    assert draft.full_to_swa is target.full_to_swa
    target.allocator.alloc(32, swa_tail=0)
    loc = draft.allocator.alloc(32)
    assert int(loc[-1]) == 64
    for pool in (draft, target):
        write_loc = pool.plan_write(loc)
        for layer, spec in enumerate(pool.layers):
            x = torch.randn(32, spec.num_kv_heads, spec.head_dim, device=pool.device).to(pool.dtype)
            pool.set_kv_buffer(layer, write_loc, x, x)
            assert torch.equal(pool.gather_kv(layer, write_loc)[0], x)
        assert not any(pool.faults().values())
    draft.allocator.free(loc)
    assert target.allocator.available("swa") == 32
    target.check_integrity()
    draft.check_integrity()


def test_shared_slots_are_counted_once(target, make_pool):
    draft = make_pool([FULL], size=64, slots_of=target)
    alone = make_pool([FULL], size=64)
    assert draft.nbytes < alone.nbytes
    assert draft.kv_bytes == alone.kv_bytes


def test_host_copies_of_both_pools_come_back_to_the_same_slots(target, make_pool):
    """A retracted request has one set of slots and KV in two pools."""
    draft = make_pool([FULL], size=64, slots_of=target)
    loc = target.allocator.alloc(4)
    x = torch.randn(4, 2, 16, device=target.device).to(target.dtype)
    for pool in (target, draft):
        pool.set_kv_buffer(0, pool.plan_write(loc), x, x)
    of_target, of_draft = target.copy_to_host(loc), draft.copy_to_host(loc)
    target.allocator.free(loc)
    for pool in (target, draft):
        for cache in pool.get_kv_buffer(0):
            cache.view(torch.uint8).zero_()

    loc = target.load_from_host(of_target)
    assert draft.load_from_host(of_draft, slots=loc) is loc
    for pool in (target, draft):
        assert torch.equal(pool.gather_kv(0, pool.plan_write(loc))[0], x)
    assert target.allocator.available("full") == 60
