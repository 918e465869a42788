# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""store_kv, gather_kv and store_kv_rope: rows of K and V into the caches or out of them, in one launch.

A store converts to the caches' dtype, and with rope rotates K, or the rope part of MLA rows, on the way; a gather
converts to the dtype that it is asked for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, KVFormat, Variant
from portakv.kernels._triton.floats import decode, encode
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rope import ROPE_TENSORS, load_positions, load_rotated, rope_constants
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


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    fmt, dtype, rope = variant.fmt, variant.dtype, variant.rope
    assert fmt is not None
    assert dtype is not None
    store = variant.op != "gather_kv"
    dtypes = (dtype, fmt.dtype) if store else (fmt.dtype, dtype)
    cut = cut_rows(fmt, *dtypes, variant.alignment, tiles, lanes, by_element=rope is not None)
    rows, scales = (("k", "v"), ("k_inv", "v_inv")) if store else (("k_out", "v_out"), ("k_scale", "v_scale"))
    return Source(
        kernel,
        dict.fromkeys((*rows, "k_cache", "v_cache"), "u8")
        | {"loc": INDEX_TYPES[variant.index_dtype]}
        | dict.fromkeys(scales, "fp32")
        | {"faults": "i64"}
        | (ROPE_TENSORS if rope else {}),
        cut.constants
        | rope_constants(variant)
        | {
            "STORE": store,
            "SCALED": fmt.fp8 is not None,
            "ROTATE_V": fmt.rotates_v,
            "RESERVED": fmt.page_size if store else 0,
            "FAULT": FAULT_KINDS.index("store_kv" if store else "gather_kv"),
        },
        cut.num_warps,
        cut.rows,
        cut.chunks,
    )


def launch(
    launcher: Launcher,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    faults: Tensor,
    fmt: KVFormat,
    op: str = "store_kv",
    angles: tuple[Tensor, ...] = (),
    more: tuple[int, ...] = (),
) -> None:
    """`portakv.kernels.reference.rows.store_kv` has the contract; here K and V share one dtype and one paging.

    Also of rotated stores and of gathers, whose outputs are `k` and `v` (`rope.rotating`, `launch.gathering`).
    """
    num_tokens = loc.shape[0]
    if num_tokens == 0:
        return
    if num_tokens * fmt.num_kv_heads > MOST_ROWS:
        raise too_many_rows(num_tokens, fmt.num_kv_heads)
    dtype = k.dtype
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    pages, k_page, k_slot, k_cache_head = cache_layout(k_cache)
    v_pages, v_page, v_slot, v_cache_head = cache_layout(v_cache)
    if v.dtype != dtype or v_pages != pages:
        check_pair("v_out" if op == "gather_kv" else "v", dtype, v.dtype, "v_cache", pages, v_pages)
    tensors: tuple[Tensor, ...] = (k, v, k_cache, v_cache, loc, k_scale, v_scale, faults)
    if angles:
        tensors += angles
        kernel = launcher.find(op, k_cache, fmt, dtype, loc.dtype, None, dtype.itemsize, angles[0].dtype)
    else:
        alignment = row_alignment(
            fmt,
            dtype,
            k.data_ptr()
            | v.data_ptr()
            | k_cache.data_ptr()
            | v_cache.data_ptr()
            | (k_token | k_head | v_token | v_head) * dtype.itemsize
            | (k_page | k_slot | k_cache_head | v_page | v_slot | v_cache_head) * fmt.dtype.itemsize,
        )
        kernel = launcher.find(op, k_cache, fmt, dtype, loc.dtype, None, alignment)
    kernel(
        (-(-num_tokens * fmt.num_kv_heads // kernel.rows), kernel.chunks, 1),
        tensors,
        (
            *(num_tokens, loc.stride()[0], *pages, k_token, k_head, v_token, v_head),
            *(k_page, k_slot, k_cache_head, v_page, v_slot, v_cache_head, *more),
        ),
    )


@triton.jit
def convert(raw, scale, head, SRC: tl.constexpr, DST: tl.constexpr, SCALED: tl.constexpr):
    wide = decode(raw, SRC)
    if SCALED:
        wide *= tl.load(scale + head)[:, None]
    return encode(wide, DST)


@triton.jit
def kernel(
    k,
    v,
    k_cache,
    v_cache,
    loc,
    k_scale,
    v_scale,
    faults,
    cos_sin,
    positions,
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
    SRC: tl.constexpr,
    DST: tl.constexpr,
    ROPE: tl.constexpr,
    STORE: tl.constexpr,
    SCALED: tl.constexpr,
    ROTATE_V: tl.constexpr,
    RESERVED: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.program_id(1)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    slot = load_slots(loc, loc_stride, token, num_tokens, -1)
    lost = slot >= num_slots
    ok = (slot >= RESERVED) & (slot < num_slots)
    if ROPE is not None:
        position, known = load_positions(positions, words, token, num_tokens, num_positions)
        lost = lost | (ok & ~known)
        ok = ok & known
    count_faults(faults + FAULT, lost & (head + chunk == 0))

    column = chunk * BLOCK + tl.arange(0, BLOCK)
    k_mask = ok[:, None] & (column < K_DIM)[None, :]
    v_mask = ok[:, None] & (column < V_DIM)[None, :]
    if STORE:
        k_at = token * k_token + head * k_head
        v_at = token * v_token + head * v_head
        k_from = row_pointers(k, k_at, column, SRC, ALIGNED)
        v_from = row_pointers(v, v_at, column, SRC, ALIGNED)
    else:
        k_at = slot_offset(slot, page_size, k_page, k_slot) + head * k_cache_head
        v_at = slot_offset(slot, page_size, v_page, v_slot) + head * v_cache_head
        k_from = row_pointers(k_cache, k_at, column, SRC, ALIGNED)
        v_from = row_pointers(v_cache, v_at, column, SRC, ALIGNED)
    # Both loads are under way before the first store, which the compiler could not move them across.
    if ROPE is None:
        k_rows = tl.load(k_from, mask=k_mask)
        v_rows = tl.load(v_from, mask=v_mask)
    elif ROTATE_V:
        k_rows = tl.load(k_from, mask=k_mask)
        v_rows = load_rotated(v, v_at, column, v_mask, position, cos_sin, dims, angle_stride, interleaved, SRC, ROPE)
    else:
        v_rows = tl.load(v_from, mask=v_mask)
        k_rows = load_rotated(k, k_at, column, k_mask, position, cos_sin, dims, angle_stride, interleaved, SRC, ROPE)
    if SRC != DST:
        k_rows = convert(k_rows, k_scale, head, SRC, DST, SCALED)
        v_rows = convert(v_rows, v_scale, head, SRC, DST, SCALED)
    if STORE:
        k_at = slot_offset(slot, page_size, k_page, k_slot) + head * k_cache_head
        v_at = slot_offset(slot, page_size, v_page, v_slot) + head * v_cache_head
        k_to = row_pointers(k_cache, k_at, column, DST, ALIGNED)
        v_to = row_pointers(v_cache, v_at, column, DST, ALIGNED)
    else:
        k_to = row_pointers(k, token * k_token + head * k_head, column, DST, ALIGNED)
        v_to = row_pointers(v, token * v_token + head * v_head, column, DST, ALIGNED)
    tl.store(k_to, k_rows, mask=k_mask)
    tl.store(v_to, v_rows, mask=v_mask)
