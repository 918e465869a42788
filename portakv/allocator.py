"""HybridSlotAllocator: the host-side truth about every slot of both sides of a pool."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from portakv import device as devices
from portakv.arguments import (
    Bools,
    Ints,
    IntsLike,
    are_plain,
    as_array,
    as_batch,
    as_int,
    as_ints,
    as_table,
    require,
    shown,
)
from portakv.errors import PortaKVError, SlotOwnership
from portakv.pages import NO_PAGES, HybridPages, OnPatch, ascending, is_first, ranges

P = ParamSpec("P")
T = TypeVar("T")


def _exclusive(
    call: Callable[Concatenate[HybridSlotAllocator, P], T],
) -> Callable[Concatenate[HybridSlotAllocator, P], T]:
    """A call that no other one meets half done, and that takes effect whole or not at all.

    Python looks for signals at calls only, so stores in a row are one step.
    """

    @functools.wraps(call)
    def exclusive(self: HybridSlotAllocator, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            pages, outermost = self._pages, not self._running
            mark = 0 if outermost else len(pages.journal)
            try:
                self._running = True
                if outermost and (pages.journal or self._waiting):
                    pages.undo()  # an undo that was interrupted
                    self._free_waiting()
                result = call(self, *args, **kwargs)
                if outermost:
                    pages.journal = []  # from here on the call has happened
                return result
            except BaseException:
                pages.undo(mark)
                raise
            finally:
                if outermost:
                    self._running = False

    return cast(Callable[Concatenate["HybridSlotAllocator", P], T], exclusive)


@functools.cache
def _reset_in_children() -> weakref.WeakSet[HybridSlotAllocator]:
    """The allocators whose locks a forked child looks at."""
    allocators: weakref.WeakSet[HybridSlotAllocator] = weakref.WeakSet()

    def reset() -> None:
        for allocator in allocators:
            allocator._after_fork()

    os.register_at_fork(after_in_child=reset)
    return allocators


class _Dropped(weakref.ref[object]):
    """What stands for an owner that is gone: its callback is C code, which nothing can interrupt."""

    __slots__ = ("slots",)
    slots: Callable[[], IntsLike]


class HybridSlotAllocator:
    """Hands out *full* slots and maps an SWA slot behind each, in whole pages of both sides.

    `size` and `swa_size` (slots) are rounded down to whole pages; `swa_size=None` means no SWA side and reads
    back as 0. Page 0 of each side is reserved. `window` is the largest window of the SWA layers, counting the
    current token; None if not known.

    `mapping` is int64 `[size + page_size + 1]`: the SWA slot of each full slot, 0 without one, -1 at the end.
    It is edited in place and never replaced, so `torch.from_numpy(mapping)` stays true. A full page has a
    whole SWA page behind it or none, also behind its slots that are not handed out yet. A call that edits the
    map first gives its edits to `on_patch(slots, values)`, once, as int64 arrays, for a copy on a device.

    What is handed out of a page is always a prefix of it. Slots come out as fresh CPU int64 tensors.

    A call that raises has changed no byte, whatever it raised, where and in which thread: `KeyboardInterrupt` too. What
    Python cannot give back is a result that is on its way: an interrupt while a call returns leaves its slots handed
    out. Calls of several threads wait for each other; each thread frees what it took. There are no copies.

    Raises `ValueError` or `TypeError` for sizes that are no positive integers or could never serve a request, and
    `OutOfMemory` before anything is taken.
    """

    def __init__(
        self,
        size: int,
        swa_size: int | None = None,
        page_size: int = 1,
        *,
        window: int | None = None,
        on_patch: OnPatch | None = None,
    ) -> None:
        self.page_size = page = as_int("page_size", page_size)
        self.window = None if window is None else as_int("window", window)
        self.size = as_int("size", size, page) // page * page
        self.swa_size = 0 if swa_size is None else as_int("swa_size", swa_size) // page * page
        # A decode step holds its window and takes the next page before it evicts one.
        need = page if self.window is None else min(self.window + page, self.size)
        if swa_size is not None and self.swa_size < need:
            raise ValueError(
                f"swa_size: expected at least {need} slots (a window and a page, at most size), "
                f"got {swa_size}, which is {self.swa_size} in whole pages"
            )
        needs = {torch.device("cpu"): self.host_bytes(self.size, self.swa_size, page)}
        self._pages = devices.allocate(lambda: HybridPages(self.size, self.swa_size, page, on_patch), needs)
        self.mapping = self._pages.mapping
        self._fill, self._peer = self._pages.fill, self._pages.peer  # the same arrays
        self._lock = threading.RLock()
        self._running = False
        _reset_in_children().add(self)
        self._waiting: deque[_Dropped] = deque()
        self._owners: dict[int, _Dropped] = {}  # keeps them alive: a reference that is gone calls nobody back

    @_exclusive
    def atomically(self, steps: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
        """Run `steps()`, whose calls of this allocator take effect together or, if it raises anything, not at all.

        `undo()` is called where they do not: what `steps` published of its own goes back there. Slots are taken back,
        not the bytes that were written to them. Other threads wait. Nests.
        """
        if undo is not None:
            self._pages.journal.append(undo)
        return steps()

    def _after_fork(self) -> None:
        """In a child: a call of a thread that was not copied is undone by the next one."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock, self._running = threading.RLock(), False

    def free_with(self, owner: object, slots: Callable[[], IntsLike]) -> None:
        """Once `owner` is gone, `free` what `slots()` says, at the start of the next call, whoever makes it.

        The garbage collector comes by anywhere, also inside a call. `slots` must not keep the owner alive.
        """
        dropped = _Dropped(owner, self._waiting.append)
        dropped.slots = slots
        self._owners[id(dropped)] = dropped

    def _free_waiting(self) -> None:
        while self._waiting:
            dropped = self._waiting.popleft()
            try:
                self.free(dropped.slots())
            except SlotOwnership as error:  # cleared meanwhile, or freed twice: not the fault of this call
                logging.getLogger("portakv").warning("slots of a dropped cache: %s", error)
            except BaseException as error:  # while a device captures a graph, its mapping cannot change
                self._waiting.appendleft(dropped)
                if not isinstance(error, PortaKVError):
                    raise
                return
            self._pages.journal = []
            self._owners.pop(id(dropped))

    @_exclusive
    def alloc(self, n: int, swa_tail: int | None = None) -> torch.Tensor:
        """Slots `[n]` of one new sequence, in token order.

        Only the pages that hold the last `swa_tail` tokens get an SWA peer; None means all, 0 none. Raises
        `OutOfSlots` with the side that is short.
        """
        n = as_int("n", n, 0, None)
        if n == 1 and swa_tail is None and self._pages.takes_scalars:
            return torch.from_numpy(self._pages.take_one())
        page, tail = self.page_size, self._tail(swa_tail)
        count = -(-n // page)
        bare = max(0, n - tail) // page if tail else count
        full, swa = self._pages.next_free(count, count - bare)
        fill: Ints | int = page
        if n % page:
            fill = np.full(count, page)
            fill[-1] = n % page
        self._pages.edit(fill=(full, fill), peers=(full[bare:], swa), taken=(count, swa.size))
        return torch.from_numpy(self._pages.slots_of(full)[:n])

    @_exclusive
    def alloc_extend(
        self, prefix_lens: IntsLike, seq_lens: IntsLike, last_loc: IntsLike, swa_tail: int | None = None
    ) -> torch.Tensor:
        """The slots by which sequences grow from `prefix_lens` to `seq_lens` tokens, in batch order.

        All are `[B]`; `last_loc` is each sequence's last slot, -1 where the prefix is 0. A sequence fills the
        page of its last slot before it takes others. `swa_tail` as in `alloc`, from each sequence's end; a
        continued page without a peer gets one if its new tokens are in the tail. Raises `OutOfSlots`;
        `SlotOwnership` where a last slot is not the last handed out of its page, does not fit the prefix, or
        is continued twice.
        """
        prefix, seq, last = as_batch(prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc)
        page, tail = self.page_size, self._tail(swa_tail)
        require(prefix >= 0, "prefix_lens", "lengths of at least 0", prefix)
        require(seq >= prefix, "seq_lens", "at least the prefix", seq)
        head = np.minimum(seq - prefix, -prefix % page)  # new tokens that fit in the continued page
        rest = seq - prefix - head
        count = -(-rest // page)
        joined = self._joined(prefix, last, head > 0)
        before = rest - tail  # new tokens before the tail; negative if it reaches into the continued page
        bare = np.maximum(before, 0) // page if tail else count
        behind = last[(head > 0) & (before < 0)] // page
        behind = behind[self._peer[behind] == 0]
        total = sum(count.tolist())  # Python integers: absurd lengths must not wrap around
        full, swa = self._pages.next_free(total, total - int(bare.sum()) + behind.size)
        fill, ends, some = np.full(total, page), np.cumsum(count), count > 0
        fill[ends[some] - 1] = (rest - (count - 1) * page)[some]
        peered = full[ranges(np.zeros_like(count), count) >= np.repeat(bare, count)] if bare.any() else full
        self._pages.edit(
            fill=(np.concatenate((full, joined)), np.concatenate((fill, self._fill[joined] + head[head > 0]))),
            unwritten=(behind, self._fill[behind]),
            peers=(np.concatenate((behind, peered)), swa),
            taken=(total, swa.size),
        )
        # Each sequence is a run of slots in its continued page, then one run in each page taken.
        heads = ends - count + np.arange(count.size)
        is_page = np.ones(total + count.size, np.bool_)
        is_page[heads] = False
        starts, lengths = np.empty((2, is_page.size), np.int64)
        starts[heads], lengths[heads] = last + 1, head
        starts[is_page], lengths[is_page] = full * page, fill
        return torch.from_numpy(ranges(starts, lengths))

    @_exclusive
    def alloc_decode(self, seq_lens: IntsLike, last_loc: IntsLike) -> torch.Tensor:
        """One slot for each sequence, `[B]`; `seq_lens` counts the new token. Otherwise as `alloc_extend`."""
        seq, last = as_batch(seq_lens=seq_lens, last_loc=last_loc)
        require(seq > 0, "seq_lens", "lengths of at least 1", seq)
        joins = (seq - 1) % self.page_size > 0
        joined = self._joined(seq - 1, last, joins)
        behind = joined[self._peer[joined] == 0]
        count = seq.size - joined.size
        behind = behind if self.swa_size else NO_PAGES
        full, swa = self._pages.next_free(count, count + behind.size if self.swa_size else 0)
        self._pages.edit(
            fill=(np.concatenate((full, joined)), np.concatenate((np.ones_like(full), self._fill[joined] + 1))),
            unwritten=(behind, self._fill[behind]),
            peers=(np.concatenate((behind, full))[: swa.size], swa),
            taken=(count, swa.size),
        )
        slots = last + 1
        slots[~joins] = full * self.page_size
        return torch.from_numpy(slots)

    @_exclusive
    def restore_swa(self, slots: IntsLike) -> torch.Tensor:
        """The SWA slots `[n]` of handed-out `slots` `[n]`, once every page without a peer has a new one.

        New peers hold other tokens' bytes: the slots handed out of such a page are live from `mark_written` on, those
        handed out later at once, as ever. Slots need not be whole pages. Raises `OutOfSlots`, `SlotOwnership`.
        """
        given = as_ints("slots", slots)
        self._require_owned(given)
        pages = ascending(given // self.page_size)
        bare = pages[self._peer[pages] == 0]
        swa = self._pages.next_free(0, bare.size)[1]
        self._pages.edit(unwritten=(bare, self._fill[bare]), peers=(bare, swa), taken=(0, swa.size))
        return torch.from_numpy(self.mapping[given])

    @_exclusive
    def mark_written(self, slots: IntsLike) -> None:
        """Say that the SWA bytes of handed-out `slots` are there now: stored, loaded or received after `restore_swa`.

        In each page, live slots are those behind the last one that still waits. Raises `SlotOwnership`.
        """
        given = as_ints("slots", slots)
        self._require_owned(given)
        page = given // self.page_size
        waits = self._pages.unwritten.take(page) > given - page * self.page_size
        if not waits.any():
            return
        # From each page's last waiting slot backwards, as far as every slot is given.
        ordered = ascending(given[waits])
        pages = ascending(ordered // self.page_size)
        held = np.zeros((pages.size, self.page_size), np.bool_)
        held[np.searchsorted(pages, ordered // self.page_size), ordered % self.page_size] = True
        unwritten = self._pages.unwritten[pages].astype(np.int64)
        waiting = ~held & (np.arange(self.page_size) < unwritten[:, None])
        last = np.where(waiting, np.arange(1, self.page_size + 1), 0).max(axis=1)
        self._pages.edit(unwritten=(pages, last))

    @_exclusive
    def free(self, slots: IntsLike) -> None:
        """Give slots and their SWA peers back; every page touched must be given whole.

        A slot named twice counts once. Raises `SlotOwnership` naming the first bad slot and what is wrong
        with it: free already, never handed out, reserved, out of range, or part of a page.
        """
        if slot := self._single(slots):
            self._pages.put_back_one(slot)
        else:
            pages, _ = self._tails(slots, whole=True)
            self._pages.put_back(pages, pages)

    @_exclusive
    def free_segments(self, starts: IntsLike, lengths: IntsLike) -> None:
        """`free` for runs of slots `[N]`, without listing them; both are multiples of the page size.

        A page that is only partly handed out is given whole too. Raises `SlotOwnership`, `ValueError`.
        """
        page = self.page_size
        start, length = as_batch(starts=starts, lengths=lengths)
        require(start % page == 0, "starts", f"multiples of {page}", start)
        fits = (length % page == 0) & (length >= 0) & (length <= self.size)
        require(fits, "lengths", f"multiples of {page} from 0 to {self.size}", length)
        pages = ranges(start // page, length // page)
        self._require_owned(pages * page)
        pages = ascending(pages)
        self._pages.put_back(pages, pages)

    @_exclusive
    def free_swa(self, slots: IntsLike) -> None:
        """As `free`, but only the SWA peers go back; a page whose peer is gone already stays as it is."""
        pages, _ = self._tails(slots, whole=True)
        self._pages.put_back(NO_PAGES, pages)

    @_exclusive
    def rewind(self, slots: IntsLike) -> None:
        """Take back what was handed out last (rejected drafts, a crop): in every page touched, a tail of it.

        Pages left empty are freed on both sides; the others keep their SWA peer. Raises `SlotOwnership`.
        """
        pages, left = self._tails(slots, whole=False)
        self._pages.put_back(pages, pages[left == 0], left)

    @_exclusive
    def evict_swa(self, req_to_token: IntsLike, rows: IntsLike, evicted: IntsLike, next_query: IntsLike) -> Ints:
        """Free the SWA peers that no query from `next_query` on can see; returns the new cursors `[B]`.

        `req_to_token` `[R, max_len]` holds full slots by row and position; of one on a device, the first slot
        of each page to evict is read, which waits for it. In row `rows[i]`, positions below `evicted[i]` are
        gone already, and `next_query[i]` is the smallest position still to be asked from: keys at positions >
        next_query - window stay, and so does the rest of their pages. A cursor never moves back. A page that
        rows share goes with the first to let go of it: whoever shares pages passes the smallest query of all
        sharers. Raises `SlotOwnership`, and `ValueError` if the window is not known.
        """
        if self.window is None:
            raise ValueError("window: expected the largest window of the SWA layers, got None")
        page, table = self.page_size, as_table("req_to_token", req_to_token)
        row, cursor, query = as_batch(rows=rows, evicted=evicted, next_query=next_query)
        require((row >= 0) & (row < table.shape[0]), "rows", f"0 to {table.shape[0] - 1}", row)
        require(cursor >= 0, "evicted", "cursors of at least 0", cursor)
        require((query >= 0) & (query <= table.shape[1]), "next_query", f"0 to {table.shape[1]}", query)
        begin, frontier = cursor // page, np.maximum(query - self.window + 1, 0) // page
        count = np.maximum(frontier - begin, 0)
        slots = entries(table, np.repeat(row, count), ranges(begin, count) * page)
        self._require_owned(slots)
        require(slots % page == 0, "req_to_token", "pages of slots where pages of positions begin", slots)
        self._pages.put_back(NO_PAGES, ascending(slots // page))
        cursors: Ints = np.maximum(cursor, frontier * page)
        return cursors

    @contextmanager
    def group_frees(self) -> Iterator[None]:
        """Frees inside take effect at once, but their pages reach the free lists together, at the end.

        Allocations inside do not get those pages. Other threads wait for the end. Raises `PortaKVError` when nested.
        """
        with self._lock:
            if self._pages.queue is not None:
                raise PortaKVError("group_frees: expected no open group, got a group inside another")
            try:
                self.atomically(self._pages.open_group)
                yield
            finally:
                try:
                    self.atomically(self._pages.close_group)
                except BaseException:  # an interrupt: the group ends all the same
                    self.atomically(self._pages.close_group)
                    raise

    @_exclusive
    def clear(self) -> None:
        """Give everything back; slots come out in the initial order again."""
        while self._waiting:
            self._owners.pop(id(self._waiting.popleft()), None)
        self._pages.clear()

    @_exclusive
    def available(self, side: str = "full") -> int:
        """Free slots, in whole pages, of side "full" or "swa"."""
        if not isinstance(side, str) or side not in ("full", "swa"):
            raise ValueError(f'side: expected "full" or "swa", got {shown(side)}')
        return (self._pages.full if side == "full" else self._pages.swa).top * self.page_size

    @property
    def nbytes(self) -> int:
        """Host bytes held: the mapping, the free lists and the state of each page."""
        return self.host_bytes(self.size, self.swa_size, self.page_size)

    @staticmethod
    def host_bytes(size: int, swa_size: int | None, page_size: int) -> int:
        """What `nbytes` of an allocator of these sizes is."""
        return HybridPages.host_bytes(size // page_size, (swa_size or 0) // page_size, page_size)

    @_exclusive
    def is_owned(self, slots: IntsLike) -> Bools:
        """Which of `slots` (1-D) are handed out; any integer may be asked about."""
        return self._owned(as_ints("slots", slots))

    @_exclusive
    def has_peer(self, slots: IntsLike) -> Bools:
        """Which of `slots` (1-D) are handed out and have an SWA peer, whatever bytes it holds."""
        given = as_ints("slots", slots)
        peered: Bools = self._owned(given) & (self.mapping.take(given, mode="clip") != 0)
        return peered

    @_exclusive
    def is_live(self, slots: IntsLike) -> Bools:
        """Which of `slots` (1-D) are handed out and have an SWA peer with their own bytes; any integer may be asked
        about."""
        return self._is_live(as_ints("slots", slots))

    @_exclusive
    def reusable_prefix(self, slots: IntsLike, window: int | None = None) -> int | Ints:
        """The longest prefix a new request can reuse: an int for `slots` `[L]`, int64 `[B]` for `[B, L]`.

        It is the largest multiple p of the page size such that positions < p are handed out and those > p -
        window have an SWA peer (all, if neither `window` nor the allocator's is known). A negative slot ends
        a row.
        """
        given = as_array("slots", slots, (1, 2)).astype(np.int64, copy=False)
        window = self.window if window is None else min(as_int("window", window, most=None), sys.maxsize)
        rows, prefix = np.atleast_2d(given), np.arange(1, given.shape[-1] + 1)
        good = np.logical_and.accumulate(self._owned(rows), axis=1) & (prefix % self.page_size == 0)
        if self.swa_size:
            last_dead = np.maximum.accumulate(np.where(self._is_live(rows), 0, prefix), axis=1)  # 1-based
            good &= last_dead <= (0 if window is None else np.maximum(prefix - window + 1, 0))
        best: Ints = np.where(good, prefix, 0).max(axis=1, initial=0)
        return int(best[0]) if given.ndim == 1 else best

    @_exclusive
    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every page of both sides is free, owned or queued exactly once."""
        self._pages.check_integrity()

    @_exclusive
    def require_owned(self, slots: IntsLike) -> None:
        """Raise `SlotOwnership` for the first of `slots` (1-D) that is not handed out."""
        self._require_owned(as_ints("slots", slots))

    def _require_owned(self, given: Ints) -> None:
        owned = self._owned(given)
        if owned.all():
            return
        slot = int(given[~owned][0])
        if not 0 <= slot < self._pages.num_rows:
            why = f"out of range, the pool has {self._pages.num_rows} rows"
        elif slot < self.page_size:
            why = "reserved"
        elif fill := self._fill[slot // self.page_size]:
            why = f"never handed out, only {fill} slots of its page are"
        else:
            why = "its page is free: freed already, or never handed out"
        raise SlotOwnership(f"slots: expected handed-out slots, got {slot}: {why}")

    def _tail(self, swa_tail: int | None) -> int:
        """How many tokens at the end of a sequence get a peer: none without an SWA side."""
        tail = sys.maxsize if swa_tail is None else min(as_int("swa_tail", swa_tail, 0, None), sys.maxsize)
        return tail if self.swa_size else 0

    def _single(self, slots: IntsLike) -> int:
        """The one slot that can go back in scalars; 0 leaves the call, and any complaint, to arrays."""
        if not isinstance(slots, torch.Tensor) or slots.dtype != torch.int64:
            return 0
        if not slots.is_cpu or not are_plain(slots) or slots.shape != (1,):
            return 0
        slot = int(slots)
        return slot if self._pages.takes_scalars and 0 < slot <= self.size and self._fill[slot] else 0

    def _owned(self, slots: Ints) -> Bools:
        page = slots // self.page_size
        # Clipped to a page: what is below page 0 lands there, where nothing is ever handed out.
        owned: Bools = slots - page * self.page_size < self._fill.take(page, mode="clip")
        return owned & (slots < self._pages.num_rows)

    owns = _exclusive(_owned)
    """`is_owned` of an array that is known to be one of slots."""

    def _is_live(self, slots: Ints) -> Bools:
        page = slots // self.page_size
        written = slots - page * self.page_size >= self._pages.unwritten.take(page, mode="clip")
        live: Bools = self._owned(slots) & (self.mapping.take(slots, mode="clip") != 0) & written
        return live

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "HybridSlotAllocator: expected one of each pool, got a copy or pickle of it: slots have one owner"
        )

    def _tails(self, slots: IntsLike, whole: bool) -> tuple[Ints, Ints]:
        """The pages of `slots`, ascending, and what stays handed out of each without `slots`.

        Of each page, `slots` must be a tail of what is handed out, or the whole of it.
        """
        given = as_ints("slots", slots)
        self._require_owned(given)
        ordered = ascending(given)
        page = ordered // self.page_size
        begin = np.flatnonzero(is_first(page))
        pages = page[begin]
        left = ordered[begin] - pages * self.page_size
        count, fill = np.diff(np.append(begin, page.size)), self._fill[pages]
        good = count == fill if whole else left + count == fill
        if not good.all():
            slot = int(given[np.isin(given // self.page_size, pages[~good])][0])
            i = np.searchsorted(pages, slot // self.page_size)
            raise SlotOwnership(
                f"slots: expected {'all' if whole else 'the last'} slots handed out of each page, "
                f"got part of a page at slot {slot}: {count[i]} of {fill[i]} slots"
            )
        return pages, left

    def _joined(self, prefix: Ints, last: Ints, joins: Bools) -> Ints:
        """The pages that sequences go on filling, where `joins`; `last` slots must be what prefixes say."""
        page = last // self.page_size
        ends = last - page * self.page_size + 1 == self._fill.take(page, mode="clip")
        fits = ends & (last < self._pages.num_rows) & ((last + 1 - prefix) % self.page_size == 0)
        good = np.where(prefix > 0, fits, last == -1)
        if not good.all():
            i = int(np.argmin(good))
            raise SlotOwnership(
                f"last_loc[{i}]: expected the last slot handed out to {prefix[i]} tokens, got {last[i]}"
            )
        ordered = np.sort(page[joins])
        if not (once := is_first(ordered)).all():
            twice = ordered[~once][0]
            raise SlotOwnership(f"last_loc: expected pages to be continued once, got page {twice} twice")
        return page[joins]


def entries(table: torch.Tensor | npt.NDArray[np.integer[Any]], rows: Ints, columns: Ints) -> Ints:
    """`table[rows, columns]` on the host; of a table on a device only these are copied."""
    if not isinstance(table, torch.Tensor):
        return table[rows, columns].astype(np.int64, copy=False)
    at = torch.from_numpy(np.stack((rows, columns))).to(table.device)
    return as_ints("table", table[at[0], at[1]])
