"""Scenario 31: a deferred free must not look its mapping up too late (sglang PR #36646)."""

from __future__ import annotations

import pytest

from portakv.allocator import HybridSlotAllocator
from portakv.errors import PortaKVError


def test_a_peer_freed_in_a_group_is_the_one_of_that_moment() -> None:
    a = HybridSlotAllocator(8, 2)
    slot = a.alloc(1)
    old = a.mapping[slot].item()
    with a.group_frees():
        a.free_swa(slot)
        new = a.restore_swa(slot).item()
        assert new != old
        assert a.available("swa") == 0  # neither: one is queued, one owned
    assert a.mapping[slot].item() == new
    assert a.available("swa") == 1
    assert a.mapping[a.alloc(1)].item() == old
    a.check_integrity()


def test_groups_do_not_nest_and_an_exception_leaves_the_pool_consistent() -> None:
    a = HybridSlotAllocator(8, 8)
    slots = a.alloc(4)
    with pytest.raises(PortaKVError, match="inside another"), a.group_frees():
        a.free(slots[:2])
        with a.group_frees():
            pass
    a.check_integrity()
    with pytest.raises(ZeroDivisionError), a.group_frees():
        a.free(slots[2:])
        1 / 0  # noqa: B018
    assert (a.available("full"), a.available("swa")) == (8, 8)
    a.check_integrity()
