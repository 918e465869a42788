"""HybridSlotAllocator call by call: what comes out, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from portakv.allocator import HybridSlotAllocator, entries
from portakv.errors import IntegrityError, OutOfSlots, PortaKVError, SlotOwnership

PAGE_SIZES = [1, 2, 16, 64]


def snapshot(a: HybridSlotAllocator) -> tuple[Any, ...]:
    """Every byte of the allocator's state."""
    pages = a._pages
    stacks = [(side.top, side.stack.tobytes()) for side in (pages.full, pages.swa)]
    queue = None if pages.queue is None else [(f.tolist(), s.tolist()) for f, s in pages.queue]
    return a.mapping.tobytes(), pages.fill.tobytes(), stacks, queue


def refused(a: HybridSlotAllocator, error: type[Exception], match: str, call: Callable[..., Any], *args: Any) -> None:
    before = snapshot(a)
    with pytest.raises(error, match=match):
        call(*args)
    assert snapshot(a) == before
    a.check_integrity()


# Construction


def test_sizes_are_rounded_down_to_pages() -> None:
    a = HybridSlotAllocator(67, 35, 16)
    assert (a.size, a.swa_size, a.page_size, a.window) == (64, 32, 16, None)
    assert (a.available(), a.available("full"), a.available("swa")) == (64, 64, 32)
    assert a.mapping.dtype == np.int64 and a.mapping.shape == (64 + 16 + 1,)
    assert a.mapping[-1] == -1 and not a.mapping[:-1].any()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((0,), ValueError),
        ((-1,), ValueError),
        ((15, None, 16), ValueError),
        ((16, 0, 16), ValueError),
        ((16, 15, 16), ValueError),
        ((16, 16, 0), ValueError),
        ((16.0,), TypeError),
        (("16",), TypeError),
        ((True,), TypeError),
        ((16, 8.0), TypeError),
        ((16, None, 1.0), TypeError),
    ],
)
def test_bad_sizes(args: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match="size: expected"):
        HybridSlotAllocator(*args)


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-3, ValueError), (1.5, TypeError)])
def test_bad_window(window: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="window: expected"):
        HybridSlotAllocator(16, 16, window=window)


def test_a_swa_side_that_could_never_serve_a_request_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(ValueError, match=r"384.*409.*256"):
        HybridSlotAllocator(4096, 409, 256, window=128)
    with pytest.raises(ValueError, match=r"384.*got 100, which is 0"):
        HybridSlotAllocator(4096, 100, 256, window=128)
    assert HybridSlotAllocator(4096, 819, 256, window=128).swa_size == 768
    assert HybridSlotAllocator(8, 8, 1, window=1024).swa_size == 8  # no sequence is longer than the pool
    with pytest.raises(ValueError, match="at least 8"):
        HybridSlotAllocator(8, 7, 1, window=1024)


@pytest.mark.parametrize("swa_size", [None, 100_000])
def test_memory_stays_within_32_bytes_per_slot_with_a_device_copy_of_the_map(swa_size: int | None) -> None:
    a = HybridSlotAllocator(100_000, swa_size)
    held = [a.mapping, a._pages.fill, a._pages.unwritten, a._pages.full.stack, a._pages.swa.stack]
    assert a.nbytes == sum(array.nbytes for array in held)
    assert a.nbytes + a.mapping.nbytes < 32 * a.size


# Allocation


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_slots_come_out_ascending_from_page_one(page_size: int) -> None:
    a = HybridSlotAllocator(8 * page_size, 8 * page_size, page_size)
    first = a.alloc(3 * page_size)
    assert first.dtype == torch.int64 and first.device.type == "cpu"
    assert first.tolist() == list(range(page_size, 4 * page_size))
    assert a.alloc(1).tolist() == [4 * page_size]
    np.testing.assert_array_equal(a.mapping[: 5 * page_size], [0] * page_size + list(range(page_size, 5 * page_size)))
    a.check_integrity()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_what_was_freed_last_comes_out_first_and_ascending(page_size: int) -> None:
    a = HybridSlotAllocator(8 * page_size, 8 * page_size, page_size)
    slots = a.alloc(6 * page_size)
    a.free(slots[: 2 * page_size])
    a.free(slots[4 * page_size :].flip(0))
    assert a.alloc(2 * page_size).tolist() == slots[4 * page_size :].tolist()
    assert a.alloc(2 * page_size).tolist() == slots[: 2 * page_size].tolist()


