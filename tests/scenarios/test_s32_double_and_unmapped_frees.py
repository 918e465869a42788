"""Scenario 32: freeing what was never mapped, or freeing twice (sglang PR #38519)."""

from __future__ import annotations

import numpy as np
import pytest

from portakv.allocator import HybridSlotAllocator
from portakv.errors import OutOfSlots, SlotOwnership


def free_as_segments(a: HybridSlotAllocator, slots: list[int]) -> None:
    pages = np.unique(np.array(slots) // a.page_size)
    a.free_segments(pages * a.page_size, np.full_like(pages, a.page_size))


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_entry_point_leaves_an_unmapped_page_out_of_the_swa_free_list(page_size: int) -> None:
    a = HybridSlotAllocator(32, 32, page_size, window=1)
    for free in (a.free, a.rewind, lambda slots: free_as_segments(a, slots)):
        slots = a.alloc(8, swa_tail=0).tolist()
        a.free_swa(slots)
        a.evict_swa([slots], [0], [0], [8])
        assert a.available("swa") == 32
        free(slots)
        assert (a.available("full"), a.available("swa")) == (32, 32)
        a.check_integrity()


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_entry_point_refuses_a_second_free(page_size: int) -> None:
    a = HybridSlotAllocator(32, 32, page_size)
    slots = a.alloc(8).tolist()
    a.free(slots + slots)  # within one call a duplicate counts once
    assert a.available() == 32
    for free in (a.free, a.free_swa, a.rewind, lambda slots: free_as_segments(a, slots)):
        with pytest.raises(SlotOwnership):
            free(slots)
        with pytest.raises(ValueError, match="reserved"):
            free(list(range(page_size)))
        assert (a.available("full"), a.available("swa")) == (32, 32)
        a.check_integrity()


@pytest.mark.parametrize("page_size", [1, 4])
def test_ten_thousand_random_calls_never_give_a_page_two_owners(page_size: int) -> None:
    rng = np.random.default_rng(0)
    a = HybridSlotAllocator(64, 48, page_size)
    held: list[list[int]] = []
    for i in range(10_000):
        if held and rng.random() < 0.5:
            slots = held.pop(rng.integers(len(held)))
            (a.free, a.rewind, lambda slots: free_as_segments(a, slots))[i % 3](slots)
        elif held and rng.random() < 0.3:
            a.free_swa(held[rng.integers(len(held))])
        else:
            try:
                held.append(a.alloc(int(rng.integers(1, 20)), swa_tail=int(rng.integers(0, 20))).tolist())
            except OutOfSlots:
                continue
            assert min(held[-1]) >= page_size
        owned = [slot for slots in held for slot in slots]
        assert len(set(owned)) == len(owned)
        if i % 10 == 0:
            a.check_integrity()
    a.check_integrity()
