"""Tensors inside allocations filled with canary bytes, and their comparison, for the conformance kit."""

from __future__ import annotations

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


def compare(what: str, want: Buffer, have: Buffer) -> None:
    """Raise `Mismatch` unless both allocations have the same bytes."""
    a, b = want.storage.view(torch.uint8).cpu(), have.storage.view(torch.uint8).cpu()
    if torch.equal(a, b):
        return
    at = int((a != b).nonzero()[0])
    element = at // want.storage.dtype.itemsize - want.offset
    raise Mismatch(
        f"{what}: byte {at} (element {element} of {want.size} with strides {want.stride}): "
        f"expected {int(a[at]):#04x}, got {int(b[at]):#04x}; {int((a != b).sum())} bytes differ"
    )
