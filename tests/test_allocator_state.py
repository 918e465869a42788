"""The allocator against a model in plain dicts and sets: random calls, good and bad, at four page sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from portakv.allocator import HybridSlotAllocator
from portakv.errors import OutOfSlots, PortaKVError, SlotOwnership


def snapshot(a: HybridSlotAllocator) -> tuple[Any, ...]:
    """Every byte of the allocator's state."""
    pages = a._pages
    stacks = [(side.top, side.stack.tobytes()) for side in (pages.full, pages.swa)]
    queue = None if pages.queue is None else [(f.tolist(), s.tolist()) for f, s in pages.queue]
    return a.mapping.tobytes(), pages.fill.tobytes(), pages.unwritten.tobytes(), stacks, queue


class Model(RuleBasedStateMachine):
    """Sequences are lists of slots, and `held` counts how many sequences share a page (a common prefix).

    `fill` maps each handed-out full page to its number of slots, `peer` to its SWA page. `stale` are the slots whose
    page got its peer after them.
    """

    page_size: int
    has_swa: bool
    patched: bool
    num_pages, num_swa_pages, window = 14, 9, 0

    def __init__(self) -> None:
        super().__init__()
        page = self.page_size
        self.window = page + 2
        self.patches = 0
        self.a = HybridSlotAllocator(
            self.num_pages * page + page - 1,
            self.num_swa_pages * page if self.has_swa else None,
            page,
            window=self.window,
            on_patch=self.repeat if self.patched else None,
        )
        self.copy = self.a.mapping.copy()
        self.fill: dict[int, int] = {}
        self.peer: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.stale: set[int] = set()
        self.queued: dict[str, set[int]] = {"full": set(), "swa": set()}
        self.sequences: list[list[int]] = []
        self.group = ExitStack()
        self.grouped = False

    def repeat(self, slots: Any, values: Any) -> None:
        assert slots.dtype == values.dtype == np.int64 and slots.shape == values.shape and slots.size
        np.testing.assert_array_equal(self.copy, self.a.mapping)  # the device may still refuse: nothing has changed
        self.copy[slots] = values
        self.patches += 1

    def refused(self, error: type[Exception], call: Callable[..., Any], *args: Any) -> None:
        before = snapshot(self.a)
        with pytest.raises(error):
            call(*args)
        assert snapshot(self.a) == before

    # The model's own arithmetic, page by page

    def free_pages(self, side: str) -> set[int]:
        total, used = (
            (self.num_pages, self.fill.keys())
            if side == "full"
            else (self.num_swa_pages * self.has_swa, self.peer.values())
        )
        return set(range(1, total + 1)) - set(used) - self.queued[side]

    def plan(self, prefix: int, seq: int, tail: int | None) -> tuple[int, list[int]]:
        """Pages to take, and the positions' page numbers that need a peer, for one sequence."""
        page = self.page_size
        new = range(-(-prefix // page), -(-seq // page))
        first = 0 if tail is None else max(seq - tail, 0)
        wanted = {p // page for p in range(prefix, seq) if p // page >= first // page and tail != 0}
        return len(new), sorted(wanted) if self.has_swa else []

    def grow(self, sequence: list[int], slots: list[int], wanted: list[int]) -> None:
        page = self.page_size
        free_full, free_swa = self.free_pages("full"), self.free_pages("swa")
        for slot in slots:
            if len(sequence) % page == 0:
                assert slot % page == 0 and slot // page in free_full
                self.fill[slot // page] = 0
                self.held[slot // page] = 1
                free_full.discard(slot // page)
            else:
                assert slot == sequence[-1] + 1
            self.fill[slot // page] += 1
            sequence.append(slot)
        for number in wanted:
            full = sequence[number * page] // page
            if full not in self.peer:
                swa = int(self.a.mapping[full * page]) // page
                assert swa in free_swa
                free_swa.discard(swa)
                self.peer[full] = swa
                self.stale |= {slot for slot in sequence if slot // page == full} - set(slots)

    def drop_peers(self, pages: set[int]) -> None:
        for page in pages & self.peer.keys():
            swa = self.peer.pop(page)
            self.stale = {slot for slot in self.stale if slot // self.page_size != page}
            if self.grouped:
                self.queued["swa"].add(swa)

    def drop(self, pages: set[int]) -> None:
        self.drop_peers(pages)
        for page in pages:
            del self.fill[page], self.held[page]
            if self.grouped:
                self.queued["full"].add(page)

    def let_go(self, sequence: list[int]) -> set[int]:
        """Forget a sequence; the pages that no other one holds."""
        pages = {slot // self.page_size for slot in sequence}
        for page in pages:
            self.held[page] -= 1
        return {page for page in pages if self.held[page] == 0}

    def slots_of(self, pages: set[int]) -> list[int]:
        return [p * self.page_size + i for p in sorted(pages) for i in range(self.fill[p])]

    def is_live(self, slot: int) -> bool:
        return slot // self.page_size in self.peer and slot not in self.stale

    def own(self, sequence: list[int]) -> bool:
        """Whether no other sequence shares the last page, so that it can grow or shrink."""
        return self.held[sequence[-1] // self.page_size] == 1

    # Rules

    def tokens(self, data: st.DataObject, pages: int) -> int:
        """Up to so many pages of tokens, where most numbers are not whole pages."""
        return data.draw(st.integers(0, 1000)) % (pages * self.page_size + 1)

    @rule(data=st.data(), everything=st.booleans())
    def alloc(self, data: st.DataObject, everything: bool) -> None:
        n, tail = self.tokens(data, 5), None if everything else self.tokens(data, 4)
        count, wanted = self.plan(0, n, tail)
        for side, need in (("full", count), ("swa", len(wanted))):
            if need > len(self.free_pages(side)):
                before = snapshot(self.a)
                with pytest.raises(OutOfSlots) as caught:
                    self.a.alloc(n, tail)
                assert snapshot(self.a) == before
                free = len(self.free_pages(side)) * self.page_size
                assert (caught.value.side, caught.value.need, caught.value.free) == (
                    side,
                    need * self.page_size,
                    free,
                )
                return
        slots = self.a.alloc(n, tail).tolist()
        assert len(slots) == n
        if n:
            self.sequences.append([])
            self.grow(self.sequences[-1], slots, wanted)

    @rule(data=st.data(), fresh=st.integers(0, 2), everything=st.booleans())
    def extend(self, data: st.DataObject, fresh: int, everything: bool) -> None:
        mine = [s for s in self.sequences if self.own(s)][:4]
        batch: list[list[int]] = [*mine, *([] for _ in range(fresh))]
        grow, tail = [self.tokens(data, 2) for _ in batch], None if everything else self.tokens(data, 3)
        prefix = [len(s) for s in batch]
        seq = [p + g for p, g in zip(prefix, grow, strict=True)]
        last = [s[-1] if s else -1 for s in batch]
        plans = [self.plan(p, n, tail) for p, n in zip(prefix, seq, strict=True)]
        bare = 0
        for s, (_, wanted) in zip(batch, plans, strict=True):
            numbers = [s[i * self.page_size] // self.page_size if i * self.page_size < len(s) else 0 for i in wanted]
            bare += sum(page not in self.peer for page in numbers)
        if sum(c for c, _ in plans) > len(self.free_pages("full")) or bare > len(self.free_pages("swa")):
            self.refused(OutOfSlots, self.a.alloc_extend, prefix, seq, last, tail)
            return
        slots = self.a.alloc_extend(torch.tensor(prefix), np.array(seq, np.int32), last, tail).tolist()
        assert len(slots) == sum(grow)
        for s, g, (_, wanted) in zip(batch, grow, plans, strict=True):
            self.grow(s, slots[:g], wanted)
            slots = slots[g:]
        self.sequences += [s for s in batch[len(mine) :] if s]

    @rule()
    def decode(self) -> None:
        batch = [s for s in self.sequences if self.own(s)]
        seq, last = [len(s) + 1 for s in batch], [s[-1] for s in batch]
        page = self.page_size
        new = sum(len(s) % page == 0 for s in batch)
        bare = new + sum(len(s) % page != 0 and s[-1] // page not in self.peer for s in batch)
        if new > len(self.free_pages("full")) or bare * self.has_swa > len(self.free_pages("swa")):
            self.refused(OutOfSlots, self.a.alloc_decode, seq, last)
            return
        slots = self.a.alloc_decode(seq, last).tolist()
        for s, slot in zip(batch, slots, strict=True):
            self.grow(s, [slot], [len(s) // page] if self.has_swa else [])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.sequences))
        pages = data.draw(st.integers(0, len(source) // self.page_size))
        if pages:
            self.sequences.append(source[: pages * self.page_size])
            for page in {slot // self.page_size for slot in self.sequences[-1]}:
                self.held[page] += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), way=st.sampled_from(("free", "shuffled", "segments", "rewind")))
    def free(self, data: st.DataObject, way: str) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        pages = self.let_go(sequence)
        slots = self.slots_of(pages)
        if way == "segments":
            starts = [p * self.page_size for p in pages]
            self.a.free_segments(starts, [self.page_size] * len(starts))
        elif way == "rewind":
            self.a.rewind(slots)
        elif way == "shuffled":
            self.a.free(data.draw(st.permutations(slots + slots[:2])))
        else:
            self.a.free(torch.tensor(slots, dtype=torch.int64))
        self.drop(pages)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        keep = data.draw(st.integers(0, len(sequence)))
        slots = sequence[keep:]
        if any(self.held[slot // self.page_size] > 1 for slot in slots):
            return
        self.a.rewind(slots)
        del sequence[keep:]
        left = {slot // self.page_size for slot in sequence}
        gone = {slot // self.page_size for slot in slots} - left
        for slot in slots:
            self.fill[slot // self.page_size] -= 1
        self.stale -= set(slots)
        self.drop(gone)
        if not sequence:
            self.sequences.remove(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free_swa(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        pages = sorted({slot // self.page_size for slot in sequence})
        some = set(data.draw(st.lists(st.sampled_from(pages))))
        self.a.free_swa(self.slots_of(some))
        self.drop_peers(some)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        slots = data.draw(st.lists(st.sampled_from(sequence)))
        bare = {slot // self.page_size for slot in slots} - self.peer.keys()
        if len(bare) > len(self.free_pages("swa")):
            self.refused(OutOfSlots, self.a.restore_swa, slots)
        else:
            free = self.free_pages("swa")
            swa = self.a.restore_swa(slots).tolist()
            assert swa == self.a.mapping[slots].tolist()
            for page in bare:
                self.peer[page] = int(self.a.mapping[page * self.page_size]) // self.page_size
                self.stale |= {page * self.page_size + i for i in range(self.fill[page])}
            new = [self.peer[page] for page in bare]
            assert len(set(new)) == len(new) and set(new) <= free

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.stale))))
        self.a.mark_written(slots)
        for slot in sorted(slots, reverse=True):  # only behind what still waits
            if not any(other // self.page_size == slot // self.page_size and other > slot for other in self.stale):
                self.stale.discard(slot)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), before=st.integers(0, 3), first=st.booleans())
    def evict(self, data: st.DataObject, before: int, first: bool) -> None:
        page, width = self.page_size, max(map(len, self.sequences))
        table = np.zeros((len(self.sequences), width), np.int32)
        for i, s in enumerate(self.sequences):
            table[i, : len(s)] = s
        rows = data.draw(st.lists(st.integers(0, len(self.sequences) - 1), min_size=1, max_size=4))
        query = [max(0, len(self.sequences[r]) - before) for r in rows]
        cursor = [0 if first else self.tokens(data, len(self.sequences[r]) // page) for r in rows]
        got = self.a.evict_swa(torch.from_numpy(table), rows, cursor, query)
        for r, c, q, new in zip(rows, cursor, query, got.tolist(), strict=True):
            gone = [p for p in range(len(self.sequences[r])) if p < q and p <= q - self.window]  # unseen from q on
            frontier = len(gone) // page * page
            assert new == max(c, frontier)
            self.drop_peers({self.sequences[r][p] // page for p in range(c // page * page, frontier)})

    @rule()
    def clear(self) -> None:
        if len(self.sequences) < 4:
            return
        self.a.clear()
        self.fill, self.peer, self.held, self.stale, self.sequences = {}, {}, {}, set(), []
        self.queued = {"full": set(), "swa": set()}

    @rule()
    def open_or_close_group(self) -> None:
        if self.grouped:
            self.refused(PortaKVError, self.a.group_frees().__enter__)
            self.group.close()
            self.queued = {"full": set(), "swa": set()}
        else:
            self.group.enter_context(self.a.group_frees())
        self.grouped = not self.grouped

    @rule(data=st.data())
    def bad_calls(self, data: st.DataObject) -> None:
        page, rows = self.page_size, self.num_pages * self.page_size + self.page_size
        owned = {slot for s in self.sequences for slot in s}
        foreign = data.draw(st.integers(-3, rows + 2).filter(lambda slot: slot not in owned))
        mixed = [foreign, *sorted(owned)[:page]]
        for call in (self.a.free, self.a.free_swa, self.a.rewind, self.a.require_owned):
            self.refused(SlotOwnership, call, mixed)
        if self.has_swa:
            self.refused(SlotOwnership, self.a.restore_swa, mixed)
        start = foreign // page * page
        if start // page not in self.fill:
            self.refused(SlotOwnership, self.a.free_segments, [start], [page])
        self.refused(SlotOwnership, self.a.alloc_decode, [2], [foreign])
        for s in self.sequences[:2]:
            pages = {slot // page for slot in s}
            if len(s) > 1 and page > 1 and self.fill[s[0] // page] > 1:
                self.refused(SlotOwnership, self.a.free, s[1:])
                self.refused(SlotOwnership, self.a.free_swa, s[1:])
                self.refused(SlotOwnership, self.a.rewind, s[:1])
            if len(s) % page:
                n = len(s) + 1
                self.refused(SlotOwnership, self.a.alloc_decode, [n, n], [s[-1], s[-1]])
                self.refused(SlotOwnership, self.a.alloc_extend, [n], [n], [s[-1]])
            self.refused(ValueError, self.a.alloc_extend, [len(s)], [len(s) - 1], [s[-1]])
            assert pages <= self.fill.keys()

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        page = self.page_size
        window = data.draw(st.integers(1, 3 * page))
        live = [self.is_live(slot) for s in self.sequences for slot in s]
        assert self.a.is_live([slot for s in self.sequences for slot in s]).tolist() == live
        width = max(map(len, self.sequences), default=0) + 2
        table = np.full((len(self.sequences), width), -1)
        best = []
        for i, s in enumerate(self.sequences):
            table[i, : len(s)] = s
            good = [
                n
                for n in range(0, len(s) + 1, page)
                if not self.has_swa or all(map(self.is_live, s[max(0, n - window + 1) : n]))
            ]
            best.append(max(good))
        assert self.a.reusable_prefix(table, window).tolist() == best
        if self.sequences:
            assert self.a.reusable_prefix(torch.from_numpy(table[0]), window) == best[0]

    @invariant()
    def agrees(self) -> None:
        self.a.check_integrity()
        page = self.page_size
        expected = np.zeros_like(self.a.mapping)
        for full, swa in self.peer.items():
            expected[full * page : (full + 1) * page] = np.arange(swa * page, (swa + 1) * page)
        expected[-1] = -1
        np.testing.assert_array_equal(self.a.mapping, expected)
        if self.patched:
            np.testing.assert_array_equal(self.copy, expected)
        assert {int(p): int(n) for p, n in enumerate(self.a._pages.fill) if n} == self.fill
        for side in ("full", "swa"):
            assert self.a.available(side) == len(self.free_pages(side)) * page


@pytest.mark.parametrize("has_swa", [True, False], ids=["hybrid", "full_only"])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_allocator_agrees_with_the_model(page_size: int, has_swa: bool) -> None:
    for patched in (False, True) if has_swa else (False,):
        kind = type("Case", (Model,), {"page_size": page_size, "has_swa": has_swa, "patched": patched})
        run_state_machine_as_test(
            kind,
            settings=settings(
                max_examples=20,
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
