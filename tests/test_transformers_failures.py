"""PortaKVCache when a call fails: an error at every Python call leaves the old state or the new one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from portakv import HybridKVPool, LayerSpec, PortaKVError
from portakv.integrations.transformers import PortaKVCache

WINDOW = 8
SPECS = [LayerSpec(WINDOW, 2, 8, 4), LayerSpec(None, 1, 8), LayerSpec(5, 2, 8)]


def make_pool(page_size: int = 4, size: int = 160, swa_size: int = 96) -> HybridKVPool:
    return HybridKVPool(SPECS, size=size, swa_size=swa_size, page_size=page_size, dtype=torch.float32)


def rows_at(layer: int, first: int, num_tokens: int, names: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that tell layer, row and position: what row `names[b]` holds from position `first` on."""
    spec = SPECS[layer]
    value = 1000.0 * torch.tensor(names)[:, None] + torch.arange(first, first + num_tokens) + 100_000 * layer
    k = value[:, None, :, None].expand(-1, spec.num_kv_heads, -1, spec.head_dim)
    v = -value[:, None, :, None].expand(-1, spec.num_kv_heads, -1, spec.v_dim)
    return k.contiguous(), v.contiguous()


def forward(cache: PortaKVCache, num_tokens: int, names: list[int]) -> None:
    """One forward, each layer's answer compared with what its rows hold."""
    past = cache.get_seq_length()
    for layer, spec in enumerate(SPECS):
        first = 0 if spec.window is None else max(0, past - spec.window + 1)
        got = cache.update(*rows_at(layer, past, num_tokens, names), layer)
        for mine, right in zip(got, rows_at(layer, first, past + num_tokens - first, names), strict=True):
            assert torch.equal(mine, right), f"layer {layer}"


class Interrupt(BaseException):
    pass


def interrupt_at(count: int, call: Callable[[], Any]) -> bool:
    """Run `call` with an error at its `count`-th Python call; whether there were so many."""
    left = count

    def hook(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal left
        if event == "call":
            left -= 1
            if left == 0:
                raise Interrupt

    try:
        sys.setprofile(hook)
        call()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def available(pool: HybridKVPool) -> tuple[int, int]:
    return pool.allocator.available("full"), pool.allocator.available("swa")


Change = Callable[[PortaKVCache], Any]
CHANGES: dict[str, tuple[Change, Callable[[list[int]], list[int]], int]] = {
    "crop": (lambda cache: cache.crop(-2), lambda names: names, -2),
    "crop all": (lambda cache: cache.crop(-cache.get_seq_length()), lambda names: names, -99),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])), lambda n: [n[2], n[2], n[0]], 0),
    "permute": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])), lambda n: [n[2], n[0], n[1]], 0),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda n: [x for x in n for _ in range(2)], 0),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda n: [n[1]], 0),
    "reset": (lambda cache: cache.reset(), lambda names: names, -99),
    "copy": (copy.deepcopy, lambda names: names, 0),
    "record": (lambda cache: cache.activate_past_recording(), lambda names: names, 0),
}
"""A change of a cache, the names of its rows after it, and by how much it is longer then."""


def prefilled(pool: HybridKVPool, change: str) -> PortaKVCache:
    cache = PortaKVCache(pool)
    lengths = (3, 3) if change == "crop all" else (13, 1, 3)  # before any eviction, and after
    for num_tokens in lengths:
        forward(cache, num_tokens, [1, 2, 3])
    return cache


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_error_at_every_call_of_a_change(change: str, page_size: int) -> None:
    call, rename, longer = CHANGES[change]
    pool = make_pool(page_size)
    full = available(pool)
    cache = prefilled(pool, change)
    length, before = cache.get_seq_length(), available(pool)
    kept = call(cache)  # a copy keeps its slots
    after = available(pool)
    del cache, kept
    for count in range(1, 10_000):
        cache = prefilled(pool, change)
        done = not interrupt_at(count, lambda cache=cache: call(cache))
        pool.check_integrity()
        held = available(pool)
        assert held in (before, after) or (change == "copy" and done)
        new = held == after != before and change != "copy"
        assert cache.get_seq_length() == (max(0, length + longer) if new else length)
        candidates = [rename([1, 2, 3])] if new else [[1, 2, 3], rename([1, 2, 3])]
        assert any(goes_on(cache, names) for names in candidates), count
        del cache
        assert available(pool) == full
        if done:
            return


