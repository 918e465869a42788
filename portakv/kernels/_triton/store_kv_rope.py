# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""store_kv_rope: as store_kv, with K, or the rope part of MLA rows, rotated on the way."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, KVFormat, Variant
from portakv.kernels._triton.floats import FLOATS, decode, encode
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import (
    MOST_ROWS,
    UNITS,
    Tile,
    cache_layout,
    check_pair,
    conversion,
    cut_rows,
    row_pointers,
    too_many_rows,
)
from portakv.kernels._triton.slots import INDEX_TYPES, count_faults, load_slots, slot_offset

Tensor = torch.Tensor


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    fmt, dtype = variant.fmt, variant.dtype
    assert fmt is not None
    assert dtype is not None
    cut = cut_rows(fmt, dtype, fmt.dtype, variant.alignment, tiles, lanes, by_element=True)
    return Source(
        kernel,
        dict.fromkeys(("k", "v", "k_cache", "v_cache"), "u8")
        | {"loc": INDEX_TYPES[variant.index_dtype], "k_inv": "fp32", "v_inv": "fp32"}
        | ROPE_TENSORS
        | {"faults": "i64"},
        cut.constants
        | conversion(fmt, dtype, fmt.dtype)
        | rope_constants(variant)
        | {"ROTATE_V": fmt.rotates_v, "RESERVED": fmt.page_size, "FAULT": FAULT_KINDS.index("store_kv")},
        cut.num_warps,
        cut.rows,
        cut.chunks,
    )


ROPE_TENSORS = {"cos_sin": "u8", "positions": "i32"}


def rope_constants(variant: Variant) -> dict[str, Any]:
    assert variant.rope is not None
    rope = FLOATS[variant.rope]
    return {
        "ROPE_UNIT": UNITS[variant.rope.itemsize],
        "ROPE_MANTISSA": rope.mantissa,
        "ROPE_BIAS": rope.bias,
        "ROPE_INF": rope.inf,
        "ROPE_NAN": rope.nan,
    }


def rope_arguments(
    cos_sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...]]:
    """The tensors and scalars of a rope store. int64 positions are read as pairs of 32-bit words."""
    words = positions.element_size() // 4
    if positions.dtype != torch.int32:
        positions = positions.view(torch.int32)
    return (cos_sin, positions), (words, *cos_sin.shape, cos_sin.stride(0), int(interleaved))


