# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""move_kv: copy slots inside the caches of every layer, as if every source were read before any write.

Programs of one launch run in any order, so a slot that is both source and target would be read late by some.
Two launches of one kernel do it: rows into a scratch buffer, then out of it; the stream keeps them in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, KVFormat, Variant
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import Tile, cut_rows, row_alignment, row_pointers
from portakv.kernels._triton.slots import INDEX_TYPES, count_faults, load_slots

Tensor = torch.Tensor

SCRATCH_BYTES = 64 << 20
"""Most scratch of one pair of launches, unless one layer needs more; layers beyond it take another pair."""


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    fmt = variant.fmt
    assert fmt is not None
    cut = cut_rows(fmt, fmt.dtype, fmt.dtype, variant.alignment, tiles, lanes)
    constants = {k: v for k, v in cut.constants.items() if k not in ("DST_ITEM", "DST_UNIT")}
    return Source(
        kernel,
        dict.fromkeys(("k_from", "v_from", "k_to", "v_to"), "u8")
        | {"tgt": INDEX_TYPES[variant.index_dtype], "src": INDEX_TYPES[variant.index_dtype], "faults": "i64"},
        constants | {"RESERVED": fmt.page_size, "FAULT": FAULT_KINDS.index("move_kv")},
        cut.num_warps,
        cut.rows,
        cut.chunks,
    )


def launch(
    launcher: Launcher,
    k_caches: Tensor,
    v_caches: Tensor,
    tgt: Tensor,
    src: Tensor,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`portakv.kernels.reference.move_kv`, whose docstring is the contract. `tgt` and `src` share a dtype."""
    num_layers, num_slots, num_tokens = k_caches.shape[0], k_caches.shape[1], tgt.shape[0]
    if num_tokens == 0 or num_layers == 0:
        return
    if tgt.dtype != src.dtype:
        raise TypeError(f"tgt: expected the dtype of src, {src.dtype}, got {tgt.dtype}")
    step = max(1, min(num_layers, SCRATCH_BYTES // (num_tokens * fmt.row_bytes)))
    k_rows, v_rows = (c.new_empty((step, num_tokens, *c.shape[2:])) for c in (k_caches, v_caches))
    addresses = k_caches.data_ptr() | v_caches.data_ptr()
    for cache in (k_caches, v_caches):
        for stride in cache.stride()[:-1]:
            addresses |= stride * fmt.dtype.itemsize
    alignment = row_alignment(fmt, fmt.dtype, addresses)
    kernel = launcher.find("move_kv", k_caches, fmt, fmt.dtype, src.dtype, None, alignment)
    for first in range(0, num_layers, step):
        k, v = k_caches[first : first + step], v_caches[first : first + step]
        grid = (-(-num_tokens * fmt.num_kv_heads // kernel.rows), kernel.chunks, k.shape[0])
        for writing, tensors in enumerate(((k, v, k_rows, v_rows), (k_rows, v_rows, k, v))):
            strides = (stride for t in tensors for stride in t.stride()[:-1])
            scalars = (num_tokens, tgt.stride(0), src.stride(0), num_slots, writing, first, *strides)
            kernel(grid, (*tensors, tgt, src, faults), scalars)


@triton.jit
def kernel(
    k_from,
    v_from,
    k_to,
    v_to,
    tgt,
    src,
    faults,
    num_tokens,
    tgt_stride,
    src_stride,
    num_slots,
    writing,
    first_layer,
    k_from_layer,
    k_from_slot,
    k_from_head,
    v_from_layer,
    v_from_slot,
    v_from_head,
    k_to_layer,
    k_to_slot,
    k_to_head,
    v_to_layer,
    v_to_slot,
    v_to_head,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    SRC_ITEM: tl.constexpr,
    SRC_UNIT: tl.constexpr,
    RESERVED: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    read = load_slots(src, src_stride, token, num_tokens, -1)
    write = load_slots(tgt, tgt_stride, token, num_tokens, -1)
    ok = (read >= 0) & (read < num_slots)
    once = head + chunk + layer + first_layer == 0
    if writing != 0:
        count_faults(faults + FAULT, ok & (write >= num_slots) & once)
        ok = ok & (write >= RESERVED) & (write < num_slots)
    else:
        count_faults(faults + FAULT, (read >= num_slots) & once)
    from_slot = tl.where(writing != 0, token, read)
    to_slot = tl.where(writing != 0, write, token)

    column = chunk * BLOCK + tl.arange(0, BLOCK)
    k_mask = ok[:, None] & (column < K_DIM)[None, :]
    v_mask = ok[:, None] & (column < V_DIM)[None, :]
    k_offset = layer * k_from_layer + from_slot * k_from_slot + head * k_from_head
    v_offset = layer * v_from_layer + from_slot * v_from_slot + head * v_from_head
    k_rows = tl.load(row_pointers(k_from, k_offset, column, SRC_ITEM, SRC_UNIT, ALIGNED), mask=k_mask)
    v_rows = tl.load(row_pointers(v_from, v_offset, column, SRC_ITEM, SRC_UNIT, ALIGNED), mask=v_mask)
    k_offset = layer * k_to_layer + to_slot * k_to_slot + head * k_to_head
    v_offset = layer * v_to_layer + to_slot * v_to_slot + head * v_to_head
    tl.store(row_pointers(k_to, k_offset, column, SRC_ITEM, SRC_UNIT, ALIGNED), k_rows, mask=k_mask)
    tl.store(row_pointers(v_to, v_offset, column, SRC_ITEM, SRC_UNIT, ALIGNED), v_rows, mask=v_mask)
