# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""store_kv, store_kv_rope and gather_kv of FlashMLA's layouts: values in blocks, their scales and the rope part.

To the kernel a row is one block of a token, and the rope part is the block after the last. Both caches are packed, as
`KVFormat.caches` says; every row of theirs starts at a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, VECTOR_BYTES, KVFormat, Layout, Variant
from portakv.kernels._triton.floats import FLOATS, decode, encode
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rope import ROPE_TENSORS, load_positions, load_rotated, rope_constants
from portakv.kernels._triton.rows import (
    MOST_ROWS,
    Tile,
    cache_layout,
    check_pair,
    row_alignment,
    row_pointers,
    too_many_rows,
)
from portakv.kernels._triton.slots import INDEX_TYPES, count_faults, load_slots, pointers, slot_offset

Tensor = torch.Tensor

FP8 = tl.constexpr(FLOATS[torch.float8_e4m3fn])
BF16 = tl.constexpr(FLOATS[torch.bfloat16])


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    fmt, dtype = variant.fmt, variant.dtype
    assert fmt is not None
    assert dtype is not None
    store = variant.op != "gather_kv_flashmla"
    dtypes = (dtype, fmt.dtype) if store else (fmt.dtype, dtype)
    # A quarter of a row mover's warps, which is one: a block's largest value never leaves it. One vector a lane on the
    # wider side, so that both sides share a layout; four accesses where each is of one element.
    num_warps = tiles[-1].num_warps // 4
    aligned = variant.alignment == VECTOR_BYTES
    columns = lanes * num_warps * (VECTOR_BYTES // max(dtype.itemsize, 2) if aligned else 4)
    rows = max(1, columns // fmt.block)
    return Source(
        kernel,
        dict.fromkeys((*(("k", "v") if store else ("k_out", "v_out")), "k_cache", "v_cache"), "u8")
        | {"loc": INDEX_TYPES[variant.index_dtype], "faults": "i64"}
        | (ROPE_TENSORS if variant.rope else {}),
        rope_constants(variant)
        | {
            "BLOCKS": fmt.head_dim // fmt.block,
            "BLOCK": fmt.block,
            "ROPE_DIM": fmt.v_head_dim,
            "ROWS": rows,
            "V4": fmt.layout is Layout.FLASHMLA,
            "ALIGNED": aligned,
            "SRC": FLOATS[dtypes[0]],
            "DST": FLOATS[dtypes[1]],
            "STORE": store,
            "RESERVED": fmt.page_size if store else 0,
            "FAULT": FAULT_KINDS.index("store_kv" if store else "gather_kv"),
        },
        num_warps,
        rows,
    )


def launch(
    launcher: Launcher,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_inv: Tensor,
    v_inv: Tensor,
    faults: Tensor,
    fmt: KVFormat,
    op: str = "store_kv_flashmla",
    angles: tuple[Tensor, ...] = (),
    more: tuple[int, ...] = (),
) -> None:
    """`portakv.kernels.reference.flashmla.store_kv_flashmla` has the contract; otherwise as `copy_rows.launch`."""
    num_tokens = loc.shape[0]
    if num_tokens == 0:
        return
    per_token = fmt.head_dim // fmt.block + 1
    if num_tokens * per_token > MOST_ROWS:
        raise too_many_rows(num_tokens, per_token)
    dtype, k_token, v_token = k.dtype, k.stride(0), v.stride(0)
    pages, k_page, k_slot, _ = cache_layout(k_cache)
    v_pages, v_page, v_slot, _ = cache_layout(v_cache)
    if v.dtype != dtype or v_pages != pages:
        check_pair("v_out" if op == "gather_kv_flashmla" else "v", dtype, v.dtype, "v_cache", pages, v_pages)
    if (k_cache.data_ptr() | k_page | k_slot) % VECTOR_BYTES:
        raise ValueError(f"k_cache: expected rows at multiples of {VECTOR_BYTES} bytes, got strides {k_cache.stride()}")
    if angles:
        kernel = launcher.find(op, k_cache, fmt, dtype, loc.dtype, None, dtype.itemsize, angles[0].dtype)
    else:
        addresses = k.data_ptr() | v.data_ptr() | (k_token | v_token) * dtype.itemsize
        kernel = launcher.find(op, k_cache, fmt, dtype, loc.dtype, None, row_alignment(fmt, dtype, addresses))
    scalars = (num_tokens, loc.stride()[0], *pages, k_token, v_token, k_page, k_slot, v_page, v_slot, *more)
    kernel((-(-num_tokens * per_token // kernel.rows), 1, 1), (k, v, k_cache, v_cache, loc, faults, *angles), scalars)


@triton.jit
def block_exponents(values, mask):
    """The power of two that brings each block into e4m3fn, as float32 has it: the exponent with its bias."""
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.where(mask & (magnitude < 0x7F800000), magnitude, 0)
    # 0x38D1B717 is 1e-4. One exponent more for a mantissa above that of 448, 1.75.
    return ((tl.maximum(tl.max(magnitude, axis=1), 0x38D1B717) + 0x1FFFFF) >> 23) - 8


@triton.jit
def kernel(
    k,
    v,
    k_cache,
    v_cache,
    loc,
    faults,
    cos_sin,
    positions,
    num_tokens,
    loc_stride,
    num_slots,
    page_size,
    k_token,
    v_token,
    k_page,
    k_slot,
    v_page,
    v_slot,
    words,
    num_positions,
    dims,
    angle_stride,
    interleaved,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    V4: tl.constexpr,
    ALIGNED: tl.constexpr,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    ROPE: tl.constexpr,
    STORE: tl.constexpr,
    RESERVED: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // (BLOCKS + 1)).to(tl.int64)
    block = (row % (BLOCKS + 1)).to(tl.int64)
    slot = load_slots(loc, loc_stride, token, num_tokens, -1)
    lost = slot >= num_slots
    ok = (slot >= RESERVED) & (slot < num_slots)
    if ROPE is not None:
        position, known = load_positions(positions, words, token, num_tokens, num_positions)
        lost = lost | (ok & ~known)
        ok = ok & known
    count_faults(faults + FAULT, lost & (block == 0))

    column = tl.arange(0, BLOCK)
    has_values = ok & (block < BLOCKS)
    value_mask = has_values[:, None] & (column < BLOCK)[None, :]
    rope_mask = (ok & (block == BLOCKS))[:, None] & (column < ROPE_DIM)[None, :]
    if STORE:
        if ROPE is None:
            rope = tl.load(row_pointers(v, token * v_token, column, SRC, ALIGNED), mask=rope_mask)
        else:
            rope = load_rotated(
                *(v, token * v_token, column, rope_mask, position, cos_sin, dims, angle_stride, interleaved, SRC, ROPE)
            )
        k_from = row_pointers(k, token * k_token + block * BLOCK, column, SRC, ALIGNED)
        values = decode(tl.load(k_from, mask=value_mask), SRC)
        exponent = block_exponents(values, value_mask)
        values = encode(values * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None], DST)
        if SRC != BF16:
            rope = encode(decode(rope, SRC), BF16)

    k_at = slot_offset(slot, page_size, k_page, k_slot)
    v_at = slot_offset(slot, page_size, v_page, v_slot)
    k_place = row_pointers(k_cache, k_at + block * BLOCK, column, FP8, ALIGNED)
    if V4:  # the rope part behind the token's values, the scales in the page's last rows
        rope_place = row_pointers(k_cache, (k_at >> 1) + BLOCKS * BLOCK // 2, column, BF16, ALIGNED)
        scale_place = pointers(v_cache, v_at + block)
    else:  # the scales behind the token's values, then the rope part
        rope_place = row_pointers(v_cache, v_at >> 1, column, BF16, ALIGNED)
        scale_place = pointers(k_cache.to(tl.pointer_type(tl.int32)), (k_at >> 2) + BLOCKS * BLOCK // 4 + block)
    if STORE:
        tl.store(k_place, values, mask=value_mask)
        scale = tl.where(block == BLOCKS, 0, exponent).to(tl.uint8) if V4 else exponent << 23
        # The rope part's scale, 0, is V4's pad byte.
        kept = ok if V4 else has_values
        # By the lanes that have the first value of a block.
        first = kept[:, None] & (column == 0)[None, :]
        scale_place = scale_place[:, None] + column[None, :]
        tl.store(scale_place, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)), mask=first)
        tl.store(rope_place, rope, mask=rope_mask)
    else:
        values = tl.load(k_place, mask=value_mask)
        scale = tl.load(scale_place, mask=has_values, other=0).to(tl.int32)
        if V4:
            scale = scale << 23
        rope = tl.load(rope_place, mask=rope_mask)
        values = encode(decode(values, SRC) * scale.to(tl.float32, bitcast=True)[:, None], DST)
        if DST != BF16:
            rope = encode(decode(rope, BF16), DST)
        tl.store(row_pointers(k, token * k_token + block * BLOCK, column, DST, ALIGNED), values, mask=value_mask)
        tl.store(row_pointers(v, token * v_token, column, DST, ALIGNED), rope, mask=rope_mask)
