# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""patch_map: the allocator's edits of the mapping, in stream order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import Variant
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import Tile
from portakv.kernels._triton.slots import SLOTS_PER_PROGRAM, load_slots, pointers

Tensor = torch.Tensor


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    tensors = dict.fromkeys(("mapping", "slots", "values"), "i64")
    return Source(kernel, tensors, {"BLOCK": SLOTS_PER_PROGRAM}, 4, SLOTS_PER_PROGRAM)


def launch(launcher: Launcher, mapping: Tensor, slots: Tensor, values: Tensor) -> None:
    """`portakv.kernels.reference.rows.patch_map`, whose docstring is the contract. A slot outside the mapping is
    left alone."""
    num_slots = slots.shape[0]
    if num_slots == 0:
        return
    kernel = launcher.find("patch_map", mapping)
    scalars = (num_slots, slots.stride(0), values.stride(0), mapping.shape[0])
    kernel((-(-num_slots // kernel.rows), 1, 1), (mapping, slots, values), scalars)


@triton.jit
def kernel(mapping, slots, values, num_slots, slots_stride, values_stride, length, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = load_slots(slots, slots_stride, index, num_slots, -1)
    value = tl.load(values + index * values_stride, mask=index < num_slots)
    tl.store(pointers(mapping, slot), value, mask=(slot >= 0) & (slot < length))
