"""S10: a cache past the reach of a consumer's offsets is refused, naming the largest that will do."""

from __future__ import annotations

import pytest
import torch

from portakv import CONSUMERS, LayerSpec
from portakv.consumers import check_offsets, last_offset

PAGE, HEADS, DIM = 16, 8, 128
NARROW = [name for name, style in CONSUMERS.items() if style.offset_bits == 32]
WIDE = [name for name, style in CONSUMERS.items() if style.offset_bits == 64]


def interleaved(blocks):
    """K and V of one buffer `[blocks, K or V, page, H, D]`: each spans all of it."""
    return torch.empty((blocks, 2, PAGE, HEADS, DIM), dtype=torch.bfloat16, device="meta").unbind(1)


@pytest.mark.parametrize("consumer", NARROW)
def test_the_last_block_that_32_bits_reach(consumer):
    for view in interleaved(65_536):
        check_offsets(CONSUMERS[consumer], view)
    for view in interleaved(65_537):
        with pytest.raises(ValueError, match="expected at most 65536 pages for its 32-bit offsets, got 65537"):
            check_offsets(CONSUMERS[consumer], view)


@pytest.mark.parametrize("consumer", WIDE)
def test_64_bits_reach_everything(consumer):
    for blocks in (65_537, 2**30):
        for view in interleaved(blocks):
            check_offsets(CONSUMERS[consumer], view)


def test_the_view_decides_not_its_number_of_elements():
    """Dense K of as many blocks has half the offsets; a head-major view of rows all of them."""
    style = CONSUMERS[NARROW[0]]
    dense = torch.empty((65_537, PAGE, HEADS, DIM), dtype=torch.bfloat16, device="meta")
    check_offsets(style, dense)
    check_offsets(style, dense[:0])
    with pytest.raises(ValueError, match="at most 131072 pages"):
        check_offsets(style, torch.empty((131_073, PAGE, HEADS, DIM), device="meta"))
    rows = torch.empty((HEADS, 2**31 // HEADS // DIM + 1, DIM), device="meta").movedim(1, 0)
    with pytest.raises(ValueError, match="for its 32-bit offsets") as refused:
        check_offsets(style, rows)
    most = int(str(refused.value).split("at most ")[1].split(" rows")[0])
    check_offsets(style, rows[:most])
    with pytest.raises(ValueError, match=f"at most {most} rows"):
        check_offsets(style, rows[: most + 1])


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_plans_are_refused_before_anything_is_written(make_pool, unchanged, consumer):
    """The caches of a pool's planner are swapped for views of that size, which take no memory."""
    pool = make_pool([LayerSpec(None, HEADS, DIM)], size=PAGE, page_size=PAGE)
    planner = pool._planner
    planner._caches = interleaved(65_537)
    planner._reach = max(map(last_offset, planner._caches))
    table, rows, lens = torch.full((1, 4), PAGE, device=pool.device), torch.tensor([0]), torch.tensor([3])
    calls = (
        lambda: pool.plan_read(table, rows, lens, consumer=consumer),
        lambda: pool.graph_read_plan(1, 4, consumer=consumer),
    )
    for call in calls:
        if consumer in WIDE:
            assert call().for_layer(0).side == "full"
            continue
        with unchanged(pool), pytest.raises(ValueError, match=r"at most 65536 pages .*, got 65537"):
            call()
