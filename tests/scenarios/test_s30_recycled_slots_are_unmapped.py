"""Scenario 30: recycled full slots must not keep the previous owner's SWA mapping (sglang PR #25805)."""

from __future__ import annotations

import pytest

from portakv.allocator import HybridSlotAllocator


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_slots_outside_the_tail_have_no_peer(page_size: int) -> None:
    a = HybridSlotAllocator(8, 8, page_size)
    ids = a.alloc(8)
    a.free(ids)

    again = a.alloc(8, swa_tail=4)
    assert again.tolist() == ids.tolist()
    assert a.mapping[again][:4].tolist() == [0] * 4 and a.mapping[again][4:].all()
    a.free(again)

    assert a.mapping[a.alloc(8, swa_tail=0)].tolist() == [0] * 8
    assert a.available("swa") == 8
    a.free(ids)
    assert (a.available("full"), a.available("swa")) == (8, 8)


def test_two_thousand_requests_leave_both_sides_as_they_were() -> None:
    a = HybridSlotAllocator(64, 64, 4)
    for i in range(2000):
        a.free(a.alloc(1 + i % 64, swa_tail=i % 7))
    assert (a.available("full"), a.available("swa")) == (64, 64)
    a.check_integrity()
