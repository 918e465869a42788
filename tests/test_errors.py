"""Errors cross processes whole: a pool of workers dies of one that does not."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from portakv import errors
from portakv.allocator import HybridSlotAllocator
from portakv.errors import NoKernel, OutOfMemory, OutOfSlots, PortaKVError

MADE: list[PortaKVError] = [
    OutOfSlots("swa", 7, 3),
    OutOfMemory(10**12, None, "cuda:0"),
    NoKernel("store_kv", "cuda", [("triton", "not installed"), ("reference", "strict")]),
    *(
        kind("why")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PortaKVError) and "__init__" not in vars(kind)
    ),
]


def test_every_class_is_here() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PortaKVError)}
    assert {type(error) for error in MADE} == kinds


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_copies_and_pickles(error: PortaKVError, again: Callable[[PortaKVError], PortaKVError]) -> None:
    error.add_note("while loading")
    other = again(error)
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def ask_for_too_much(_: int) -> None:
    HybridSlotAllocator(8).alloc(9)


def test_a_worker_raises_it_here() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        found = pool.submit(ask_for_too_much, 0).exception(60)
        assert isinstance(found, OutOfSlots)
        assert (found.side, found.need, found.free, found.short) == ("full", 9, 8, 1)
        assert pool.submit(abs, -1).result(60) == 1  # the pool lives on
