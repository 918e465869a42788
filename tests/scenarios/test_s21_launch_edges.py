"""S21: zero tokens, tensors of several devices, and a device that is not the current one."""

from __future__ import annotations

import pytest
import torch

import portakv
from portakv import KVWriteLoc, LayerSpec

LAYERS = [LayerSpec(None, 2, 16, 24), LayerSpec(8, 2, 16, 24)]


def rows(n, device):
    return torch.ones(n, 2, 16, device=device), torch.ones(n, 2, 24, device=device)


def nothing(pool):
    """Every call of a forward and between forwards, for no token at all."""
    none = torch.empty(0, dtype=torch.int64)
    for width in (torch.int32, torch.int64):
        write_loc = pool.plan_write(none.to(width), index_dtype=width)
        assert len(write_loc) == len(write_loc.swa_loc) == 0
        pool.cast_write_loc(write_loc)
        for layer in (0, 1):
            pool.set_kv_buffer(layer, write_loc, *rows(0, pool.device))
            k, v = pool.gather_kv(layer, write_loc)
            assert (k.shape, v.shape) == ((0, 2, 16), (0, 2, 24))
    pool.move_kv_cache(none, none)
    assert pool.allocator.alloc(0).tolist() == []
    assert pool.allocator.alloc_extend([], [], []).tolist() == []
    assert pool.allocator.alloc_decode([], []).tolist() == []
    assert pool.allocator.restore_swa(none).tolist() == []
    for free in (pool.allocator.free, pool.allocator.free_swa, pool.allocator.rewind):
        free(none)
    pool.allocator.free_segments([], [])
    assert pool.load_from_host(pool.copy_to_host(none)).tolist() == []


@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("page", [1, 4])
def test_zero_tokens_are_a_no_op(make_pool, unchanged, page, check):
    pool = make_pool(LAYERS, size=16, swa_size=16, page_size=page, check=check)
    with unchanged(pool):
        nothing(pool)
    pool.set_kv_buffer(0, pool.plan_write(pool.allocator.alloc(4)), *rows(4, pool.device))  # a warm-up launch
    with unchanged(pool):
        nothing(pool)


def test_an_empty_fill_resets_all_of_a_plan(make_pool):
    pool = make_pool(LAYERS, size=16, swa_size=16)
    graph = pool.graph_write_loc(4)
    graph.fill(pool.allocator.alloc(4))
    graph.fill(torch.empty(0, dtype=torch.int64))
    assert graph.loc.tolist() == graph.swa_loc.tolist() == [0] * 4


@pytest.mark.parametrize("odd", ["k", "v", "write_loc"])
def test_tensors_of_two_devices_are_refused(make_pool, unchanged, odd):
    pool = make_pool(LAYERS, size=16, swa_size=16)
    write_loc = pool.plan_write(pool.allocator.alloc(4))
    k, v = rows(4, pool.device)
    given = {"k": k, "v": v, "write_loc": write_loc}
    if odd == "write_loc":
        given[odd] = KVWriteLoc(write_loc.loc.to("meta"), write_loc.swa_loc.to("meta"))
    else:
        given[odd] = given[odd].to("meta")
    for layer in (0, 1):
        with (
            unchanged(pool),
            pytest.raises(ValueError, match=f"{odd}: expected .* on {pool.device}, got meta"),
        ):
            pool.set_kv_buffer(layer, given["write_loc"], given["k"], given["v"])
        given_out = {"k_out": given["k"], "v_out": given["v"]}
        with (
            unchanged(pool, k, v),
            pytest.raises(ValueError, match=f"expected .* on {pool.device}, got meta"),
        ):
            pool.gather_kv(layer, given["write_loc"], **given_out)


def test_a_device_that_is_not_current(accelerator):
    """On the last device of the kind while its first one is current; with one device they are the same."""
    module = torch.get_device_module(accelerator)
    last = torch.device(accelerator.type, module.device_count() - 1)
    module.set_device(0)
    pool = portakv.HybridKVPool(LAYERS, size=16, swa_size=16, device=last)
    loc = pool.allocator.alloc(4)
    write_loc = pool.plan_write(loc)
    for layer in (0, 1):
        pool.set_kv_buffer(layer, write_loc, *rows(4, last))
        assert (pool.gather_kv(layer, write_loc, dtype=torch.float32)[0] == 1).all()
    pool.move_kv_cache(loc[:2], loc[2:])
    pool.allocator.free(loc)
    pool.check_integrity()
    assert module.current_device() == 0
    with pytest.raises(ValueError, match=f"k: expected a tensor on {last}, got cpu"):
        pool.set_kv_buffer(0, write_loc, *rows(4, "cpu"))
