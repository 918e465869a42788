"""HybridPages: which pages of either side are free, and which SWA page stands behind which full page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from portakv.arrays import Ints
from portakv.errors import IntegrityError, OutOfSlots

OnPatch = Callable[[Ints, Ints], None]
"""Gets the slots whose mapping is about to change, and what it becomes. What it raises refuses the whole call."""


class HybridPages:
    """The state behind `HybridSlotAllocator`, in pages: its callers have checked what they ask for.

    `fill` is how many slots of each full page are handed out, always the first ones; 0 is a free page.
    `mapping` is the allocator's, `[size + page_size + 1]`; `peer` views its entry of each page's first slot.
    """

    def __init__(self, size: int, swa_size: int, page_size: int, on_patch: OnPatch | None) -> None:
        self.page_size = page_size
        self.full = FreePages("full", size // page_size)
        self.swa = FreePages("swa", swa_size // page_size)
        self.queue: list[tuple[Ints, Ints]] | None = None  # full and SWA pages freed while a group is open
        self.on_patch = on_patch
        self.num_rows = size + page_size
        self.fill = np.zeros(self.num_rows // page_size, np.min_scalar_type(page_size))
        self.mapping: Ints = np.zeros(self.num_rows + 1, np.int64)
        self.mapping[-1] = -1
        self._map = self.mapping[:-1].reshape(-1, page_size)  # a view
        self.peer = self._map[:, 0]
        self._offsets = np.arange(page_size)
        self.has_swa = swa_size > 0

    @staticmethod
    def host_bytes(full: int, swa: int, page_size: int) -> int:
        """Bytes of the arrays for so many pages of either side."""
        stacks = sum(count * np.dtype(FreePages.dtype(count)).itemsize for count in (full, swa))
        fill = (full + 1) * np.min_scalar_type(page_size).itemsize
        return 8 * ((full + 1) * page_size + 1) + fill + stacks

    def next_free(self, full: int, swa: int) -> tuple[Ints, Ints]:
        """The pages that both free lists would give next, for `take`, or `OutOfSlots`."""
        for side, need in ((self.full, full), (self.swa, swa)):
            if need > side.top:
                raise OutOfSlots(side.name, need * self.page_size, side.top * self.page_size)
        return self.full.next(full), self.swa.next(swa)

    def take(self, full: Ints, fill: Ints | int, bare: Ints, swa: Ints) -> None:
        """Hand out pages of `next_free`: `fill` slots of each `full` page, and the `swa` pages behind the `bare`."""
        self._point(bare, swa)
        self.full.top -= full.size
        self.swa.top -= swa.size
        self.fill[full] = fill

    def put_back(self, full: Ints, bare: Ints) -> None:
        """Free the `full` pages, and the SWA peer of each of the `bare` pages that has one."""
        bare = bare[self.peer[bare] != 0]
        swa = self.peer[bare] // self.page_size
        self._point(bare, None)
        self.fill[full] = 0
        if self.queue is None:
            self.full.push(full)
            self.swa.push(swa)
        else:
            self.queue.append((full, swa))

    def _point(self, pages: Ints, swa: Ints | None) -> None:
        """Map full pages to SWA pages, or to none: the first step of a call, as a device may refuse the edit."""
        if not pages.size:
            return
        values = np.zeros(pages.size * self.page_size, np.int64) if swa is None else self.slots_of(swa)
        if self.on_patch is not None:
            self.on_patch(self.slots_of(pages), values)
        self._map[pages] = values.reshape(-1, self.page_size)

    def slots_of(self, pages: Ints) -> Ints:
        return (pages[:, None] * self.page_size + self._offsets).ravel()

    # next_free, take and put_back of one page of one slot, in scalars: 5 µs together, a tenth of what arrays take

    @property
    def takes_scalars(self) -> bool:
        return self.page_size == 1 and self.on_patch is None and self.queue is None

    def take_one(self) -> Ints:
        page, swa = self.next_free(1, int(self.has_swa))
        self.full.top -= 1
        self.swa.top -= swa.size
        self.fill[page[0]] = 1
        if self.has_swa:
            self.mapping[page[0]] = swa[0]
        return page

    def put_back_one(self, page: int) -> None:
        self.fill[page] = 0
        self.full.push_one(page)
        if swa := self.mapping[page]:
            self.mapping[page] = 0
            self.swa.push_one(swa)

    def open_group(self) -> None:
        """Keep what is put back from the free lists until `close_group`."""
        self.queue = []

    def close_group(self) -> None:
        queue, self.queue = self.queue or [], None
        for full, swa in queue:
            self.full.push(full)
            self.swa.push(swa)

    def clear(self) -> None:
        """All pages free, in the initial order."""
        self._point(np.flatnonzero(self.peer), None)
        self.full.reset()
        self.swa.reset()
        self.fill[:] = 0
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