def test_an_allocation_is_a_fresh_tensor() -> None:
    a = HybridSlotAllocator(16, 16)
    for n in (1, 4):
        slots = a.alloc(n)
        kept = slots.clone()
        slots.fill_(-7)
        assert a.is_live(kept).all()
        a.free(kept)
    a.check_integrity()


def test_zero_tokens() -> None:
    a = HybridSlotAllocator(16, 16, 4)
    before = snapshot(a)
    empty = torch.empty(0, dtype=torch.int64)
    for slots in (
        a.alloc(0),
        a.alloc_extend([], [], []),
        a.alloc_extend([0], [0], [-1]),
        a.alloc_decode([], []),
    ):
        assert slots.shape == (0,) and slots.dtype == torch.int64
    for call in (a.free, a.free_swa, a.rewind, a.require_owned):
        call(empty)
        call([])
    a.free_segments([], [])
    assert a.restore_swa(empty).shape == (0,)
    assert a.is_live(empty).shape == (0,) and a.reusable_prefix([]) == 0
    assert a.reusable_prefix(np.empty((2, 0), np.int64)).tolist() == [0, 0]
    assert HybridSlotAllocator(8, 8, window=2).evict_swa([[1]], [], [], []).shape == (0,)
    assert snapshot(a) == before


@pytest.mark.parametrize("tail", [None, 0, 1, 4, 5, 9, 10, 99])
@pytest.mark.parametrize("page_size", [1, 4])
def test_only_the_pages_of_the_tail_get_a_peer(page_size: int, tail: int | None) -> None:
    a = HybridSlotAllocator(24, 24, page_size)
    b = HybridSlotAllocator(24, 24, page_size)
    first = 0 if tail is None else max(0, 10 - tail) // page_size * page_size
    expected = [tail != 0 and i >= first for i in range(10)]
    assert a.is_live(a.alloc(10, swa_tail=tail)).tolist() == expected
    assert b.is_live(b.alloc_extend([0], [10], [-1], swa_tail=tail)).tolist() == expected
    assert snapshot(a) == snapshot(b)


def test_without_a_swa_side_nothing_is_mapped() -> None:
    a = HybridSlotAllocator(32, None, 4)
    assert (a.swa_size, a.available("swa")) == (0, 0)
    slots = a.alloc(6)
    more = a.alloc_extend([6, 0], [9, 2], [slots[-1], -1])
    a.alloc_decode([10, 3], [more[2], more[4]])
    assert not a.mapping[:-1].any() and not a.is_live(slots).any()
    assert a.reusable_prefix(slots, window=3) == 4  # only ownership counts
    a.free_swa(slots[:4])
    refused(a, OutOfSlots, "swa side: need 8 slots, 0 free", a.restore_swa, slots)
    assert a.restore_swa([]).shape == (0,)
    assert a.available() == 32 - 4 * 4


def test_extend_fills_the_last_page_before_it_takes_another() -> None:
    a = HybridSlotAllocator(64, 64, 4)
    one, two = a.alloc(6), a.alloc(8)
    got = a.alloc_extend([6, 8, 0, 8], [13, 8, 3, 8], [one[-1], two[-1], -1, two[-1]])
    # one: slots 4..9, so two more in page 2, then page 5 whole and one slot of page 6; three start page 7.
    assert got.tolist() == [10, 11, 20, 21, 22, 23, 24, 28, 29, 30]
    assert a.mapping[got].tolist() == got.tolist()


def test_extend_takes_tensors_of_either_width_arrays_and_lists() -> None:
    results = []
    for kind in (
        list,
        lambda x: np.array(x, np.int32),
        lambda x: np.array(x, np.uint8 if min(x) >= 0 else np.int16),
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: torch.tensor(x)[None, :].expand(2, -1).T[:, 0],  # strided
    ):
        a = HybridSlotAllocator(64, 64, 4)
        results.append(a.alloc_extend(kind([0, 0]), kind([3, 6]), kind([-1, -1])).tolist())
        assert a.alloc_decode(kind([4, 7]), kind([6, 13])).tolist() == [7, 14]
        a.free(kind([4, 5, 6, 7]))
        assert a.available() == 64 - 8
    assert all(r == results[0] for r in results)


