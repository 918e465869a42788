"""Scenario 29: a partial free inside a page must not leave live mappings (sglang PR #27779)."""

from __future__ import annotations

import pytest

from portakv.allocator import HybridSlotAllocator
from portakv.errors import SlotOwnership


def test_the_swa_side_is_freed_by_whole_pages() -> None:
    a = HybridSlotAllocator(32, 32, 4)
    a.alloc(4)
    ids = a.alloc(4)
    assert ids.tolist() == [8, 9, 10, 11]
    mapped, free = a.mapping.copy(), a.available("swa")

    for part in ([9], [8, 9, 10], [9, 10, 11]):
        with pytest.raises(SlotOwnership, match=f"part of a page at slot {part[0]}: {len(part)} of 4 slots"):
            a.free_swa(part)
    assert (a.mapping == mapped).all() and a.available("swa") == free

    a.free_swa(ids)
    assert not a.mapping[8:12].any() and a.available("swa") == free + 4
    a.free_swa(ids)
    assert a.available("swa") == free + 4
    a.check_integrity()
