"""S3: whichever way a forward makes its locations, an SWA layer gets SWA slots, never full ones."""

from __future__ import annotations

import pytest
import torch

from portakv import KVWriteLoc, LayerSpec, MissingSwaLoc, Structure

FULL, SWA = 64, 8
LAYERS = [LayerSpec(None, 2, 16), LayerSpec(4, 2, 16)]


@pytest.fixture
def pool(make_pool):
    """Slots in use lie far above what the SWA side has."""
    pool = make_pool(LAYERS, size=FULL, swa_size=SWA)
    pool.allocator.alloc(39, swa_tail=0)
    return pool


def test_every_forward_mode_gives_the_same_swa_slots(pool):
    a = pool.allocator
    loc = a.alloc_extend([0, 0], [2, 2], [-1, -1])  # extend
    loc = torch.cat((loc, a.alloc_decode([3, 3], loc[[1, 3]])))  # decode
    assert int(loc.min()) >= 40
    expected = a.mapping[loc.numpy()].tolist()
    assert min(expected) > 0
    assert max(expected) <= SWA

    graph = pool.graph_write_loc(8, int32_twin=True)
    graph.fill(loc)
    draft_steps = pool.plan_write(loc.reshape(2, 3).T.flatten())  # one column per step, cut by explicit slices
    plans = {
        "host": pool.plan_write(loc),
        "device": pool.plan_write(loc.to(pool.device)),
        "int32": pool.plan_write(loc.to(torch.int32), index_dtype=torch.int32),
        "verify": pool.plan_write(torch.cat((loc, torch.zeros(2, dtype=torch.int64))))[: len(loc)],
        "replay": graph[: len(loc)],
        "replay int32": graph.int32[: len(loc)],
    }
    for mode, plan in plans.items():
        assert plan.loc.tolist() == loc.tolist(), mode
        assert plan.swa_loc.tolist() == expected, mode
    for step in range(3):
        column = draft_steps[2 * step : 2 * step + 2]
        assert column.loc.tolist() == [int(loc[step]), int(loc[3 + step])]
        assert column.swa_loc.tolist() == [expected[step], expected[3 + step]]


def test_full_slots_without_a_plan_are_refused(pool, unchanged):
    loc = pool.allocator.alloc(4)
    x = torch.ones(4, 2, 16, device=pool.device)
    with (
        unchanged(pool),
        pytest.raises(MissingSwaLoc, match="layer 1 has a sliding window and needs swa_loc, got None"),
    ):
        pool.set_kv_buffer(1, KVWriteLoc(loc.to(pool.device)), x, x)
    with unchanged(pool), pytest.raises(MissingSwaLoc, match="layer 1"):
        pool.gather_kv(1, KVWriteLoc(loc.to(pool.device)))


def test_the_id_space_is_that_of_the_pool_in_use(pool, make_pool, unchanged):
    """An all-full draft shares the target's slots: the target refuses its plans."""
    draft = make_pool([LayerSpec(4, 2, 16)], size=FULL, slots_of=pool)
    loc = pool.allocator.alloc(4)
    x = torch.ones(4, 2, 16, device=pool.device)
    of_draft, of_target = draft.plan_write(loc), pool.plan_write(loc)
    assert of_draft.swa_loc is None
    with unchanged(pool, draft), pytest.raises(MissingSwaLoc):
        pool.set_kv_buffer(1, of_draft, x, x)
    draft.set_kv_buffer(0, of_target, x, x)
    k_cache, _ = draft.get_kv_buffer(0)
    assert k_cache.flatten(1).any(dim=1).nonzero().flatten().tolist() == loc.tolist()


def test_a_hybrid_draft_plans_like_its_target(pool, make_pool):
    draft = make_pool([LayerSpec(4, 1, 8)], size=FULL, swa_size=SWA, slots_of=pool)
    loc = pool.allocator.alloc(4)
    assert torch.equal(draft.plan_write(loc).swa_loc, pool.plan_write(loc).swa_loc)


@pytest.mark.parametrize("structure", Structure)
def test_every_read_plan_names_swa_slots(pool, structure):
    """Decode, extend, verify and a graph's refill: one builder, so none of them forgets to translate."""
    a = pool.allocator
    loc = a.alloc(6)
    table, row, six = loc[None].to(pool.device), torch.tensor([0]), torch.tensor([6])
    graph = pool.graph_read_plan(2, 8, max_query_len=3, structure=structure)
    plans = {
        "decode": pool.plan_read(table, row, six, structure=structure),
        "extend": pool.plan_read(table, row, six, 3, structure=structure),
        "verify": pool.plan_read(table, row, six - 2, extra_lens=2, structure=structure),
        "replay": pool.plan_read(table, row, six, 3, out=graph),
    }
    for mode, plan in plans.items():
        full, swa = plan.for_layer(0), plan.for_layer(1)
        used = [read.indices[read.indices > 0].tolist() for read in (full, swa)]
        assert set(used[0]) == set(loc.tolist()), mode
        assert set(used[1]) <= set(a.mapping[loc.numpy()].tolist()), mode
        assert int(loc[-1]) in used[0] and int(a.mapping[loc[-1]]) in used[1], mode
        assert max(used[1]) <= SWA < min(used[0]), mode
