"""S36: an SWA side that could never serve one request is refused, with the size it needs."""

from __future__ import annotations

import pytest
import torch

from portakv import HybridKVPool, LayerSpec

FULL, SWA = LayerSpec(None, 1, 8), LayerSpec(128, 1, 8)


@pytest.mark.parametrize("swa_size", [1, 100, 255, 256, 383, 409, 511])
def test_the_message_says_what_is_needed(make_pool, swa_size):
    with pytest.raises(ValueError, match=f"swa_size: expected at least 384 .*got {swa_size}"):
        make_pool([FULL, SWA], size=4096, swa_size=swa_size, page_size=256)


@pytest.mark.parametrize("swa_size", [512, 768, 819, 4096])
def test_enough_is_enough(make_pool, swa_size):
    pool = make_pool([FULL, SWA], size=4096, swa_size=swa_size, page_size=256)
    assert pool.swa_size == swa_size // 256 * 256


def test_a_request_that_the_smallest_side_admits_can_run_for_ever(make_pool):
    """The bound is tight: window and one page are enough for a long decode, one slot less is refused."""
    window, page = 5, 4
    layers = [FULL, LayerSpec(window, 1, 8)]
    with pytest.raises(ValueError, match="at least 9"):
        make_pool(layers, size=64, swa_size=11, page_size=page)
    pool = make_pool(layers, size=64, swa_size=12, page_size=page)
    a, row, cursor = pool.allocator, torch.zeros(1, 64, dtype=torch.int64), [0]
    last = [-1]
    for position in range(64):
        cursor = a.evict_swa(row, [0], cursor, [position])
        last = a.alloc_decode([position + 1], last)
        row[0, position] = last
        live = a.is_live(row[0, : position + 1])
        assert live[max(0, position - window + 1) :].all()
    pool.check_integrity()


def test_the_largest_window_counts(make_pool):
    with pytest.raises(ValueError, match="at least 129"):
        make_pool([LayerSpec(16, 1, 8), SWA], size=4096, swa_size=128)
    make_pool([LayerSpec(16, 1, 8)], size=4096, swa_size=128)


def test_an_swa_side_as_long_as_the_full_one_always_serves(make_pool):
    pool = make_pool([FULL, LayerSpec(4096, 1, 8)], size=64, swa_size=64)
    assert pool.swa_size == 64


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.0001, 2, float("nan"), float("inf")])
def test_ratios_outside_of_zero_to_one(ratio):
    with pytest.raises(ValueError, match=r"swa_ratio: expected a number in \(0, 1\]"):
        HybridKVPool.fit([FULL, SWA], 2**20, swa_ratio=ratio)


@pytest.mark.parametrize("ratio", ["0.5", [0.5], 1j])
def test_ratios_that_are_no_number(ratio):
    with pytest.raises(TypeError, match="swa_ratio: expected a number"):
        HybridKVPool.fit([FULL, SWA], 2**20, swa_ratio=ratio)


def test_a_ratio_is_checked_like_a_size():
    """The other way to size a pool: 4096 tokens at 0.1 would leave one page of 256."""
    layers = [FULL, SWA]
    budget = HybridKVPool(layers, size=4096, swa_size=512, page_size=256, device="cpu").nbytes
    for ratio in (0.04, 0.1):
        with pytest.raises(ValueError, match="384"):
            HybridKVPool.fit(layers, budget, swa_ratio=ratio, page_size=256, device="cpu")
    pool = HybridKVPool.fit(layers, budget, swa_ratio=0.2, page_size=256, device="cpu")
    assert pool.nbytes <= budget


@pytest.mark.parametrize("ratio", [None, 0.125, 0.5, 1.0])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_fit_fills_its_budget_and_stays_within(ratio, page, dtype):
    layers = [LayerSpec(None, 2, 32, 16), *[LayerSpec(16, 2, 32)] * 5]
    budget = 3_000_000
    options = {"swa_ratio": ratio, "page_size": page, "dtype": dtype, "device": "cpu"}
    pool = HybridKVPool.fit(layers, budget, **options)
    assert pool.nbytes <= budget
    rows = sum(g.fmt.row_bytes * len(g.layers) for g in pool.groups)
    assert pool.nbytes > budget - 2 * page * (rows + 40) - 40 * pool.size
    if ratio is not None:
        assert pool.swa_size <= pool.size * ratio
        assert pool.swa_size > pool.size * ratio - page - 1


@pytest.mark.parametrize("budget", [1, 100, 1000])
def test_a_budget_below_one_page_names_what_is_needed(budget):
    with pytest.raises(ValueError, match=r"budget: expected at least \d+ bytes for one page of tokens, got"):
        HybridKVPool.fit([FULL, SWA], budget, page_size=256, device="cpu")
