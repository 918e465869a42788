"""The error classes: what went wrong, with the numbers a scheduler can act on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PortaKVError(Exception):
    """Base of every error that is portakv's own; a call that raises one has changed nothing. They cross processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception's own way calls the class with the message, which is not what every class here takes.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[PortaKVError], args: tuple[Any, ...], state: dict[str, Any]) -> PortaKVError:
    error = Exception.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class OutOfSlots(PortaKVError):
    """One side of the pool has too few free slots.

    `side` is "full" or "swa"; `need` and `free` count slots (whole pages).
    """

    def __init__(self, side: str, need: int, free: int) -> None:
        super().__init__(f"{side} side: need {need} slots, {free} free ({need - free} short)")
        self.side = side
        self.need = need
        self.free = free

    @property
    def short(self) -> int:
        return self.need - self.free


class OutOfMemory(PortaKVError, MemoryError):
    """Memory does not hold a pool, a plan or a graph's buffers; nothing is allocated.

    `asked` and `available` are bytes at `where`, "cpu" or a device such as "cuda:0". `available` is None where nothing
    tells it.
    """

    def __init__(self, asked: int, available: int | None, where: str) -> None:
        super().__init__(asked, available, where)  # pickle makes it again of these
        self.asked = asked
        self.available = available
        self.where = where

    def __str__(self) -> str:
        known = "an unknown number" if self.available is None else self.available
        return f"{self.where}: asked for {self.asked} bytes, {known} available"


class SlotOwnership(PortaKVError, ValueError):
    """A double free, a slot that was never handed out, or part of a page."""


class SlotFault(PortaKVError):
    """A slot out of range, or one written twice by one store or move (checked mode)."""


class MissingSwaLoc(PortaKVError):
    """A sliding-window layer was given a write location without `swa_loc`."""


class StaleWriteLoc(PortaKVError):
    """A write location whose translation is not what the mapping says now (checked mode)."""


class IntegrityError(PortaKVError):
    """`check_integrity()` found a slot that is not exactly free or owned: a bug of portakv."""


class NoKernel(PortaKVError):
    """No row of the dispatch table serves an op; `rejected` is every (row, reason)."""

    def __init__(self, op: str, device: str, rejected: Sequence[tuple[str, str]]) -> None:
        reasons = "".join(f"\n  {row}: {reason}" for row, reason in rejected)
        super().__init__(f"no kernel for {op} on {device}:{reasons or ' the table has no rows'}")
        self.op = op
        self.device = device
        self.rejected = tuple(rejected)


class DeviceUnavailable(PortaKVError, RuntimeError):
    """A device that was asked for is not there; the message says what was probed and why."""
