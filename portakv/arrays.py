"""Integers from outside as numpy arrays on the host, checked; and the arithmetic of runs of slots."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from portakv import device as devices

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
IntsLike = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int]
"""What callers pass: a tensor (one on a device costs a sync), an array of any integer dtype, a sequence."""


def as_int(name: str, value: SupportsIndex, least: int, most: int | None = None) -> int:
    """`value` as a Python int from `least` to `most`, else `TypeError` or `ValueError`.

    Integers of numpy and of 0-d arrays and tensors are taken too, bools and vectors of one are not.
    """
    try:
        number = operator.index(value)
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and (value.dim() or value.dtype is torch.bool)):
            raise TypeError
    except (RuntimeError, TypeError, ValueError):  # of a tensor on the meta device, of an array of floats
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name}: expected at most {most}, got {number}")
    return number


def as_array(name: str, value: IntsLike, ndim: tuple[int, ...]) -> npt.NDArray[np.integer[Any]]:
    """Integers on the host, in their own dtype; a CPU tensor or an array is not copied."""
    try:
        array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as error:  # sparse, meta, of a subclass; rows of several lengths
        raise TypeError(f"{name}: expected a plain tensor, an array or a sequence of integers, got {error}") from error
    if array.dtype.kind not in "iu" and array.size:  # numpy takes an empty list for floats
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if array.ndim not in ndim:
        expected = " or ".join(map(str, ndim))
        raise ValueError(f"{name}: expected {expected} dimensions, got shape {array.shape}")
    return array


def as_ints(name: str, value: IntsLike) -> Ints:
    """1-D int64 on the host; not a copy where `value` is that already."""
    return as_array(name, value, (1,)).astype(np.int64, copy=False)


def as_batch(**columns: IntsLike) -> list[Ints]:
    """1-D arguments, by name, that must be of one length."""
    arrays = [as_ints(name, value) for name, value in columns.items()]
    sizes = [array.size for array in arrays]
    if min(sizes) != max(sizes):
        raise ValueError(f"{', '.join(columns)}: expected equal lengths, got {', '.join(map(str, sizes))}")
    return arrays


def as_table(name: str, value: IntsLike) -> torch.Tensor | npt.NDArray[np.integer[Any]]:
    """A 2-D table of integers: a tensor on a device stays there, anything else is an array on the host."""
    if not isinstance(value, torch.Tensor) or value.is_meta or devices.shares_host_memory(value.device):
        return as_array(name, value, (2,))
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool:
        raise TypeError(f"{name}: expected integers, got {value.dtype}")
    if value.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(value.shape)}")
    return value


def require(good: Bools, name: str, expected: str, values: Ints) -> None:
    """Raise `ValueError` for the first of `values` that is not `good`."""
    if not good.all():
        i = int(np.argmin(good))
        raise ValueError(f"{name}[{i}]: expected {expected}, got {values[i]}")


def entries(table: torch.Tensor | npt.NDArray[np.integer[Any]], rows: Ints, columns: Ints) -> Ints:
    """`table[rows, columns]` on the host; of a table on a device only these are copied."""
    if not isinstance(table, torch.Tensor):
        return table[rows, columns].astype(np.int64, copy=False)
    at = torch.from_numpy(np.stack((rows, columns))).to(table.device)
    return as_ints("table", table[at[0], at[1]])


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
