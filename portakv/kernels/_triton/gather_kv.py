# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""gather_kv: rows of the caches into dense outputs, dequantised if asked, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, KVFormat, Variant
from portakv.kernels._triton.floats import decode, encode
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import (
    MOST_ROWS,
    Tile,
    cache_layout,
    check_pair,
    conversion,
    cut_rows,
    row_alignment,
    row_pointers,
    too_many_rows,
)
from portakv.kernels._triton.slots import INDEX_TYPES, count_faults, load_slots, slot_offset

Tensor = torch.Tensor


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    fmt, dtype = variant.fmt, variant.dtype
    assert fmt is not None
    assert dtype is not None
    cut = cut_rows(fmt, fmt.dtype, dtype, variant.alignment, tiles, lanes)
    return Source(
        kernel,
        dict.fromkeys(("k_cache", "v_cache", "k_out", "v_out"), "u8")
        | {"loc": INDEX_TYPES[variant.index_dtype], "k_scale": "fp32", "v_scale": "fp32", "faults": "i64"},
        cut.constants | conversion(fmt, fmt.dtype, dtype) | {"FAULT": FAULT_KINDS.index("gather_kv")},
        cut.num_warps,
        cut.rows,
        cut.chunks,
    )


def launch(
    launcher: Launcher,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`portakv.kernels.reference.rows.gather_kv` has the contract; here K and V share one dtype and one paging."""
    num_tokens = loc.shape[0]
    if num_tokens == 0:
        return
    if num_tokens * fmt.num_kv_heads > MOST_ROWS:
        raise too_many_rows(num_tokens, fmt.num_kv_heads)
    dtype = k_out.dtype
    k_token, k_head, _ = k_out.stride()
    v_token, v_head, _ = v_out.stride()
    pages, k_page, k_slot, k_cache_head = cache_layout(k_cache)
    v_pages, v_page, v_slot, v_cache_head = cache_layout(v_cache)
    check_pair("v_out", dtype, v_out.dtype, "v_cache", pages, v_pages)
    alignment = row_alignment(
        fmt,
        dtype,
        k_cache.data_ptr()
        | v_cache.data_ptr()
        | k_out.data_ptr()
        | v_out.data_ptr()
        | (k_token | k_head | v_token | v_head) * dtype.itemsize
        | (k_page | k_slot | k_cache_head | v_page | v_slot | v_cache_head) * fmt.dtype.itemsize,
    )
    kernel = launcher.find("gather_kv", k_cache, fmt, dtype, loc.dtype, None, alignment)
    kernel(
        (-(-num_tokens * fmt.num_kv_heads // kernel.rows), kernel.chunks, 1),
        (k_cache, v_cache, k_out, v_out, loc, k_scale, v_scale, faults),
        (
            *(num_tokens, loc.stride()[0], *pages, k_token, k_head, v_token, v_head),
            *(k_page, k_slot, k_cache_head, v_page, v_slot, v_cache_head),
        ),
    )


@triton.jit
def kernel(
    k_cache,
    v_cache,
    k_out,
    v_out,
    loc,
    k_scale,
    v_scale,
    faults,
    num_tokens,
    loc_stride,
    num_slots,
    page_size,
    k_token,
    k_head,
    v_token,
    v_head,
    k_page,
    k_slot,
    k_cache_head,
    v_page,
    v_slot,
    v_cache_head,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    SRC_ITEM: tl.constexpr,
    SRC_UNIT: tl.constexpr,
    DST_ITEM: tl.constexpr,
    DST_UNIT: tl.constexpr,
    CONVERT: tl.constexpr,
    SCALED: tl.constexpr,
    SRC_MANTISSA: tl.constexpr,
    SRC_BIAS: tl.constexpr,
    SRC_INF: tl.constexpr,
    SRC_NAN: tl.constexpr,
    DST_BITS: tl.constexpr,
    DST_MANTISSA: tl.constexpr,
    DST_BIAS: tl.constexpr,
    DST_INF: tl.constexpr,
    DST_NAN: tl.constexpr,
    DST_MAX: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    slot = load_slots(loc, loc_stride, token, num_tokens, -1)
    count_faults(faults + FAULT, (slot >= num_slots) & (head + chunk == 0))
    ok = (slot >= 0) & (slot < num_slots)

    column = chunk * BLOCK + tl.arange(0, BLOCK)
    k_mask = ok[:, None] & (column < K_DIM)[None, :]
    v_mask = ok[:, None] & (column < V_DIM)[None, :]
    k_offset = slot_offset(slot, page_size, k_page, k_slot) + head * k_cache_head
    v_offset = slot_offset(slot, page_size, v_page, v_slot) + head * v_cache_head
    # Both loads are under way before the first store, which the compiler could not move them across.
    k_rows = tl.load(row_pointers(k_cache, k_offset, column, SRC_ITEM, SRC_UNIT, ALIGNED), mask=k_mask)
    v_rows = tl.load(row_pointers(v_cache, v_offset, column, SRC_ITEM, SRC_UNIT, ALIGNED), mask=v_mask)
    if CONVERT:
        k_wide = decode(k_rows, SRC_MANTISSA, SRC_BIAS, SRC_INF, SRC_NAN)
        v_wide = decode(v_rows, SRC_MANTISSA, SRC_BIAS, SRC_INF, SRC_NAN)
        if SCALED:
            k_wide *= tl.load(k_scale + head)[:, None]
            v_wide *= tl.load(v_scale + head)[:, None]
        k_narrow = encode(k_wide, DST_BITS, DST_MANTISSA, DST_BIAS, DST_INF, DST_NAN, DST_MAX)
        v_narrow = encode(v_wide, DST_BITS, DST_MANTISSA, DST_BIAS, DST_INF, DST_NAN, DST_MAX)
        k_rows, v_rows = k_narrow.to(DST_UNIT), v_narrow.to(DST_UNIT)

    k_to = row_pointers(k_out, token * k_token + head * k_head, column, DST_ITEM, DST_UNIT, ALIGNED)
    v_to = row_pointers(v_out, token * v_token + head * v_head, column, DST_ITEM, DST_UNIT, ALIGNED)
    tl.store(k_to, k_rows, mask=k_mask)
    tl.store(v_to, v_rows, mask=v_mask)
