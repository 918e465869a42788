"""HybridPages: which pages of either side are free, and which SWA page stands behind which full page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portakv.arguments import Bools, Ints
from portakv.errors import IntegrityError, OutOfSlots

OnPatch = Callable[[Ints, Ints], None]
"""Gets the slots whose mapping is about to change, and what it becomes. What it raises refuses the whole call."""

NO_PAGES: Ints = np.empty(0, np.int64)
_NO_PEER: Ints = np.zeros((1, 1), np.int64)


class HybridPages:
    """The state behind `HybridSlotAllocator`, in pages: its callers have checked what they ask for.

    `fill` is how many slots of each full page are handed out, always the first ones; 0 is a free page. `unwritten` is
    how many of them, also the first ones, have a peer that holds another token's bytes. `mapping` is the allocator's,
    `[size + page_size + 1]`; `peer` views its entry of each page's first slot.

    `journal` has what takes back each edit since its owner emptied it, the newest last.
    """

    def __init__(self, size: int, swa_size: int, page_size: int, on_patch: OnPatch | None) -> None:
        self.page_size = page_size
        self.full = FreePages("full", size // page_size)
        self.swa = FreePages("swa", swa_size // page_size)
        self.queue: list[tuple[Ints, Ints]] | None = None  # full and SWA pages freed while a group is open
        self.on_patch = on_patch
        self.num_rows = size + page_size
        self.fill = np.zeros(self.num_rows // page_size, np.min_scalar_type(page_size))
        self.unwritten = np.zeros_like(self.fill)
        self.mapping: Ints = np.zeros(self.num_rows + 1, np.int64)
        self.mapping[-1] = -1
        self._map = self.mapping[:-1].reshape(-1, page_size)  # a view
        self.peer = self._map[:, 0]
        self._offsets = np.arange(page_size)
        self.has_swa = swa_size > 0
        self.journal: list[Callable[[], None]] = []

    @staticmethod
    def host_bytes(full: int, swa: int, page_size: int) -> int:
        """Bytes of the arrays for so many pages of either side."""
        stacks = sum(count * np.dtype(FreePages.dtype(count)).itemsize for count in (full, swa))
        fill = (full + 1) * np.min_scalar_type(page_size).itemsize
        return 8 * ((full + 1) * page_size + 1) + 2 * fill + stacks

    def next_free(self, full: int, swa: int) -> tuple[Ints, Ints]:
        """The pages that both free lists would give next, for `edit`, or `OutOfSlots`."""
        for side, need in ((self.full, full), (self.swa, swa)):
            if need > side.top:
                raise OutOfSlots(side.name, need * self.page_size, side.top * self.page_size)
        return self.full.next(full), self.swa.next(swa)

    def edit(
        self,
        *,
        fill: tuple[Ints, Ints | int] | None = None,
        unwritten: tuple[Ints, Ints | int] | None = None,
        peers: tuple[Ints, Ints | None] | None = None,
        taken: tuple[int, int] = (0, 0),
        freed: tuple[Ints, Ints] | None = None,
    ) -> None:
        """Change the state, in one step that the journal can take back.

        `fill` and `unwritten` are (full pages, their new values), `peers` (full pages, their SWA pages or None).
        `taken` counts the pages of `next_free` that are handed out on either side, `freed` are pages that go back.
        """
        changes: list[tuple[np.ndarray[Any, Any], Any, Any]] = []
        mapped = NO_PAGES if peers is None else peers[0]
        if peers is not None and mapped.size:
            changes.append((self._map, mapped, self._rows_of(peers[1])))
        if fill is not None:
            changes.append((self.fill, *fill))
        if unwritten is not None and unwritten[0].size:
            changes.append((self.unwritten, *unwritten))
        tops = [self.full.top - taken[0], self.swa.top - taken[1]]
        if freed is not None and self.queue is None:
            for i, (side, pages) in enumerate(((self.full, freed[0]), (self.swa, freed[1]))):
                if pages.size:
                    changes.append((side.stack, slice(tops[i], tops[i] + pages.size), pages[::-1]))
                    tops[i] += pages.size
        self._remember(changes, mapped)
        if mapped.size:
            self._patch(mapped, peers[1] if peers else None)
        for array, at, value in changes:
            array[at] = value
        self.full.top, self.swa.top = tops
        if freed is not None and self.queue is not None:
            self.queue.append(freed)

    def put_back(self, full: Ints, bare: Ints, left: Ints | None = None) -> None:
        """Free the `full` pages, or all but `left` slots of each, and the SWA peers that the `bare` pages have."""
        bare = bare[self.peer[bare] != 0]
        empty, waits = (full, bare) if left is None else (full[left == 0], full)
        unwritten = self.unwritten[waits]
        self.edit(
            fill=(full, 0 if left is None else left),
            unwritten=(waits, 0 if left is None else np.minimum(unwritten, left)) if unwritten.any() else None,
            peers=(bare, None),
            freed=(empty, self.peer[bare] // self.page_size),
        )

    def undo(self, mark: int = 0) -> None:
        """Take back what the journal has from entry `mark` on. To be called again where it was interrupted."""
        while len(self.journal) > mark:
            self.journal[-1]()
            self.journal.pop()

    def _remember(self, changes: list[tuple[np.ndarray[Any, Any], Any, Any]], mapped: Ints = NO_PAGES) -> None:
        """Enter what takes `changes`, at places of arrays, and those of the free lists back."""
        old = [(array, at, array[at].copy() if type(at) is slice else array[at]) for array, at, _ in changes]
        full_top, swa_top, queue, queued = self.full.top, self.swa.top, self.queue, len(self.queue or ())

        def undo() -> None:
            for array, at, value in old:
                array[at] = value
            self.full.top, self.swa.top, self.queue = full_top, swa_top, queue
            if queue is not None:
                del queue[queued:]
            if mapped.size:
                self._patch(mapped, self.peer[mapped] // self.page_size, undoes=True)

        self.journal.append(undo)

    def _patch(self, pages: Ints, peers: Ints | None, undoes: bool = False) -> None:
        """Tell the device's copy of the mapping, before anything else changes. What it raises refuses the edit."""
        if self.on_patch is None:
            return
        try:
            rows = self._rows_of(pages)
            # An edit gives all of its pages peers or takes them all; what takes one back may mix.
            values = np.zeros_like(rows) if peers is None else np.where(peers[:, None] != 0, self._rows_of(peers), 0)
            self.on_patch(rows.ravel(), values.ravel())
        except Exception:
            if not undoes:  # there is nothing to take back; what interrupts a patch leaves that to the journal
                self.journal.pop()
            raise

    def _rows_of(self, pages: Ints | None) -> Ints:
        """The slots `[n, page_size]` of pages of either side; None is the reserved one's first."""
        return _NO_PEER if pages is None else pages[:, None] * self.page_size + self._offsets

    def slots_of(self, pages: Ints) -> Ints:
        return self._rows_of(pages).ravel()

    # next_free and edit of one page of one slot, in scalars: a tenth of what arrays take

    @property
    def takes_scalars(self) -> bool:
        return self.page_size == 1 and self.on_patch is None and self.queue is None

    def take_one(self) -> Ints:
        page, swa = self.next_free(1, int(self.has_swa))
        at, full_top, swa_top = page[0], self.full.top, self.swa.top

        def undo() -> None:
            self.full.top, self.swa.top = full_top, swa_top
            self.fill[at] = self.mapping[at] = 0

        self.journal.append(undo)
        self.full.top = full_top - 1
        self.fill[at] = 1
        if self.has_swa:
            self.swa.top = swa_top - 1
            self.mapping[at] = swa[0]
        return page

    def put_back_one(self, page: int) -> None:
        full, swa, peer, unwritten = self.full, self.swa, self.mapping[page], self.unwritten[page]
        full_top, full_page = full.top, full.stack[full.top]
        swa_top, swa_page = swa.top, swa.stack[swa.top] if peer else 0

        def undo() -> None:
            full.top, full.stack[full_top] = full_top, full_page
            self.fill[page], self.mapping[page], self.unwritten[page] = 1, peer, unwritten
            if peer:
                swa.top, swa.stack[swa_top] = swa_top, swa_page

        self.journal.append(undo)
        self.fill[page] = self.unwritten[page] = 0
        full.push_one(page)
        if peer:
            self.mapping[page] = 0
            swa.push_one(peer)

    def open_group(self) -> None:
        """Keep what is put back from the free lists until `close_group`."""
        self._remember([])
        self.queue = []

    def close_group(self) -> None:
        queue = self.queue or []
        self._remember([])
        self.queue = None
        full, swa = (np.concatenate([NO_PAGES, *(pages[side] for pages in reversed(queue))]) for side in (0, 1))
        self.edit(freed=(full, swa))

    def clear(self) -> None:
        """All pages free, in the initial order."""
        arrays = (self.fill, self.unwritten, self.full.stack, self.swa.stack, self._map)
        mapped = np.flatnonzero(self.peer)
        self._remember([(array, slice(None), None) for array in arrays], mapped)
        if mapped.size:
            self._patch(mapped, None)
        self._map[:] = 0
        self.full.reset()
        self.swa.reset()
        self.fill[:] = self.unwritten[:] = 0
        self.queue = None if self.queue is None else []

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless each page is free, owned or queued exactly once, and mapped whole."""
        page, peer, queue = self.page_size, self.peer, self.queue or []
        for side, owned, queued in (
            (self.full, np.flatnonzero(self.fill), [full for full, _ in queue]),
            (self.swa, peer[peer != 0] // page, [swa for _, swa in queue]),
        ):
            pages = np.sort(np.concatenate((side.stack[: side.top], owned, *queued)))
            if not np.array_equal(pages, np.arange(1, side.stack.size + 1)):
                raise IntegrityError(f"{side.name} side: a page is not free, owned or queued exactly once")
        if (self.fill > page).any():
            raise IntegrityError("full side: more slots are handed out of a page than it has")
        if (self.unwritten > np.where(peer != 0, self.fill, 0)).any():
            raise IntegrityError("full side: more slots wait for SWA bytes than a page with a peer has handed out")
        if self.mapping[-1] != -1 or peer[self.fill == 0].any():
            raise IntegrityError("mapping: the last entry is not -1, or a page not handed out has a peer")
        whole = np.where(peer[:, None] != 0, self.slots_of(peer // page).reshape(-1, page), 0)
        if not np.array_equal(self._map, whole):
            raise IntegrityError("mapping: a full page is not mapped to one whole SWA page")


class FreePages:
    """The free pages of one side: a stack, so that what was freed last, still warm in caches, goes first.

    Pages put back together come out in ascending order, as they do at first.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.stack = np.empty(count, self.dtype(count))
        self.reset()

    @staticmethod
    def dtype(count: int) -> type[np.signedinteger]:
        return np.int32 if count < 2**31 else np.int64

    def reset(self) -> None:
        self.top = self.stack.size
        self.stack[:] = np.arange(self.top, 0, -1)

    def next(self, count: int) -> Ints:
        return self.stack[self.top - count : self.top][::-1].astype(np.int64)

    def push(self, pages: Ints) -> None:
        begin, self.top = self.top, self.top + pages.size
        self.stack[begin : self.top] = pages[::-1]

    def push_one(self, page: int | np.int64) -> None:
        self.stack[self.top] = page
        self.top += 1


def ascending(values: Ints) -> Ints:
    """Sorted, each once. Not np.unique, which hashes: ten times the time of a sort for 4096 slots."""
    if (values[1:] > values[:-1]).all():
        return values
    ordered = np.sort(values)
    return ordered[is_first(ordered)]


def is_first(ordered: Ints) -> Bools:
    """Where a value differs from the one before it."""
    first = np.ones(ordered.size, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return first


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """arange(start, start + length) of each pair, concatenated."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(lengths.sum())
