"""Where each byte of a token lies: a table of parts with tile addresses.

An item of a buffer has the bytes of `slots` consecutive slots: a page where the bytes of one token lie apart, else one
slot. Slot s is slot `s % slots` of item `s // slots`. A part is what belongs together of a token, such as its K data or
the scales of its V: `heads` times `units` units of `unit_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Unit d of slot t lies at `(t // a) * s1 + (t % a) * s2 + (d // b) * s3 + (d % b) * s4` bytes of its head.

    One split of each axis holds every layout of every engine that was looked at: rows (a = b = 1), K across tokens,
    pairs for matrix tiles, scales interleaved over four tokens.
    """

    a: int
    s1: int
    s2: int
    b: int
    s3: int
    s4: int

    @classmethod
    def row(cls, slot_stride: int, unit_bytes: int) -> Tile:
        """Of units that lie side by side, slots `slot_stride` bytes apart."""
        return cls(1, slot_stride, 0, 1, unit_bytes, 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a token.

    Attributes:
        role: "k", "v", "latent", "rope", or with "_scale" behind it what that is multiplied with.
        encoding: the dtype of an element, as "bfloat16", or what several of them in a unit are, as "e2m1x2".
        units, unit_bytes: of one token and head.
        tile: where they lie in a head.
        heads, head_stride: how many, and bytes from one to the next.
        buffer, offset: the buffer, and bytes from the begin of its item.
    """

    role: str
    encoding: str
    units: int
    unit_bytes: int
    tile: Tile
    heads: int = 1
    head_stride: int = 0
    buffer: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Of one token."""
        return self.heads * self.units * self.unit_bytes


@dataclass(frozen=True, slots=True)
class Buffer:
    """The items of one allocation: their bytes, and the slots of each."""

    item_bytes: int
    slots: int = 1


@dataclass(frozen=True, slots=True)
class PartTable:
    """All parts of a token, in the order of its raw row, and the buffers that hold them.

    A raw row is one token of one layer as `raw_bytes` bytes: its parts, each by head and unit.

    Example:
        >>> rows = PartTable((Buffer(6),), (Part("k", "bfloat16", 3, 2, Tile.row(6, 2)),))
        >>> rows.raw_bytes
        6
        >>> rows.gather([torch.arange(12, dtype=torch.uint8)], torch.tensor([1]))
        tensor([[ 6,  7,  8,  9, 10, 11]], dtype=torch.uint8)
    """

    buffers: tuple[Buffer, ...]
    parts: tuple[Part, ...]

    @property
    def raw_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def view(self, part: Part, buffer: Tensor) -> Tensor:
        """`part` in `buffer`, uint8 of one layer: `[items, slots / a, a, heads, units / b, b, unit_bytes]`."""
        of, tile = self.buffers[part.buffer], part.tile
        size = (
            buffer.shape[0] // of.item_bytes,
            of.slots // tile.a,
            tile.a,
            part.heads,
            part.units // tile.b,
            tile.b,
            part.unit_bytes,
        )
        strides = of.item_bytes, tile.s1, tile.s2, part.head_stride, tile.s3, tile.s4, 1
        return buffer.as_strided(size, strides, buffer.storage_offset() + part.offset)

    def index(self, part: Part, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What of the first three axes of `view` is each of `slots`."""
        count, a = self.buffers[part.buffer].slots, part.tile.a
        at = slots % count
        return slots // count, at // a, at % a

    def gather(self, buffers: Sequence[Tensor], slots: Tensor) -> Tensor:
        """The raw rows `[T, raw_bytes]` of `slots` of one layer, whose buffers are uint8."""
        found = (self.view(part, buffers[part.buffer])[self.index(part, slots)].flatten(1) for part in self.parts)
        return torch.cat([*found], -1)

    def scatter(self, rows: Tensor, buffers: Sequence[Tensor], slots: Tensor) -> None:
        """Write raw rows to `slots`, each named once, and nothing else."""
        of_parts = torch.split_with_sizes(rows, [part.nbytes for part in self.parts], -1)
        for part, own in zip(self.parts, of_parts, strict=True):
            view = self.view(part, buffers[part.buffer])
            view[self.index(part, slots)] = own.view(-1, *view.shape[3:])

    def problems(self) -> Iterator[str]:
        """What makes this no table: a part that does not fit its tile or its item, two bytes at one place."""
        taken = [torch.zeros(buffer.item_bytes, dtype=torch.int32) for buffer in self.buffers]
        for part in self.parts:
            of, tile = self.buffers[part.buffer], part.tile
            if of.slots % tile.a or part.units % tile.b:
                got = f"{of.slots}, {part.units}"
                yield f"{part.role}: expected multiples of {tile.a} slots and {tile.b} units, got {got}"
                continue
            item = torch.arange(of.item_bytes, dtype=torch.int32)
            strides = (of.slots // tile.a - 1, tile.a - 1, part.heads - 1, part.units // tile.b - 1, tile.b - 1)
            steps = (tile.s1, tile.s2, part.head_stride, tile.s3, tile.s4)
            last = part.offset + sum(n * step for n, step in zip(strides, steps, strict=True)) + part.unit_bytes
            if part.offset < 0 or min(steps) < 0 or last > of.item_bytes:
                yield f"{part.role}: expected bytes inside an item of {of.item_bytes}, got {last}"
                continue
            places = self.view(part, item).flatten().long()
            taken[part.buffer].index_add_(0, places, torch.ones(len(places), dtype=torch.int32))
        for i, counts in enumerate(taken):
            if bool((counts > 1).any()):
                yield f"buffer {i}: byte {int(counts.argmax())} of an item belongs to {int(counts.max())} places"
