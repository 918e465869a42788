"""Scenario 37: eviction must stop before the first key that a later query can see (sglang PR #29860)."""

from __future__ import annotations

import pytest
import torch

from portakv import HybridKVPool, LayerSpec
from portakv.allocator import HybridSlotAllocator


@pytest.mark.parametrize(
    ("window", "page_size", "length", "frontier"),
    [
        (128, 256, 512, 256),  # 385 keys are out of sight, one whole page of them
        (127, 64, 1024, 896),
        (128, 256, 256, 0),
        (16, 1, 100, 85),
        (1, 4, 12, 12),
        (8, 1, 7, 0),  # W - 1, W and W + 1 keys before the next query
        (8, 1, 8, 1),
        (8, 1, 9, 2),
    ],
)
def test_the_frontier_is_page_floored_and_spares_the_window(
    window: int, page_size: int, length: int, frontier: int
) -> None:
    a = HybridSlotAllocator(1024, 1024, page_size, window=window)
    slots = a.alloc(length)
    assert a.evict_swa(slots[None], [0], [0], [length]).tolist() == [frontier]
    live = a.is_live(slots)
    assert not live[:frontier].any() and live[frontier:].all()
    assert live[length - window + 1 :].all()  # what the query at `length` sees
    a.check_integrity()


def test_a_step_of_several_tokens_is_measured_from_its_smallest_position() -> None:
    a = HybridSlotAllocator(128, 128, 1, window=16)
    slots = a.alloc(108)  # positions 100 to 107 are drafts still to be asked from
    assert a.evict_swa(slots[None], [0], [0], [100]).tolist() == [85]
    assert a.is_live(slots).tolist() == [p >= 85 for p in range(108)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_long_decode_fits_the_smallest_pool_and_its_frontier_never_moves_back(page_size: int) -> None:
    window = 10
    swa_size = -(-(window + page_size) // page_size) * page_size
    a = HybridSlotAllocator(256, swa_size, page_size, window=window)
    table, cursor = torch.zeros(1, 200, dtype=torch.int64), [0]
    for length in range(200):
        new = a.evict_swa(table, [0], cursor, [length]).tolist()
        assert new >= cursor
        cursor = new
        assert a.evict_swa(table, [0], cursor, [max(0, length - 30)]).tolist() == cursor
        table[0, length] = a.alloc_decode([length + 1], [table[0, length - 1] if length else -1])
        assert a.is_live(table[0, max(0, length - window + 1) : length + 1]).all()
        assert a.is_live(table[0, : length + 1]).sum() <= window + page_size


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_verify_reads_from_what_its_smallest_position_sees(page_size: int) -> None:
    """The eviction before it, and the plan: both are measured from position 100, not from 107."""
    pool = HybridKVPool([LayerSpec(16, 1, 8)], size=128, swa_size=128, page_size=page_size, device="cpu")
    slots = pool.allocator.alloc(108)
    pool.allocator.evict_swa(slots[None], [0], [0], [100])
    plan = pool.plan_read(slots[None], torch.tensor([0]), torch.tensor([100]), extra_lens=8, structure="rows")
    read = plan.for_layer(0)
    assert (read.starts.tolist(), read.lens.tolist()) == ([85], [23])
    assert read.indices[0].tolist() == pool.full_to_swa[slots[85:]].tolist()
    assert read.indices.min() >= page_size
