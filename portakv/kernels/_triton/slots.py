# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What every op does with slots, on the device: read, judge, count, narrow and write them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SLOTS_PER_PROGRAM = 256
"""For the ops that move slots only: two a lane, at four warps of 32."""

INDEX_TYPES = {torch.int32: "i32", torch.int64: "i64"}


@triton.jit
def load_slots(loc, stride, token, num_tokens, OTHER: tl.constexpr):
    """`loc[token]` as int64, `OTHER` past the last token. int32 slots widen here, before any arithmetic."""
    return tl.load(loc + token.to(tl.int64) * stride, mask=token < num_tokens, other=OTHER).to(tl.int64)


@triton.jit
def count_faults(fault, bad):
    """Add the number of `bad` to one counter; the masked atomic costs nothing where there is none."""
    tl.atomic_add(fault + bad.to(tl.int32) * 0, tl.full(bad.shape, 1, tl.int64), mask=bad, sem="relaxed")


@triton.jit
def write_slots(out, stride, length, index, value, cast_fault):
    """`out[index] = value` up to `length`; in an int32 `out` what does not fit becomes -1 and a fault."""
    inside = index < length
    if out.dtype.element_ty == tl.int32:
        narrow = value.to(tl.int32)
        unfit = narrow.to(tl.int64) != value
        count_faults(cast_fault, unfit & inside)
        tl.store(out + index * stride, tl.where(unfit, -1, narrow), mask=inside)
    else:
        tl.store(out + index * stride, value, mask=inside)


@triton.jit
def pointers(base, offset):
    """Pointers `offset` elements after `base`. What derives from a slot, or a row of a table, is added to one here."""
    tl.static_assert(offset.dtype == tl.int64, "expected 64-bit offsets")
    return base + offset


@triton.jit
def slot_offset(slot, page_size, page_stride, slot_stride):
    """Elements before `slot`. 64-bit division is slow, so only paged caches pay for it."""
    tl.static_assert(slot.dtype == tl.int64, "expected 64-bit slots")
    if page_size == 1:
        offset = slot * slot_stride
    else:
        page = slot // page_size
        offset = page * page_stride + (slot - page * page_size) * slot_stride
    return offset