def test_a_continued_page_without_a_peer_gets_one_if_its_new_tokens_need_it() -> None:
    for tail, live in ((None, True), (2, True), (1, False), (0, False)):
        a = HybridSlotAllocator(32, 32, 4)
        slots = a.alloc(6, swa_tail=0)
        got = a.alloc_extend([6], [9], [slots[-1]], swa_tail=tail)
        assert a.is_live(got).tolist() == [live, live, tail != 0]
        assert not a.is_live(slots[:4]).any()
    a = HybridSlotAllocator(32, 32, 4)
    slots = a.alloc(6)
    a.free_swa(slots)
    assert a.is_live(a.alloc_decode([7], [slots[-1]])).all()
    assert a.available("swa") == 28


def test_decode_equals_extend_by_one() -> None:
    for page_size in PAGE_SIZES:
        a, b = (HybridSlotAllocator(2048, 2048, page_size) for _ in range(2))
        lens = torch.tensor([1, 2, 15, 16, 17, 63, 64, 65])
        last = []
        for n in lens.tolist():
            a.alloc(n)
            last.append(int(b.alloc(n)[-1]))
        for _ in range(3):
            lens = lens + 1
            got = a.alloc_decode(lens, last)
            assert got.tolist() == b.alloc_extend(lens - 1, lens, last).tolist()
            assert snapshot(a) == snapshot(b)
            last = got.tolist()


