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
from portakv.kernels._triton.rows import (
    MOST_ROWS,
    Tile,
    cache_layout,
    check_pair,
    cut_rows,
    row_alignment,
    row_pointers,
    too_many_rows,
)
from portakv.kernels._triton.slots import INDEX_TYPES, count_faults, load_slots, slot_offset

Tensor = torch.Tensor

SCRATCH_BYTES = 64 << 20
"""Most scratch of one pair of launches, unless one layer needs more; layers beyond it take another pair."""


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    fmt = variant.fmt
    assert fmt is not None
    cut = cut_rows(fmt, fmt.dtype, fmt.dtype, variant.alignment, tiles, lanes)
    constants = {k: v for k, v in cut.constants.items() if k != "DST"}
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
    """`portakv.kernels.reference.rows.move_kv`, whose docstring is the contract. `tgt` and `src` share a dtype."""
    num_layers, num_tokens = k_caches.shape[0], tgt.shape[0]
    if num_tokens == 0 or num_layers == 0:
        return
    if num_tokens * fmt.num_kv_heads > MOST_ROWS:
        raise too_many_rows(num_tokens, fmt.num_kv_heads)
    pages, *k_lies = cache_layout(k_caches[0])
    v_pages, *v_lies = cache_layout(v_caches[0])
    check_pair("v_caches", k_caches.dtype, v_caches.dtype, "v_caches", pages, v_pages)
    if tgt.dtype != src.dtype:
        raise TypeError(f"tgt: expected the dtype of src, {src.dtype}, got {tgt.dtype}")
    step = max(1, min(num_layers, SCRATCH_BYTES // (num_tokens * fmt.row_bytes)))
    k_rows, v_rows = (c.new_empty((step, num_tokens, *c.shape[-2:])) for c in (k_caches, v_caches))
    addresses = k_caches.data_ptr() | v_caches.data_ptr()
    for cache in (k_caches, v_caches):
        for stride in cache.stride()[:-1]:
            addresses |= stride * fmt.dtype.itemsize
    alignment = row_alignment(fmt, fmt.dtype, addresses)
    lies = (k_caches.stride(0), *k_lies, v_caches.stride(0), *v_lies, *k_rows.stride()[:-1], *v_rows.stride()[:-1])
    kernel = launcher.find("move_kv", k_caches, fmt, fmt.dtype, src.dtype, None, alignment)
    for first in range(0, num_layers, step):
        k, v = k_caches[first : first + step], v_caches[first : first + step]
        grid = (-(-num_tokens * fmt.num_kv_heads // kernel.rows), kernel.chunks, k.shape[0])
        scalars = (num_tokens, tgt.stride(0), src.stride(0), *pages, first, *lies)
        kernel(grid, (k, v, k_rows, v_rows, tgt, src, faults), (*scalars, 0))
        kernel(grid, (k_rows, v_rows, k, v, tgt, src, faults), (*scalars, 1))


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
    page_size,
    first_layer,
    k_layer,
    k_page,
    k_slot,
    k_head,
    v_layer,
    v_page,
    v_slot,
    v_head,
    k_row_layer,
    k_row,
    k_row_head,
    v_row_layer,
    v_row,
    v_row_head,
    writing,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    SRC: tl.constexpr,
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
    slot = tl.where(writing != 0, write, read)

    column = chunk * BLOCK + tl.arange(0, BLOCK)
    k_mask = ok[:, None] & (column < K_DIM)[None, :]
    v_mask = ok[:, None] & (column < V_DIM)[None, :]
    k_offset = layer * k_layer + slot_offset(slot, page_size, k_page, k_slot) + head * k_head
    v_offset = layer * v_layer + slot_offset(slot, page_size, v_page, v_slot) + head * v_head
    k_scratch = layer * k_row_layer + token * k_row + head * k_row_head
    v_scratch = layer * v_row_layer + token * v_row + head * v_row_head
    k_offset, k_scratch = tl.where(writing != 0, k_scratch, k_offset), tl.where(writing != 0, k_offset, k_scratch)
    v_offset, v_scratch = tl.where(writing != 0, v_scratch, v_offset), tl.where(writing != 0, v_offset, v_scratch)
    k_rows = tl.load(row_pointers(k_from, k_offset, column, SRC, ALIGNED), mask=k_mask)
    v_rows = tl.load(row_pointers(v_from, v_offset, column, SRC, ALIGNED), mask=v_mask)
    tl.store(row_pointers(k_to, k_scratch, column, SRC, ALIGNED), k_rows, mask=k_mask)
    tl.store(row_pointers(v_to, v_scratch, column, SRC, ALIGNED), v_rows, mask=v_mask)