def launch(
    launcher: Launcher,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_inv: Tensor,
    v_inv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`portakv.kernels.reference.rows.store_kv_rope` has the contract; here K and V share one dtype and one paging, and
    positions are dense."""
    num_tokens = loc.shape[0]
    if num_tokens == 0:
        return
    if num_tokens * fmt.num_kv_heads > MOST_ROWS:
        raise too_many_rows(num_tokens, fmt.num_kv_heads)
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    pages, k_page, k_slot, k_cache_head = cache_layout(k_cache)
    v_pages, v_page, v_slot, v_cache_head = cache_layout(v_cache)
    check_pair("v", k.dtype, v.dtype, "v_cache", pages, v_pages)
    tensors, scalars = rope_arguments(cos_sin, positions, interleaved)
    kernel = launcher.find("store_kv_rope", k_cache, fmt, k.dtype, loc.dtype, None, k.element_size(), cos_sin.dtype)
    kernel(
        (-(-num_tokens * fmt.num_kv_heads // kernel.rows), kernel.chunks, 1),
        (k, v, k_cache, v_cache, loc, k_inv, v_inv, *tensors, faults),
        (
            *(num_tokens, loc.stride()[0], *pages, k_token, k_head, v_token, v_head),
            *(k_page, k_slot, k_cache_head, v_page, v_slot, v_cache_head, *scalars),
        ),
    )


@triton.jit
def load_positions(positions, words, token, num_tokens, num_positions):
    """Positions as int64, and which of them have an angle. int64 ones, of two words, have none past 2^31."""
    inside = token < num_tokens
    low = tl.load(positions + token * words, mask=inside, other=-1).to(tl.int64)
    high = tl.load(positions + token * words + words - 1, mask=inside, other=-1).to(tl.int64)
    known = (low >= 0) & (low < num_positions) & (high * (words - 1) == 0)
    return tl.where(known, low, 0), known


@triton.jit
def load_rotated(
    base,
    offset,
    column,
    mask,
    position,
    cos_sin,
    dims,
    angle_stride,
    interleaved,
    ITEM: tl.constexpr,
    UNIT: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    ROPE_UNIT: tl.constexpr,
    ROPE_MANTISSA: tl.constexpr,
    ROPE_BIAS: tl.constexpr,
    ROPE_INF: tl.constexpr,
    ROPE_NAN: tl.constexpr,
):
    """Rows of the source's units, their first `dims` columns rotated."""
    column = column.to(tl.int64)
    half = dims // 2
    first = tl.where(interleaved != 0, column % 2 == 0, column < half)
    apart = tl.where(interleaved != 0, 1, half)
    partner = tl.where(first, column + apart, column - apart)
    angle = tl.where(interleaved != 0, column // 2, column % half)
    turned = mask & (column < dims)[None, :]
    raw = tl.load(row_pointers(base, offset, column, ITEM, UNIT, False), mask=mask)
    other = tl.load(row_pointers(base, offset, partner, ITEM, UNIT, False), mask=turned)
    angles = row_pointers(cos_sin, position * angle_stride, angle, 1, ROPE_UNIT, False)
    cos = decode(tl.load(angles, mask=turned), ROPE_MANTISSA, ROPE_BIAS, ROPE_INF, ROPE_NAN)
    sin = decode(tl.load(angles + half, mask=turned), ROPE_MANTISSA, ROPE_BIAS, ROPE_INF, ROPE_NAN)
    x = decode(raw, MANTISSA, BIAS, INF, NAN) * cos
    y = decode(other, MANTISSA, BIAS, INF, NAN) * sin
    out = encode(tl.where(first[None, :], x - y, x + y), 8 * ITEM, MANTISSA, BIAS, INF, NAN, 0).to(UNIT)
    return tl.where(turned, out, raw)


@triton.jit
def kernel(
    k,
    v,
    k_cache,
    v_cache,
    loc,
    k_inv,
    v_inv,
    cos_sin,
    positions,
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
    words,
    num_positions,
    dims,
    angle_stride,
    interleaved,
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
    ROPE_UNIT: tl.constexpr,
    ROPE_MANTISSA: tl.constexpr,
    ROPE_BIAS: tl.constexpr,
    ROPE_INF: tl.constexpr,
    ROPE_NAN: tl.constexpr,
    ROTATE_V: tl.constexpr,
    RESERVED: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    slot = load_slots(loc, loc_stride, token, num_tokens, -1)
    position, known = load_positions(positions, words, token, num_tokens, num_positions)
    ok = (slot >= RESERVED) & (slot < num_slots)
    count_faults(faults + FAULT, ((slot >= num_slots) | (ok & ~known)) & (head + chunk == 0))
    ok = ok & known

    column = chunk * BLOCK + tl.arange(0, BLOCK)
    k_mask = ok[:, None] & (column < K_DIM)[None, :]
    v_mask = ok[:, None] & (column < V_DIM)[None, :]
    k_from = token * k_token + head * k_head
    v_from = token * v_token + head * v_head
    if ROTATE_V:
        k_rows = tl.load(row_pointers(k, k_from, column, SRC_ITEM, SRC_UNIT, ALIGNED), mask=k_mask)
        v_rows = load_rotated(
            *(v, v_from, column, v_mask, position, cos_sin, dims, angle_stride, interleaved),
            *(SRC_ITEM, SRC_UNIT, SRC_MANTISSA, SRC_BIAS, SRC_INF, SRC_NAN),
            *(ROPE_UNIT, ROPE_MANTISSA, ROPE_BIAS, ROPE_INF, ROPE_NAN),
        )
    else:
        v_rows = tl.load(row_pointers(v, v_from, column, SRC_ITEM, SRC_UNIT, ALIGNED), mask=v_mask)
        k_rows = load_rotated(
            *(k, k_from, column, k_mask, position, cos_sin, dims, angle_stride, interleaved),
            *(SRC_ITEM, SRC_UNIT, SRC_MANTISSA, SRC_BIAS, SRC_INF, SRC_NAN),
            *(ROPE_UNIT, ROPE_MANTISSA, ROPE_BIAS, ROPE_INF, ROPE_NAN),
        )
    if CONVERT:
        k_wide = decode(k_rows, SRC_MANTISSA, SRC_BIAS, SRC_INF, SRC_NAN)
        v_wide = decode(v_rows, SRC_MANTISSA, SRC_BIAS, SRC_INF, SRC_NAN)
        if SCALED:
            k_wide *= tl.load(k_inv + head)[:, None]
            v_wide *= tl.load(v_inv + head)[:, None]
        k_narrow = encode(k_wide, DST_BITS, DST_MANTISSA, DST_BIAS, DST_INF, DST_NAN, DST_MAX)
        v_narrow = encode(v_wide, DST_BITS, DST_MANTISSA, DST_BIAS, DST_INF, DST_NAN, DST_MAX)
        k_rows, v_rows = k_narrow.to(DST_UNIT), v_narrow.to(DST_UNIT)

    k_offset = slot_offset(slot, page_size, k_page, k_slot) + head * k_cache_head
    v_offset = slot_offset(slot, page_size, v_page, v_slot) + head * v_cache_head
    tl.store(row_pointers(k_cache, k_offset, column, DST_ITEM, DST_UNIT, ALIGNED), k_rows, mask=k_mask)
    tl.store(row_pointers(v_cache, v_offset, column, DST_ITEM, DST_UNIT, ALIGNED), v_rows, mask=v_mask)