def test_out_of_slots_names_the_short_side_and_changes_nothing() -> None:
    a = HybridSlotAllocator(32, 16, 4)
    slots = a.alloc(10)
    b = HybridSlotAllocator(3, 2)
    b.alloc(2)
    for allocator, call, args, side, need, free in (
        (a, a.alloc, (23,), "full", 24, 20),
        (a, a.alloc, (2**70,), "full", -(-(2**70) // 4) * 4, 20),
        (a, a.alloc, (5,), "swa", 8, 4),
        (a, a.alloc_extend, ([10, 0], [12, 5], [slots[-1], -1]), "swa", 8, 4),
        (b, b.alloc_extend, ([0] * 4, [2**62] * 4, [-1] * 4), "full", 2**64, 1),
        (a, a.alloc_extend, ([0] * 5, [2**61 + 1] * 5, [-1] * 5, 0), "full", 5 * (2**61 + 4), 20),
        (b, b.alloc, (1,), "swa", 1, 0),
        (b, b.alloc_decode, ([3], [2]), "swa", 1, 0),
    ):
        before = snapshot(allocator)
        with pytest.raises(OutOfSlots) as caught:
            call(*args)
        assert (caught.value.side, caught.value.need, caught.value.free) == (side, need, free)
        assert snapshot(allocator) == before
    b.alloc(1, swa_tail=0)
    refused(b, OutOfSlots, "full side: need 1 slots, 0 free", b.alloc, 1)
    a.free_swa(slots)
    refused(a, OutOfSlots, "swa side: need 20", a.alloc, 20)
    a.alloc(20, swa_tail=8)
    refused(a, OutOfSlots, "swa side: need 12", a.restore_swa, slots)


def test_bad_lengths_and_last_slots() -> None:
    a = HybridSlotAllocator(64, 64, 4)
    one, two = a.alloc(6), a.alloc(8)
    last = int(one[-1])
    refused(a, ValueError, "n: expected at least 0, got -1", a.alloc, -1)
    refused(a, TypeError, "n: expected an int, got float", a.alloc, 1.0)
    refused(a, TypeError, "n: expected an int, got bool", a.alloc, True)
    refused(a, ValueError, "swa_tail: expected at least 0", a.alloc, 3, -1)
    refused(
        a,
        ValueError,
        r"seq_lens\[1\]: expected at least the prefix",
        a.alloc_extend,
        [6, 8],
        [7, 7],
        [last, two[-1]],
    )
    refused(a, ValueError, r"prefix_lens\[0\]", a.alloc_extend, [-1], [3], [-1])
    refused(a, ValueError, "expected equal lengths, got 2, 1, 1", a.alloc_extend, [0, 0], [3], [-1])
    refused(a, ValueError, "expected equal lengths", a.alloc_decode, [7], [last, last])
    refused(a, ValueError, r"seq_lens\[0\]: expected lengths of at least 1", a.alloc_decode, [0], [-1])
    refused(a, TypeError, "expected integers, got float", a.alloc_decode, [7.0], [last])
    refused(a, TypeError, "expected integers, got bool", a.alloc_decode, [True], [last])
    refused(a, ValueError, "expected 1 dimensions", a.alloc_decode, [[7]], [[last]])
    for prefix, slot in (
        (6, last - 1),  # not the last handed out of its page
        (6, last + 1),  # not handed out
        (5, last),  # does not fit the prefix
        (6, -1),
        (6, 10**9),
        (6, -(10**9)),
        (2, 0),  # reserved
        (0, last),
        (6, int(two[-1]) + 2),  # a free page
    ):
        for call in (
            lambda: a.alloc_extend([prefix], [prefix + 1], [slot]),  # noqa: B023
            lambda: a.alloc_decode([prefix + 1], [slot]),  # noqa: B023
        ):
            refused(a, SlotOwnership, r"last_loc\[0\]: expected", call)
    refused(a, SlotOwnership, "page 2 twice", a.alloc_decode, [7, 7], [last, last])
    refused(a, SlotOwnership, "page 2 twice", a.alloc_extend, [6, 0, 6], [7, 4, 9], [last, -1, last])
    a.alloc_extend([8, 8], [9, 9], [two[-1], two[-1]])  # a shared prefix of whole pages forks
    a.check_integrity()


# Freeing


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("patched", [False, True])
def test_everything_freed_is_everything_available(page_size: int, patched: bool) -> None:
    a = HybridSlotAllocator(
        8 * page_size, 8 * page_size, page_size, on_patch=(lambda slots, values: None) if patched else None
    )
    for n in (1, 2, 3 * page_size + 1):
        slots = a.alloc(n)
        a.free(slots.to(torch.int32))
        a.free(a.alloc(n).flip(0).repeat(2))
        assert (a.available("full"), a.available("swa")) == (8 * page_size, 8 * page_size)
        assert not a.mapping[:-1].any()
        a.check_integrity()


@pytest.mark.parametrize(
    ("slot", "why"),
    [
        (-1, "out of range"),
        (-(2**63), "out of range"),
        (36, "out of range"),
        (2**62, "out of range"),
        (0, "reserved"),
        (3, "reserved"),
        (10, "never handed out, only 2 slots of its page are"),
        (12, "its page is free"),
        (35, "its page is free"),
    ],
)
def test_a_slot_that_is_not_handed_out_is_named_with_the_reason(slot: int, why: str) -> None:
    a = HybridSlotAllocator(32, 32, 4)
    slots = a.alloc(6).tolist()
    for call in (a.free, a.free_swa, a.rewind, a.restore_swa, a.require_owned):
        refused(a, SlotOwnership, f"slots: expected handed-out slots, got {slot}: {why}", call, [*slots, slot, 1])
    assert a.is_live([*slots, slot]).tolist() == [True] * 6 + [False]


def test_the_same_for_one_slot_at_page_size_one() -> None:
    a = HybridSlotAllocator(8, 8)
    slot = a.alloc(1)
    for bad in (-1, 0, 2, 8, 9, 10, 2**40, -(2**63)):
        refused(a, SlotOwnership, f"got {bad}:", a.free, torch.tensor([bad]))
    a.free(slot)
    refused(a, SlotOwnership, "its page is free: freed already", a.free, slot)
    refused(a, TypeError, "expected integers", a.free, torch.tensor([1.0]))
    refused(a, ValueError, "expected 1 dimensions", a.free, torch.tensor(1))


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_past_a_last_page_that_is_handed_out(page_size: int) -> None:
    a = HybridSlotAllocator(8, 8, page_size)
    a.alloc(8)
    rows, past = 8 + page_size, list(range(8 + page_size, 8 + 2 * page_size))
    for call in (a.free, a.free_swa, a.rewind, a.restore_swa, a.require_owned):
        refused(a, SlotOwnership, f"got {rows}: out of range", call, past)
    refused(a, SlotOwnership, "out of range", a.free_segments, [rows], [page_size])
    refused(a, SlotOwnership, r"last_loc\[0\]", a.alloc_decode, [page_size + 1], past[-1:])
    assert not a.is_live(past).any() and a.reusable_prefix(past) == 0


def test_part_of_a_page_is_refused() -> None:
    a = HybridSlotAllocator(32, 32, 4)
    slots = a.alloc(10)
    for call in (a.free, a.free_swa):
        refused(a, SlotOwnership, "part of a page at slot 9: 3 of 4 slots", call, slots[[0, 1, 2, 3, 5, 6, 7]])
        refused(a, SlotOwnership, "slot 13: 1 of 2 slots", call, slots[[9, 0, 1, 2, 3, 9]])
    a.free(slots[8:])  # all that is handed out of the page
    assert a.available() == 24


def test_freed_segments_are_whole_pages() -> None:
    a = HybridSlotAllocator(64, 64, 4)
    slots = a.alloc(40)
    a.free_swa(slots[:4])
    a.free_segments([4, 20, 24], [8, 8, 4])  # page 6 twice
    assert (a.available("full"), a.available("swa")) == (64 - 40 + 16, 64 - 40 + 16)
    assert not a.mapping[4:12].any() and not a.mapping[20:28].any() and a.mapping[12:20].all()
    partial = a.alloc(2)
    a.free_segments(partial[:1], [4])
    refused(a, SlotOwnership, "got 20: its page is free", a.free_segments, [12, 16], [4, 8])
    refused(a, SlotOwnership, "got 0: reserved", a.free_segments, [0], [4])
    refused(a, SlotOwnership, "got 68: out of range", a.free_segments, [68], [4])
    refused(a, SlotOwnership, "got -4: out of range", a.free_segments, [-4], [4])
    refused(a, ValueError, r"starts\[0\]: expected multiples of 4, got 13", a.free_segments, [13], [4])
    refused(a, ValueError, r"lengths\[0\]: expected multiples of 4", a.free_segments, [12], [3])
    refused(a, ValueError, "lengths", a.free_segments, [12], [-4])
    refused(a, ValueError, "lengths", a.free_segments, [12], [2**40])
    refused(a, ValueError, "expected equal lengths", a.free_segments, [12], [4, 4])


def test_free_swa_keeps_the_full_slots() -> None:
    a = HybridSlotAllocator(32, 32, 4)
    slots = a.alloc(10)
    a.free_swa(slots[4:])
    assert a.is_live(slots).tolist() == [True] * 4 + [False] * 6
    assert (a.available("full"), a.available("swa")) == (20, 28)
    before = snapshot(a)
    a.free_swa(slots[4:])
    assert snapshot(a) == before
    a.free(slots)
    assert (a.available("full"), a.available("swa")) == (32, 32)
    refused(a, SlotOwnership, "its page is free", a.free_swa, slots)


def test_rewind_takes_back_the_tail() -> None:
    a = HybridSlotAllocator(64, 64, 4)
    slots = a.alloc(11)
    other = a.alloc(3)
    a.rewind(torch.cat((slots[6:], other[1:])))
    assert a.available() == 64 - 3 * 4 and a.is_live(slots[:6]).all() and a.is_live(other[:1]).all()
    refused(a, SlotOwnership, "its page is free", a.require_owned, slots[8:])
    refused(a, SlotOwnership, "never handed out", a.require_owned, slots[6:8])
    assert a.alloc_extend([6], [8], [slots[5]]).tolist() == slots[6:8].tolist()
    refused(a, SlotOwnership, "expected the last slots .* slot 9: 2 of 4", a.rewind, slots[5:7])
    refused(a, SlotOwnership, "expected the last slots", a.rewind, [*slots[7:8], *slots[:1]])
    a.rewind(torch.cat((slots[:8], other[:1])))
    assert (a.available("full"), a.available("swa")) == (64, 64)


def test_restore_gives_new_peers_and_keeps_old_ones() -> None:
    a = HybridSlotAllocator(32, 32, 4)
    slots = a.alloc(10)
    old = a.mapping[slots].tolist()
    a.free_swa(slots[:4])
    a.alloc(1)  # takes the SWA page that was freed
    got = a.restore_swa(slots.flip(0)[[0, 5, 8, 8]])
    assert got.tolist() == [old[9], old[4], 17, 17]
    assert a.mapping[slots[:4]].tolist() == [16, 17, 18, 19]
    assert not np.shares_memory(got.numpy(), a.mapping)
    a.check_integrity()


# Windows


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("table_kind", ["tensor", "int32", "array"])
def test_evict_frees_what_no_later_query_sees(page_size: int, table_kind: str) -> None:
    a = HybridSlotAllocator(256, 256, page_size, window=8)
    lens = [40, 7, 8, 9, 30]
    table = torch.full((7, 64), -5)
    for i, n in enumerate(lens):
        table[i, :n] = a.alloc(n)
    convert = {"tensor": lambda t: t, "int32": lambda t: t.int(), "array": lambda t: t.numpy()}[table_kind]
    rows, query = [4, 0, 2, 1, 3], [30, 39, 8, 7, 9]
    cursor = a.evict_swa(convert(table), rows, [0] * 5, query)
    assert isinstance(cursor, np.ndarray) and cursor.dtype == np.int64
    for row, q, c in zip(rows, query, cursor.tolist(), strict=True):
        assert c == max(0, q - 8 + 1) // page_size * page_size
        assert a.is_live(table[row, : lens[row]]).tolist() == [p >= c for p in range(lens[row])]
    before = snapshot(a)
    assert a.evict_swa(convert(table), rows, cursor, np.array(query) - 3).tolist() == cursor.tolist()  # monotone
    assert snapshot(a) == before
    a.check_integrity()


def test_evict_of_a_shared_prefix_frees_it_once() -> None:
    a = HybridSlotAllocator(64, 64, 4, window=4)
    prefix = a.alloc(16)
    table = prefix.repeat(2, 1)
    assert a.evict_swa(table, [0, 1, 0], [0, 4, 0], [16, 16, 12]).tolist() == [12, 12, 8]
    assert a.available("swa") == 64 - 4
    assert a.evict_swa(table, [1], [0], [16]).tolist() == [12]  # gone already


def test_a_cursor_inside_a_page_goes_on_from_its_page() -> None:
    a = HybridSlotAllocator(64, 64, 4, window=4)
    table = a.alloc(16)[None]
    assert a.evict_swa(table, [0], [6], [16]).tolist() == [12]
    assert a.is_live(table[0]).tolist() == [True] * 4 + [False] * 8 + [True] * 4
    assert a.evict_swa(table, [0], [14], [16]).tolist() == [14]


def test_bad_evictions() -> None:
    a = HybridSlotAllocator(64, 64, 4, window=4)
    slots = a.alloc(16)
    table = torch.stack((slots, slots + 1, torch.zeros_like(slots)))
    refused(a, ValueError, r"req_to_token\[0\]: expected pages of slots", a.evict_swa, table, [1], [0], [16])
    refused(a, SlotOwnership, "got 0: reserved", a.evict_swa, table, [0, 2], [0, 0], [16, 16])
    refused(a, ValueError, r"rows\[1\]: expected 0 to 2, got 3", a.evict_swa, table, [0, 3], [0, 0], [16, 16])
    refused(a, ValueError, r"rows\[0\]", a.evict_swa, table, [-1], [0], [16])
    refused(a, ValueError, r"evicted\[0\]", a.evict_swa, table, [0], [-1], [16])
    refused(a, ValueError, r"next_query\[0\]", a.evict_swa, table, [0], [0], [17])
    refused(a, ValueError, r"next_query\[0\]", a.evict_swa, table, [0], [0], [-1])
    refused(a, ValueError, "equal lengths", a.evict_swa, table, [0], [0, 0], [16])
    refused(a, ValueError, "req_to_token: expected 2 dimensions", a.evict_swa, slots, [0], [0], [16])
    refused(a, TypeError, "req_to_token: expected integers", a.evict_swa, table.float(), [0], [0], [16])
    no_window = HybridSlotAllocator(64, 64, 4)
    refused(no_window, ValueError, "window: expected", no_window.evict_swa, table, [0], [0], [16])


def test_reusable_prefix_of_a_window_past_64_bits() -> None:
    allocator = HybridSlotAllocator(16, 16)
    assert allocator.reusable_prefix(allocator.alloc(5), 2**70) == 5


def test_reusable_prefix_of_a_batch() -> None:
    a = HybridSlotAllocator(64, 64, 4, window=5)
    slots = a.alloc(24)
    a.free_swa(slots[:12])
    rows = torch.full((5, 26), -1)
    rows[0, :24] = slots
    rows[1, :20] = slots[:20]
    rows[2, :15] = slots[:15]
    rows[3, :24] = slots
    rows[3, 17] = 0
    assert a.reusable_prefix(rows).tolist() == [24, 20, 0, 16, 0]
    assert a.reusable_prefix(rows, window=1).tolist() == [24, 20, 12, 16, 0]
    assert a.reusable_prefix(rows.numpy(), window=13).tolist() == [24, 0, 0, 0, 0]
    assert a.reusable_prefix(slots) == 24 and isinstance(a.reusable_prefix(slots), int)
    assert HybridSlotAllocator(64, 64).reusable_prefix(slots) == 0
    refused(a, ValueError, "window: expected at least 1", a.reusable_prefix, slots, 0)
    refused(a, ValueError, "slots: expected 1 or 2 dimensions", a.reusable_prefix, slots[None, None])


def test_without_a_known_window_every_position_must_be_live() -> None:
    a = HybridSlotAllocator(64, 64, 4)
    slots = a.alloc(24)
    assert a.reusable_prefix(slots) == 24
    a.free_swa(slots[8:12])
    assert a.reusable_prefix(slots) == 8


# Groups, clear, patches


def test_a_group_holds_pages_back_until_its_end() -> None:
    a = HybridSlotAllocator(16, 16)
    slots = a.alloc(16)
    with a.group_frees():
        a.free(slots[:1])
        a.free(slots[1:4])
        a.free_swa(slots[4:6])
        a.free_segments([7], [1])
        a.rewind(slots[7:8])
        refused(a, SlotOwnership, "its page is free", a.free, slots[:1])
        refused(a, OutOfSlots, "full side: need 1 slots, 0 free", a.alloc, 1)
        assert not a.mapping[1:9].any()
    assert (a.available("full"), a.available("swa")) == (6, 8)
    a.check_integrity()


def test_groups_do_not_nest() -> None:
    a = HybridSlotAllocator(16, 16)
    slots = a.alloc(4)
    with a.group_frees():
        a.free(slots)
        with pytest.raises(PortaKVError, match="group"), a.group_frees():
            pass
        assert a.available() == 12  # still open
    assert a.available() == 16
    with a.group_frees():
        pass


def test_clear_is_a_new_start() -> None:
    patched = []
    fresh = HybridSlotAllocator(32, 32, 4, on_patch=lambda slots, values: None)
    a = HybridSlotAllocator(32, 32, 4, on_patch=lambda slots, values: patched.append((slots, values)))
    mapping, slots = a.mapping, a.alloc(9)
    with a.group_frees():
        a.free(slots[:4])
        patched.clear()
        a.clear()
    assert snapshot(a)[:2] == snapshot(fresh)[:2] and a.mapping is mapping
    assert (a.available("full"), a.available("swa")) == (32, 32)
    assert a.alloc(32).tolist() == list(range(4, 36))
    assert [x.tolist() for x in patched[0]] == [list(range(8, 16)), [0] * 8]


def test_each_call_that_edits_the_map_patches_once() -> None:
    calls: list[tuple[list[int], list[int]]] = []
    a = HybridSlotAllocator(64, 64, 4, window=4, on_patch=lambda s, v: calls.append((s.tolist(), v.tolist())))
    copy = torch.from_numpy(a.mapping).clone()

    def edits(expected: int, call: Callable[..., Any], *args: Any) -> Any:
        calls.clear()
        result = call(*args)
        assert len(calls) == expected
        for slots, values in calls:
            copy[slots] = torch.tensor(values)
        assert copy.tolist() == a.mapping.tolist()
        return result

    slots = edits(1, a.alloc, 6, 1)
    assert calls == [([8, 9, 10, 11], [4, 5, 6, 7])]  # the whole page, also what is not handed out yet
    edits(0, a.alloc_extend, [6], [8], [slots[-1]])
    edits(0, a.alloc, 4, 0)
    edits(1, a.alloc_extend, [8, 0], [15, 9], [slots[-1] + 2, -1])
    edits(0, a.alloc_decode, [16], [22])
    edits(1, a.alloc_decode, [17], [23])
    edits(1, a.restore_swa, slots)
    edits(0, a.restore_swa, slots)
    edits(1, a.free_swa, slots[:4])
    edits(0, a.free_swa, slots[:4])
    edits(1, a.evict_swa, torch.tensor([[*range(8, 12), *range(4, 8)]]), [0], [0], [8])
    with a.group_frees():
        edits(1, a.free_segments, [16], [8])
    edits(0, a.rewind, [9, 10, 11])
    edits(1, a.rewind, [4, 5, 6, 7, 8, 24, 25, 26, 27])
    edits(1, a.clear)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_patch_that_fails_has_changed_nothing(page_size: int) -> None:
    """As on a device without memory for the edits, or while a graph is captured."""
    full = False

    def patch(slots: Any, values: Any) -> None:
        if full:
            raise MemoryError("no room for the edits")

    a = HybridSlotAllocator(16 * page_size, 16 * page_size, page_size, window=1, on_patch=patch)
    a.free(torch.cat([a.alloc(2 * page_size), a.alloc(page_size)]))
    held, bare = a.alloc(3 * page_size), a.alloc(page_size, swa_tail=0)
    part = a.alloc(1, swa_tail=0)
    table = held.numpy()[None]
    full = True
    for call, *args in (
        (a.alloc, 1),
        (a.alloc, 2 * page_size + 1),
        (a.alloc_extend, [1, 0], [page_size + 2, 5], [part[0] if page_size > 1 else bare[0], -1]),
        (a.alloc_decode, [3 * page_size + 1, 1], [held[-1], -1]),
        (a.restore_swa, bare),
        (a.free, held),
        (a.free_swa, held),
        (a.free_segments, [held[0]], [page_size]),
        (a.rewind, held[page_size:]),
        (a.evict_swa, table, [0], [0], [3 * page_size]),
        (a.clear,),
    ):
        refused(a, MemoryError, "no room", call, *args)
    with a.group_frees():
        refused(a, MemoryError, "no room", a.free, held)
    full = False
    a.free(torch.cat([held, bare, part]))
    assert a.available("full") == a.available("swa") == 16 * page_size


@pytest.mark.parametrize("strides", ["rows", "columns", "a view"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_entries_of_a_table_on_a_device(strides: str, dtype: torch.dtype) -> None:
    """On any device a tensor's entries are gathered where it lies; here it lies on the host."""
    table = torch.arange(40, dtype=dtype).reshape(5, 8)
    table = {"rows": table, "columns": table.T.contiguous().T, "a view": table[1:, ::2]}[strides]
    for n in (0, 1, 7):
        rows, columns = np.arange(n) % 4, np.arange(n) * 3 % 4
        got = entries(table, rows, columns)
        assert got.dtype == np.int64
        assert np.array_equal(got, table.numpy()[rows, columns])


def test_one_slot_of_a_page_of_one_patches_too() -> None:
    calls: list[list[list[int]]] = []
    a = HybridSlotAllocator(8, 8, on_patch=lambda s, v: calls.append([s.tolist(), v.tolist()]))
    a.free(a.alloc(1))
    assert calls == [[[1], [1]], [[1], [0]]]


def test_the_mapping_is_shared_and_never_replaced() -> None:
    a = HybridSlotAllocator(32, 32, 4)
    shared = torch.from_numpy(a.mapping)
    a.free(a.alloc(9)[:4])
    assert shared[8:16].tolist() == list(range(8, 16))
    a.clear()
    assert not shared[:-1].any() and shared[-1] == -1


def test_available_knows_two_sides() -> None:
    with pytest.raises(ValueError, match="side: expected"):
        HybridSlotAllocator(4).available("both")


# The integrity check must be able to fail


def corrupt_map(a: HybridSlotAllocator) -> None:
    a.mapping[9] += 1


def shift_map(a: HybridSlotAllocator) -> None:
    a.mapping[8:12] += 1


def overwrite_end(a: HybridSlotAllocator) -> None:
    a.mapping[-1] = 0


def map_reserved_page(a: HybridSlotAllocator) -> None:
    a.mapping[0:4] = a.mapping[4:8]
    a.mapping[4:8] = 0


def map_free_page(a: HybridSlotAllocator) -> None:
    a.mapping[32:36] = a.mapping[4:8]
    a.mapping[4:8] = 0


def share_swa_page(a: HybridSlotAllocator) -> None:
    a.mapping[8:12] = a.mapping[4:8]


def free_owned_page(a: HybridSlotAllocator) -> None:
    a._pages.full.push_one(1)


def repeat_free_page(a: HybridSlotAllocator) -> None:
    a._pages.full.stack[0] = a._pages.full.stack[1]


def leak_full_page(a: HybridSlotAllocator) -> None:
    a._pages.full.top -= 1


def leak_swa_page(a: HybridSlotAllocator) -> None:
    a.mapping[4:8] = 0


def free_mapped_swa_page(a: HybridSlotAllocator) -> None:
    a._pages.swa.push_one(1)


def queue_owned_page(a: HybridSlotAllocator) -> None:
    a._pages.queue = [(np.array([1]), np.array([], np.int64))]


def overfill(a: HybridSlotAllocator) -> None:
    a._pages.fill[1] = 5


def free_reserved_page(a: HybridSlotAllocator) -> None:
    a._pages.swa.stack[0] = 0


@pytest.mark.parametrize(
    "damage",
    [
        corrupt_map,
        shift_map,
        overwrite_end,
        map_reserved_page,
        map_free_page,
        share_swa_page,
        free_owned_page,
        repeat_free_page,
        leak_full_page,
        leak_swa_page,
        free_mapped_swa_page,
        queue_owned_page,
        overfill,
        free_reserved_page,
    ],
)
def test_check_integrity_finds_damage(damage: Callable[[HybridSlotAllocator], None]) -> None:
    a = HybridSlotAllocator(32, 32, 4)
    a.alloc(10)
    a.free(a.alloc(8))
    a.check_integrity()
    damage(a)
    with pytest.raises(IntegrityError):
        a.check_integrity()
