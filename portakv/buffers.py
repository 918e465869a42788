"""Tensors inside allocations filled with canary bytes, and their comparison, for the conformance kit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

CANARY = 0xA5


class Mismatch(AssertionError):
    """A kernel's bytes differ from the reference's."""


@dataclass(slots=True)
class Buffer:
    """A strided tensor inside a canary-filled allocation."""

    storage: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def tensor(self) -> torch.Tensor:
        return self.storage.as_strided(self.size, self.stride, self.offset)

    def to(self, device: torch.device) -> Buffer:
        """The same in a copy of the whole allocation."""
        copy = self.storage.view(torch.uint8).clone().to(device).view(self.storage.dtype)
        return replace(self, storage=copy)

    def columns(self, begin: int, end: int) -> Buffer:
        """Columns of the last axis, in the same allocation."""
        return replace(self, size=(*self.size[:-1], end - begin), offset=self.offset + begin)


def wrap(tensor: torch.Tensor) -> Buffer:
    """`tensor` with canary elements before and after it."""
    out = canary(tuple(tensor.shape), tensor.dtype)
    out.tensor.copy_(tensor)
    return out


def canary(size: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Buffer:
    """A tensor of canary bytes, 64 bytes of them on either side; dense unless `stride` says otherwise."""
    if stride is None:
        stride = tuple(torch.empty(size, device="meta").stride())
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    margin = 64 // dtype.itemsize
    storage = torch.full(((span + 2 * margin) * dtype.itemsize,), CANARY, dtype=torch.uint8, device="cpu")
    return Buffer(storage.view(dtype), size, stride, margin)


def compare(what: str, want: Buffer, have: Buffer, others: Sequence[Buffer] = ()) -> None:
    """Raise `Mismatch` unless both allocations have the same bytes, or each element those of `want` or of one of
    `others`."""
    item = want.storage.dtype.itemsize
    a, b, *more = (x.storage.view(torch.uint8).cpu().view(-1, item) for x in (want, have, *others))
    wrong = (a != b).any(1)
    for other in more:
        wrong &= (other != b).any(1)
    if not wrong.any():
        return
    element = int(wrong.nonzero()[0])
    at = int((a[element] != b[element]).nonzero()[0])
    raise Mismatch(
        f"{what}: byte {element * item + at} (element {element - want.offset} of {want.size} with strides "
        f"{want.stride}): expected {int(a[element, at]):#04x}, got {int(b[element, at]):#04x}; "
        f"{int((a != b)[wrong].sum())} bytes differ"
    )
