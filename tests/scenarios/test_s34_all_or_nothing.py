"""Scenario 34: when one side runs out, the other gets its slots back (xllm PR #1526, kvcached PR #430)."""

from __future__ import annotations

import pytest

from portakv.allocator import HybridSlotAllocator
from portakv.errors import OutOfSlots


def test_the_short_side_is_named_and_nothing_has_moved() -> None:
    a, twin = HybridSlotAllocator(14, 6), HybridSlotAllocator(14, 6)
    for allocator in (a, twin):
        slots = allocator.alloc(6)
        allocator.free(slots[[1, 4]])
        allocator.free(slots[[0, 5]])
        allocator.alloc(2)
    assert (a.available("full"), a.available("swa")) == (10, 2)
    mapped = a.mapping.copy()

    for call in (
        lambda: a.alloc(4),
        lambda: a.alloc_extend([0, 0], [1, 3], [-1, -1]),
        lambda: a.alloc_decode([1] * 4, [-1] * 4),
    ):
        with pytest.raises(OutOfSlots) as caught:
            call()
        assert (caught.value.side, caught.value.short, caught.value.free) == ("swa", 2, 2)
    assert (a.available("full"), a.available("swa")) == (10, 2)
    assert (a.mapping == mapped).all()

    # The free lists are in the order of a pool that never failed.
    assert a.alloc(2).tolist() == twin.alloc(2).tolist()
    assert a.alloc(8, swa_tail=0).tolist() == twin.alloc(8, swa_tail=0).tolist()
    assert (a.mapping == twin.mapping).all()
    a.check_integrity()
