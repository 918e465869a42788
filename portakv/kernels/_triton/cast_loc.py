# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""cast_loc: slots as int32, with their tail, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, PAD, Variant
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import Tile
from portakv.kernels._triton.slots import INDEX_TYPES, SLOTS_PER_PROGRAM, load_slots, write_slots

Tensor = torch.Tensor


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    return Source(
        kernel,
        {"loc": INDEX_TYPES[variant.index_dtype], "out": "i32", "faults": "i64"},
        {"BLOCK": SLOTS_PER_PROGRAM, "PAD": PAD, "FAULT": FAULT_KINDS.index("cast_loc")},
        4,
        SLOTS_PER_PROGRAM,
    )


def launch(launcher: Launcher, loc: Tensor, out: Tensor, faults: Tensor) -> None:
    """`portakv.kernels.reference.rows.cast_loc`, whose docstring is the contract."""
    length = out.shape[0]
    if length == 0:
        return
    kernel = launcher.find("cast_loc", loc, None, None, loc.dtype, torch.int32)
    scalars = (loc.shape[0], loc.stride(0), length, out.stride(0))
    kernel((-(-length // kernel.rows), 1, 1), (loc, out, faults), scalars)


@triton.jit
def kernel(
    loc,
    out,
    faults,
    num_tokens,
    loc_stride,
    out_len,
    out_stride,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    FAULT: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = load_slots(loc, loc_stride, index, num_tokens, PAD)
    write_slots(out, out_stride, out_len, index, slot, faults + FAULT)
