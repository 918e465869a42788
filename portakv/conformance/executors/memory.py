"""The bytes that a kernel may touch, read and written by many threads at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from portakv.conformance.executors.errors import ConflictingStores, Misaligned, OutsideAllocation

Array = np.ndarray[Any, Any]

ORIGIN = 16
"""Where the arrays of `_PROCESS` begin: numpy takes no array at address 0."""


def _address_space(unit: int) -> Array:
    """All of this process's memory as one array of `unit` bytes an element. Only checked addresses may index it."""
    interface = {"data": (ORIGIN, False), "shape": ((1 << 48) // unit,), "typestr": f"<u{unit}", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


_PROCESS = {unit: _address_space(unit) for unit in (1, 2, 4, 8)}


class Memory:
    """Allocations, each `bytes` (uint8, 1-D, contiguous) at an `address`, which need not be its real one.

    Every access takes one uint64 address a thread, and touches memory for those threads alone that `mask` (bool, one a
    thread; None is all) has. It raises, before anything is touched, `OutsideAllocation` or `Misaligned`. `align` is in
    bytes and by default the size of the access. `races` says that threads may store different values to one address.
    """

    def __init__(self, allocations: Iterable[tuple[int, Array]], races: bool = False) -> None:
        self._races = races
        blocks = sorted(((address, block) for address, block in allocations if block.size), key=lambda item: item[0])
        self._blocks = [block for _, block in blocks]  # held, so that their memory stays
        self._begin = np.array([address for address, _ in blocks], np.uint64)
        self._size = np.array([block.size for block in self._blocks], np.uint64)
        # From an address to an index of `_PROCESS[1]`, modulo 2^64.
        real = np.array([block.__array_interface__["data"][0] for block in self._blocks], np.uint64)
        self._shift = real - self._begin - np.uint64(ORIGIN)

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor], races: bool = False) -> Memory:
        """The whole storages of CPU tensors, at their real addresses."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        as_bytes = (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values())
        return cls(((block.data_ptr(), block.numpy()) for block in as_bytes), races)

    @classmethod
    def of_groups(cls, groups: int, size: int) -> Memory:
        """`size` bytes for each group of threads, zeros; those of group g begin at address g << 32."""
        blocks = np.zeros((groups, size), np.uint8)
        return cls((group << 32, blocks[group]) for group in range(groups))

    def load(self, addresses: Array, size: int, mask: Array | None = None, align: int | None = None) -> Array:
        """uint8 `[threads, size]`; zeros for threads that the mask leaves out."""
        out = np.zeros((len(addresses), size), np.uint8)
        lanes = _lanes(addresses, mask)
        unit, index = self._index(addresses[lanes], size, align)
        out[lanes] = _PROCESS[unit][index].view(np.uint8)
        return out

    def store(self, addresses: Array, values: Array, mask: Array | None = None, align: int | None = None) -> None:
        """Store the rows of `values` (uint8 `[threads, size]`). Raises `ConflictingStores`."""
        lanes = _lanes(addresses, mask)
        size = values.shape[1]
        unit, index = self._index(addresses[lanes], size, align)
        units = np.ascontiguousarray(values[lanes]).view(f"<u{unit}")
        _PROCESS[unit][index] = units
        if self._races:
            return
        # A thread that reads another's value back shares an address with it.
        lost = (_PROCESS[unit][index] != units).any(1)
        if lost.any():
            raise ConflictingStores(
                f"{int(lost.sum())} threads' stores of {size} bytes were overwritten by other threads of the "
                f"instruction, the first at {addresses[lanes][lost][0]:#x}"
            )

    def atomic_add(self, addresses: Array, values: Array, mask: Array | None = None) -> Array:
        """Add `values` (uint32 or uint64 `[threads]`), one thread after the other; what each found."""
        lanes = _lanes(addresses, mask)
        old = np.zeros_like(values)
        unit, index = self._index(addresses[lanes], values.itemsize, None)
        cells = _PROCESS[unit]
        for lane, at in zip(lanes, index[:, 0], strict=True):
            old[lane] = cells[at]
            cells[at : at + 1] += values[lane]
        return old

    def _index(self, addresses: Array, size: int, align: int | None) -> tuple[int, Array]:
        """The unit of an access, and `[threads, size / unit]` indices into the process's memory in such units."""
        align = align or size
        wrong = addresses % np.uint64(align) != 0
        if wrong.any():
            raise Misaligned(f"{size} bytes at {addresses[wrong][0]:#x}: no multiple of {align}")
        block = np.searchsorted(self._begin, addresses, side="right") - 1
        if len(self._blocks):
            offset = addresses - self._begin[block]
            outside = (block < 0) | (self._size[block] < size) | (offset > self._size[block] - np.uint64(size))
        else:
            outside = np.ones(len(addresses), bool)
        if outside.any():
            raise OutsideAllocation(
                f"{size} bytes at {addresses[outside][0]:#x}: {self._nearest(addresses[outside][0])}"
            )
        # Blocks that do not lie at their real addresses may be aligned less well than those are.
        unit = min(align, size, 8)
        if not len(addresses):
            return unit, np.zeros((0, size // unit), np.int64)
        start = addresses + self._shift[block]
        while unit > 1 and (start % np.uint64(unit)).any():
            unit //= 2
        return unit, (start // np.uint64(unit)).astype(np.int64)[:, None] + np.arange(size // unit)

    def _nearest(self, address: np.uint64) -> str:
        begins = [(int(begin), int(size)) for begin, size in zip(self._begin, self._size, strict=True)]
        if not begins:
            return "there are no allocations"
        begin, size = min(begins, key=lambda item: max(item[0] - int(address), int(address) - item[0] - item[1]))
        return f"byte {int(address) - begin} of the nearest allocation, which has {size}"


def _lanes(addresses: Array, mask: Array | None) -> Array:
    return np.arange(len(addresses)) if mask is None else np.flatnonzero(mask)
