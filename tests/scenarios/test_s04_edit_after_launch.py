"""S4: a write location is a snapshot: edits reach the next plan only, and checked mode tells."""

from __future__ import annotations

import pytest
import torch

import portakv
from portakv import KVWriteLoc, LayerSpec, SlotOwnership, StaleWriteLoc
from portakv.formats import PAD

LAYERS = [LayerSpec(None, 2, 16), LayerSpec(8, 2, 16)]


def give_away(pool, loc):
    """Evict `loc` and hand its SWA slots to another owner."""
    old = pool.plan_write(loc).swa_loc.tolist()
    pool.allocator.free_swa(loc)
    other = pool.allocator.alloc(len(loc))
    assert pool.plan_write(other).swa_loc.tolist() == old
    return other


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_plan_keeps_its_translation(make_pool, page_size):
    pool = make_pool(LAYERS, size=32, swa_size=16, page_size=page_size)
    loc = pool.allocator.alloc(4)
    plan, graph = pool.plan_write(loc), pool.graph_write_loc(4)
    graph.fill(loc)
    old = plan.swa_loc.tolist()
    other = give_away(pool, loc)
    assert plan.swa_loc.tolist() == graph.swa_loc.tolist() == old
    assert pool.plan_write(loc).swa_loc.tolist() == [PAD] * 4
    assert pool.plan_write(other).swa_loc.tolist() == old


def test_checked_mode_names_the_first_stale_slot(make_pool, unchanged):
    pool = make_pool(LAYERS, size=32, swa_size=16, check=True)
    loc = pool.allocator.alloc(4)
    x = torch.ones(4, 2, 16, device=pool.device)
    plan, graph = pool.plan_write(loc), pool.graph_write_loc(4)
    graph.fill(loc)
    pool.set_kv_buffer(1, plan, x, x)
    give_away(pool, loc[2:])
    for stale in (plan, graph):
        message = rf"write_loc\[2\]: slot {loc[2]} was translated to {plan.swa_loc[2]}, the mapping says 0 now"
        with unchanged(pool), pytest.raises(StaleWriteLoc, match=message):
            pool.set_kv_buffer(1, stale, x, x)
    pool.set_kv_buffer(1, plan[:2], x[:2], x[:2])
    pool.set_kv_buffer(1, pool.plan_write(loc), x, x)
    pool.set_kv_buffer(0, plan, x, x)  # a full layer's slots did not go stale


def test_checked_mode_sees_a_peer_that_was_replaced(make_pool, unchanged):
    pool = make_pool(LAYERS, size=32, swa_size=16, check=True)
    loc = pool.allocator.alloc(1)
    plan = pool.plan_write(loc)
    give_away(pool, loc)
    new = pool.allocator.restore_swa(loc)
    x = torch.ones(1, 2, 16, device=pool.device)
    with unchanged(pool), pytest.raises(StaleWriteLoc, match=f"the mapping says {int(new)} now"):
        pool.set_kv_buffer(1, plan, x, x)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("swa", [16, None], ids=["hybrid", "windows on the full side"])
def test_checked_mode_names_the_first_full_slot_that_was_freed(make_pool, page, swa, unchanged):
    pool = make_pool(LAYERS, size=32, swa_size=swa, page_size=page, check=True)
    loc = pool.allocator.alloc(8)
    x = torch.ones(8, 2, 16, device=pool.device)
    plan, narrow, graph = pool.plan_write(loc), pool.plan_write(loc, torch.int32), pool.graph_write_loc(8)
    graph.fill(loc)
    pool.allocator.free(loc[4:])
    message = rf"loc\[4\]: expected a handed-out slot, got {loc[4]}: freed already, or never handed out"
    for layer in [0] if swa else [0, 1]:
        for stale in (plan, narrow, graph):
            with unchanged(pool, stale), pytest.raises(SlotOwnership, match=message):
                pool.set_kv_buffer(layer, stale, x, x)
        pool.set_kv_buffer(layer, plan[:4], x[:4], x[:4])
    pool.allocator.free(loc[:4])
    with unchanged(pool), pytest.raises(SlotOwnership, match=rf"loc\[0\]: .* got {loc[0]}:"):
        pool.set_kv_buffer(0, plan, x, x)
    again = pool.allocator.alloc(8)
    assert sorted(again.tolist()) == sorted(loc.tolist())
    pool.set_kv_buffer(0, plan, x, x)  # whose slots they are now cannot be seen


def test_checked_mode_knows_how_much_of_a_page_is_handed_out(make_pool, unchanged):
    """Rejected drafts, and places of a page that no token has yet."""
    pool = make_pool(LAYERS, size=32, swa_size=16, page_size=4, check=True)
    loc = pool.allocator.alloc(7)
    x = torch.ones(8, 2, 16, device=pool.device)
    plan = pool.plan_write(loc)
    beyond = torch.cat((loc, loc[-1:] + 1)).to(pool.device)
    with unchanged(pool), pytest.raises(SlotOwnership, match=rf"loc\[7\]: .* got {beyond[7]}:"):
        pool.set_kv_buffer(0, KVWriteLoc(beyond), x, x)
    pool.allocator.rewind(loc[5:])
    with unchanged(pool), pytest.raises(SlotOwnership, match=rf"loc\[5\]: .* got {loc[5]}:"):
        pool.set_kv_buffer(0, plan, x[:7], x[:7])
    padded = plan.loc.clone()
    padded[5], padded[6] = PAD, -1
    pool.set_kv_buffer(0, KVWriteLoc(padded), x[:7], x[:7])
    assert pool.allocator.alloc_extend([5], [7], loc[4:5]).tolist() == loc[5:].tolist()
    pool.set_kv_buffer(0, plan, x[:7], x[:7])


def test_checked_mode_of_a_draft_pool_asks_the_targets_allocator(make_pool, unchanged):
    target = make_pool(LAYERS, size=32, swa_size=16)
    draft = make_pool(LAYERS[:1], size=40, slots_of=target, check=True)
    loc = target.allocator.alloc(4)
    x = torch.ones(4, 2, 16, device=target.device)
    plan = target.plan_write(loc)
    draft.set_kv_buffer(0, plan, x, x)
    target.allocator.free(loc[:1])
    with unchanged(draft), pytest.raises(SlotOwnership, match=rf"loc\[0\]: .* got {loc[0]}:"):
        draft.set_kv_buffer(0, plan, x, x)
    own = torch.tensor([40], device=draft.device)  # the draft has such a row, but nobody hands it out
    with unchanged(draft), pytest.raises(SlotOwnership, match=r"loc\[0\]: .* got 40:"):
        draft.set_kv_buffer(0, KVWriteLoc(own), x[:1], x[:1])


def test_edits_follow_what_their_stream_launched(accelerator):
    """On a stream that is busy: plan, edit, plan, without a wait between them."""
    module = torch.get_device_module(accelerator)
    pool = portakv.HybridKVPool(LAYERS, size=4096, swa_size=2048, device=accelerator)
    with module.stream(module.Stream(accelerator)):
        loc = pool.allocator.alloc(1024)
        expected = pool.allocator.mapping[loc.numpy()].tolist()
        busy = torch.randn(4096, 4096, device=accelerator)
        for _ in range(20):
            busy = busy @ busy
        before = pool.plan_write(loc)
        pool.allocator.free_swa(loc)
        after = pool.plan_write(loc)
        module.current_stream().synchronize()
    assert before.swa_loc.tolist() == expected
    assert after.swa_loc.tolist() == [PAD] * 1024
