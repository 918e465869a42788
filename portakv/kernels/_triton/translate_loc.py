# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""translate_loc: the SWA slot of each full slot, with every cast, copy and tail, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, PAD, Variant
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import Tile
from portakv.kernels._triton.slots import (
    INDEX_TYPES,
    SLOTS_PER_PROGRAM,
    count_faults,
    load_slots,
    pointers,
    write_slots,
)

Tensor = torch.Tensor


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    assert variant.out_index_dtype is not None
    out = INDEX_TYPES[variant.out_index_dtype]
    return Source(
        kernel,
        {"mapping": "i64", "loc": INDEX_TYPES[variant.index_dtype], "swa_out": out, "loc_out": out}
        | {"swa_twin": "i32", "loc_twin": "i32", "faults": "i64"},
        {
            "BLOCK": SLOTS_PER_PROGRAM,
            "PAD": PAD,
            "FAULT": FAULT_KINDS.index("translate_loc"),
            "CAST_FAULT": FAULT_KINDS.index("cast_loc"),
        },
        4,
        SLOTS_PER_PROGRAM,
    )


def launch(
    launcher: Launcher,
    mapping: Tensor,
    loc: Tensor,
    swa_out: Tensor,
    loc_out: Tensor | None,
    swa_twin: Tensor | None,
    loc_twin: Tensor | None,
    faults: Tensor,
) -> None:
    """`portakv.kernels.reference.rows.translate_loc`, whose docstring is the contract. The outs share a dtype."""
    if loc_out is not None and loc_out.dtype != swa_out.dtype:
        raise TypeError(f"loc_out: expected the dtype of swa_out, {swa_out.dtype}, got {loc_out.dtype}")
    outs = (swa_out, loc_out, swa_twin, loc_twin)
    lengths = [0 if out is None else out.shape[0] for out in outs]
    longest = max(lengths)
    if longest == 0:
        return
    kernel = launcher.find("translate_loc", mapping, None, None, loc.dtype, swa_out.dtype)
    kernel(
        (-(-longest // kernel.rows), 1, 1),
        # An output that is absent has length 0: nothing is written through its pointer.
        (mapping, loc, *(faults if out is None else out for out in outs), faults),
        (
            *(loc.shape[0], loc.stride(0), mapping.shape[0] - 1, *lengths),
            *(1 if out is None else out.stride(0) for out in outs),
        ),
    )


@triton.jit
def kernel(
    mapping,
    loc,
    swa_out,
    loc_out,
    swa_twin,
    loc_twin,
    faults,
    num_tokens,
    loc_stride,
    num_slots,
    swa_len,
    loc_len,
    swa_twin_len,
    loc_twin_len,
    swa_stride,
    loc_out_stride,
    swa_twin_stride,
    loc_twin_stride,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    FAULT: tl.constexpr,
    CAST_FAULT: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = load_slots(loc, loc_stride, index, num_tokens, PAD)
    live = index < num_tokens
    count_faults(faults + FAULT, live & (slot >= num_slots))
    swa = tl.load(pointers(mapping, slot), mask=live & (slot >= 0) & (slot < num_slots), other=-1)
    swa = tl.where(live, swa, PAD)
    write_slots(swa_out, swa_stride, swa_len, index, swa, faults + CAST_FAULT)
    write_slots(loc_out, loc_out_stride, loc_len, index, slot, faults + CAST_FAULT)
    write_slots(swa_twin, swa_twin_stride, swa_twin_len, index, swa, faults + CAST_FAULT)
    write_slots(loc_twin, loc_twin_stride, loc_twin_len, index, slot, faults + CAST_FAULT)
