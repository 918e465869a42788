"""Scenario 39: a prefix hit needs the last window of every SWA layer to be live (TensorRT-LLM PR #10875)."""

from __future__ import annotations

import pytest

from portakv.allocator import HybridSlotAllocator


def sequence_live_from(a: HybridSlotAllocator, first: int, length: int = 100) -> list[int]:
    slots = a.alloc(length)
    a.free_swa(slots[:first])
    assert a.is_live(slots).tolist() == [p >= first for p in range(length)]
    return slots.tolist()


def test_the_whole_prefix_is_reusable_while_its_last_window_is_live() -> None:
    a = HybridSlotAllocator(128, 128, window=16)
    assert a.reusable_prefix(sequence_live_from(a, 60)) == 100


@pytest.mark.parametrize(("first", "expected"), [(84, 100), (85, 100), (86, 0), (90, 0)])
def test_one_key_short_of_the_window_is_no_hit(first: int, expected: int) -> None:
    a = HybridSlotAllocator(128, 128, window=16)
    assert a.reusable_prefix(sequence_live_from(a, first)) == expected


def test_the_longest_valid_prefix_is_found_before_the_gap() -> None:
    a = HybridSlotAllocator(128, 128, window=16)
    slots = a.alloc(100)
    a.free_swa(slots[70:90])  # live: 0 to 69 and 90 to 99, too short for a window
    assert a.reusable_prefix(slots) == 70
    a.free(slots[50:])
    assert a.reusable_prefix(slots) == 50


def test_a_hit_is_whole_pages_and_the_largest_window_decides() -> None:
    a = HybridSlotAllocator(128, 128, 8, window=16)
    slots = a.alloc(100)
    a.free_swa(slots[:72])  # live: 72 to 99
    assert a.reusable_prefix(slots) == 96
    assert a.reusable_prefix(slots, window=24) == 96  # sees 73 to 95
    assert a.reusable_prefix(slots, window=26) == 0
    a.free_swa(slots[96:])
    assert a.reusable_prefix(slots, window=24) == 96