def goes_on(cache: PortaKVCache, names: list[int]) -> bool:
    """Whether the cache's rows are `names`, by two forwards; the first is taken back where they are not."""
    try:
        forward(cache, 2, names)
    except (AssertionError, ValueError):
        if cache._batch.state.forward is not None:
            cache.crop(-2)
        return False
    forward(cache, 1, names)
    return True


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("swa_size", [96, 52])  # in the smaller one room is made by evicting first
def test_error_at_every_call_of_a_forward(num_tokens: int, page_size: int, swa_size: int) -> None:
    pool = make_pool(page_size, swa_size=swa_size)
    full, names = available(pool), [1, 2, 3]
    for count in range(1, 10_000):
        cache = PortaKVCache(pool)
        for n in (8, 5):
            forward(cache, n, names)
        length = cache.get_seq_length()
        done = not interrupt_at(count, lambda cache=cache: forward(cache, num_tokens, names))
        pool.check_integrity()
        assert not any(pool.faults().values())
        written = [cache.get_seq_length(i) - length for i in range(len(SPECS))]
        assert written == sorted(written, reverse=True)
        assert set(written) <= {0, num_tokens}
        for layer in range(len(SPECS)):  # go on where it stopped: only what was not done is done again
            if not written[layer]:
                spec = SPECS[layer]
                first = 0 if spec.window is None else max(0, length - spec.window + 1)
                got = cache.update(*rows_at(layer, length, num_tokens, names), layer)
                right = rows_at(layer, first, length + num_tokens - first, names)
                assert all(map(torch.equal, got, right)), (count, layer)
        forward(cache, 2, names)
        cache.crop(-2)
        forward(cache, 1, names)
        cache.reset()
        assert available(pool) == full
        if done:
            return


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 1) -> list[int]:
    """Make the pool's method `name` raise OutOfMemoryError; `left[0]` may be set to a number of failures."""
    method, left = getattr(HybridKVPool, name), [times]

    def failing(self: HybridKVPool, *args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError(name)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(HybridKVPool, name, failing)
    return left


@pytest.mark.parametrize("name", ["plan_write", "set_kv_buffer", "_gather"])
def test_forward_can_be_tried_again_after_it_ran_out_of_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    cache = PortaKVCache(pool)
    forward(cache, 1, [1]), forward(cache, 1, [1])
    before = available(pool)
    with monkeypatch.context() as patch:
        fail_once(patch, name)
        with pytest.raises(torch.OutOfMemoryError):
            forward(cache, 1, [1])
    assert (available(pool), cache.get_seq_length()) == (before, 2)
    k, _ = cache.update(*rows_at(1, 2, 1, [1]), 1)  # a full layer first
    assert k[0, 0, :, 0].tolist() == [101000.0, 101001.0, 101002.0]
    cache.reset()
    assert available(pool) == (160, 96)


def test_copies_that_fail_twice_are_named_and_made_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    cache = prefilled(pool, "reorder")
    left = fail_once(monkeypatch, "move_kv_cache", 1)
    cache.reorder_cache(torch.tensor([2, 2, 0]))  # its second try is enough
    forward(cache, 1, [3, 3, 1])
    left[0] = 4
    for call in (lambda: cache.reorder_cache(torch.tensor([2, 2, 0])), lambda: cache.crop(-1)):
        with pytest.raises(PortaKVError, match="rows of this cache are not copied yet"):
            call()
    left[0] = 0
    forward(cache, 1, [1, 1, 3])
    left[0] = 2
    with pytest.raises(PortaKVError, match="not copied yet"):
        cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.reset()
    assert available(pool) == (160, 96)


@pytest.mark.parametrize("change", ["forward", *(name for name in CHANGES if name != "reorder")])  # bytes stay written
def test_a_change_in_a_step_that_fails_later_is_taken_back(change: str) -> None:
    """As where an engine frees other slots in the same step: the cache goes back with the allocator."""
    pool = make_pool()
    cache, names = PortaKVCache(pool), [1, 2, 3]
    forward(cache, 5, names)
    before = available(pool)

    def steps() -> None:
        if change == "forward":
            forward(cache, 2, names)
        else:
            CHANGES[change][0](cache)
        raise ValueError("the rest of the step")

    with pytest.raises(ValueError, match="the rest"):
        pool.allocator.atomically(steps)
    assert available(pool) == before
    pool.check_integrity()
    forward(cache, 2, names)
