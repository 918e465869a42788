"""Allocator calls that are interrupted, made from several threads, or made together: the old state or the new one."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from portakv import HybridKVPool, LayerSpec
from portakv.allocator import HybridSlotAllocator
from portakv.errors import OutOfSlots, PortaKVError, SlotOwnership


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, which would end the test run."""


def snapshot(a: HybridSlotAllocator) -> tuple[Any, ...]:
    pages = a._pages
    arrays = (a.mapping, pages.fill, pages.unwritten, pages.full.stack[: pages.full.top], pages.swa.stack)
    queue = None if pages.queue is None else [[x.tolist() for x in pair] for pair in pages.queue]
    return (*(x.tobytes() for x in arrays), pages.full.top, pages.swa.top, queue)


def raising_at(count: int) -> Callable[[FrameType, str, Any], None]:
    """A profiler that raises at the `count`-th call of a Python function of portakv, once."""
    left = [count]

    def hook(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and "portakv" in frame.f_code.co_filename:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupt

    return hook


def drop(a: HybridSlotAllocator, slots: torch.Tensor) -> None:
    """What held `slots` goes out of use without giving them back."""
    owner = type("Owner", (), {})()
    a.free_with(owner, lambda: slots)


class World:
    """An allocator with sequences in every state, and a device's copy of its mapping."""

    def __init__(self, page: int, patched: bool) -> None:
        self.device: np.ndarray | None = None
        self.a = HybridSlotAllocator(
            24 * page, 20 * page, page, window=page + 1, on_patch=self.patch if patched else None
        )
        self.device = self.a.mapping.copy()
        self.patched = patched
        self.whole, self.part = self.a.alloc(3 * page), self.a.alloc(2 * page + (page + 1) // 2)
        self.bare = self.a.alloc(2 * page, swa_tail=0)
        self.old = self.a.restore_swa(self.bare[:page])

    def patch(self, slots: np.ndarray, values: np.ndarray) -> None:
        if self.device is not None:
            self.device[slots] = values

    def check(self) -> None:
        self.a.check_integrity()
        if self.patched:
            np.testing.assert_array_equal(self.device, self.a.mapping)


def calls(w: World) -> dict[str, Callable[[], Any]]:
    a, page, n = w.a, w.a.page_size, len(w.part)

    def group() -> None:
        with a.group_frees():
            a.free(w.whole)
            a.rewind(w.part[-1:])

    def together() -> None:
        a.free(w.whole)
        a.atomically(lambda: a.free_swa(w.bare))
        a.alloc(page, swa_tail=0)
        a.alloc_extend([n, 0], [n + page, 2], [w.part[-1], -1])

    return {
        "alloc 1": lambda: a.alloc(1),
        "alloc": lambda: a.alloc(2 * page + 1, swa_tail=page),
        "alloc_extend": lambda: a.alloc_extend([n, 0], [n + 2 * page, 2], [w.part[-1], -1]),
        "alloc_decode": lambda: a.alloc_decode([n + 1, 1], [w.part[-1], -1]),
        "restore_swa": lambda: a.restore_swa(w.bare),
        "mark_written": lambda: a.mark_written(w.bare[:page]),
        "free": lambda: a.free(w.whole),
        "free 1": lambda: a.free(w.whole[:page]),
        "free_segments": lambda: a.free_segments([int(w.whole[0])], [2 * page]),
        "free_swa": lambda: a.free_swa(w.whole),
        "rewind": lambda: a.rewind(w.part[1:]),
        "evict_swa": lambda: a.evict_swa(w.whole[None], [0], [0], [3 * page]),
        "clear": a.clear,
        "a group": group,
        "a group of one step": lambda: a.atomically(group),
        "atomically": lambda: a.atomically(together),
    }


def only_first(page: int, patched: bool) -> tuple[Any, ...]:
    w = World(page, patched)
    with w.a.group_frees():
        w.a.free(w.whole)
    return snapshot(w.a)


NAMES = sorted(calls(World(4, False)))


@pytest.mark.parametrize("patched", [False, True], ids=["shared", "patched"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_interrupted_anywhere_has_happened_or_not(name: str, page: int, patched: bool) -> None:
    after = World(page, patched)
    before = snapshot(after.a)
    calls(after)[name]()
    expected, points = {before, snapshot(after.a)}, 0
    if name == "a group":  # each free of a group is a call of its own
        expected.add(only_first(page, patched))
    for count in range(1, 400):
        w = World(page, patched)
        call = calls(w)[name]
        sys.setprofile(raising_at(count))
        try:
            call()
        except Interrupt:
            sys.setprofile(None)
        else:
            sys.setprofile(None)
            break
        points += 1
        # Another thread goes on: no lock is held.
        thread = threading.Thread(target=w.a.available)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        w.a.available()
        w.check()
        assert snapshot(w.a) in expected, count
    assert points > 2


def test_signals_leave_the_books_straight() -> None:
    """As a timer or ctrl-c, between any two instructions: slots of a call that was returning are lost, nothing else."""
    rng, seen, old = random.Random(0), 0, signal.getsignal(signal.SIGALRM)

    def ring(*_: Any) -> None:
        raise Interrupt

    signal.signal(signal.SIGALRM, ring)
    try:
        for i in range(1500):
            w = World((1, 4)[i % 2], patched=i % 3 == 0)
            call = calls(w)[NAMES[i % len(NAMES)]]
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 3e-4))
                try:
                    for _ in range(50):
                        call()
                        w = World(w.a.page_size, w.patched)
                        call = calls(w)[NAMES[i % len(NAMES)]]
                except Interrupt:
                    seen += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                seen += 1
            if hasattr(w, "old"):  # else the world itself was cut short
                w.a.available()
                w.check()
    finally:
        signal.signal(signal.SIGALRM, old)
    assert seen > 500


def test_calls_that_are_made_together_fail_together() -> None:
    w = World(4, patched=True)
    before, undone = snapshot(w.a), []

    def steps() -> None:
        w.a.free(w.whole)
        w.a.evict_swa(w.part[None], [0], [0], [8])
        with pytest.raises(OutOfSlots):
            w.a.alloc(1000)
        w.a.alloc(200)

    with pytest.raises(OutOfSlots):
        w.a.atomically(steps, lambda: undone.append(True))
    assert snapshot(w.a) == before
    assert undone == [True]
    w.check()
    assert w.a.is_owned(w.a.atomically(lambda: w.a.alloc(4), lambda: undone.append(True))).all()
    assert undone == [True]


def test_an_undo_that_is_interrupted_is_finished_by_the_next_call() -> None:
    w = World(4, patched=True)
    before = snapshot(w.a)

    def steps() -> None:
        w.a.free(w.whole)
        w.a._pages.journal.append(lambda: broken.pop()() if broken else None)  # undone first
        raise ValueError

    def interrupt() -> None:
        raise Interrupt

    broken = [interrupt]
    with pytest.raises(Interrupt):
        w.a.atomically(steps)
    w.a.available()
    assert snapshot(w.a) == before
    w.check()


def test_threads_share_an_allocator(in_threads: Callable[..., None]) -> None:
    """Every slot has one owner, whichever thread asked, also where threads drop what they had for finalizers."""
    a = HybridSlotAllocator(4096, 2048, 4, window=8)
    owner = np.zeros(4100, np.int64)

    def work(me: int) -> None:
        rng = random.Random(me)
        for _ in range(150):
            n = rng.randrange(1, 60)
            slots = a.alloc(n)
            assert not owner[slots.numpy()].any()
            owner[slots.numpy()] = me
            more = a.alloc_extend([n], [n + 5], [slots[-1]])
            assert not owner[more.numpy()].any()
            owner[more.numpy()] = me
            held = torch.cat((slots, more))
            a.evict_swa(held[None], [0], [0], [n])
            assert (owner[held.numpy()] == me).all()
            owner[held.numpy()] = 0
            rng.choice((a.free, functools.partial(drop, a)))(held)

    in_threads(*(functools.partial(work, i) for i in range(1, 5)))
    assert a.available("full") == 4096
    assert a.available("swa") == 2048
    a.check_integrity()


def test_what_waits_is_freed_by_any_call() -> None:
    for look in (HybridSlotAllocator.available, lambda a: a.alloc(8), HybridSlotAllocator.check_integrity):
        a = HybridSlotAllocator(8, 8, 4)
        drop(a, a.alloc(8))
        look(a)
        assert a._pages.full.top == (0 if a._pages.fill.any() else 2)
    # Also from a finalizer that runs inside a call.
    a = HybridSlotAllocator(64, 64, 4, on_patch=lambda slots, values: gc.collect())

    class Cycle:
        def __init__(self) -> None:
            slots, self.me = a.alloc(8), self
            a.free_with(self, lambda: slots)

    Cycle()
    a.alloc(4)
    assert a.available() == 60
    a.check_integrity()


def test_what_waits_is_not_lost_while_the_map_cannot_change() -> None:
    capturing = False

    def patch(slots: Any, values: Any) -> None:
        if capturing:
            raise PortaKVError("captured")

    a = HybridSlotAllocator(8, 8, 4, on_patch=patch)
    slots, capturing = a.alloc(8), True
    drop(a, slots)
    assert a.available() == 0
    capturing = False
    assert a.available() == 8
    # What was given back otherwise meanwhile is no fault of the call that looks.
    drop(a, a.alloc(4)[:4].clone())
    a.clear()
    assert a.available() == 8
    slots = a.alloc(4)
    drop(a, slots)
    drop(a, slots)
    assert a.available() == 8


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_slots_have_one_owner(copies: Callable[[Any], Any]) -> None:
    pool = HybridKVPool([LayerSpec(None, 1, 8)], size=16)
    with pytest.raises(TypeError, match="HybridSlotAllocator: expected one of each pool"):
        copies(pool.allocator)


def test_restored_slots_are_live_once_they_are_written() -> None:
    a = HybridSlotAllocator(64, 64, 4, window=8)
    slots = a.alloc(10)
    a.free_swa(slots[:4])
    assert a.is_live(slots).tolist() == [False] * 4 + [True] * 6
    a.restore_swa(slots[:4])
    assert a.has_peer(slots).all()
    assert a.is_live(slots).tolist() == [False] * 4 + [True] * 6
    assert a.reusable_prefix(slots) == 0
    a.mark_written(slots[1:2])  # slots 2 and 3 still wait
    assert a.is_live(slots).tolist() == [False] * 4 + [True] * 6
    a.mark_written(slots[2:4])
    assert a.is_live(slots).tolist() == [False] * 2 + [True] * 8
    assert a.reusable_prefix(slots, window=6) == 8
    a.mark_written(slots)
    assert a.is_live(slots).all()
    with pytest.raises(SlotOwnership):
        a.mark_written([1])
    a.free(slots)
    assert not a._pages.unwritten.any()


def test_a_page_that_gets_its_peer_late_has_no_bytes_of_earlier_tokens() -> None:
    a = HybridSlotAllocator(64, 64, 4, window=4)
    slots = a.alloc(6, swa_tail=0)
    more = a.alloc_extend([6], [8], [slots[-1]])
    assert a.is_live(torch.cat((slots, more))).tolist() == [False] * 6 + [True] * 2
    a.rewind(torch.cat((slots[5:], more)))
    assert a.is_live(a.alloc_decode([6], [slots[4]])).all()  # its forward writes it


def test_a_group_inside_of_a_step_that_fails_is_closed() -> None:
    w = World(4, patched=True)
    before = snapshot(w.a)

    def steps() -> None:
        with w.a.group_frees():
            w.a.free(w.whole)
            w.a.rewind(w.part[-1:])
        raise ValueError("too late")

    with pytest.raises(ValueError, match="too late"):
        w.a.atomically(steps)
    assert snapshot(w.a) == before
    w.check()
    with w.a.group_frees():
        w.a.free(w.whole)
    assert w.a.alloc(12).numel() == 12


def test_groups_of_threads_wait_for_each_other(in_threads: Callable[..., None]) -> None:
    a = HybridSlotAllocator(64, 64, 4)

    def work() -> None:
        for _ in range(30):
            slots = a.alloc(8)
            with a.group_frees():
                a.free(slots)

    in_threads(*[work] * 4)
    assert (a.available("full"), a.available("swa")) == (64, 64)
    a.check_integrity()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    w = World(4, patched=False)
    before, inside, done = snapshot(w.a), threading.Event(), threading.Event()

    def steps() -> None:
        w.a.free(w.whole)
        inside.set()
        done.wait(60)

    thread = threading.Thread(target=w.a.atomically, args=(steps,))
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        w.a.available()
        os._exit(0 if snapshot(w.a) == before else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert status == 0
    w.check()
