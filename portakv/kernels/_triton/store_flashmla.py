# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""store_kv_flashmla and store_kv_rope_flashmla: values in blocks, their scales and the rope part, in one launch.

To these kernels a row is one block of a token, and the rope part is the block after the last. Both caches are packed,
as `KVFormat.caches` says; every row of theirs starts at a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, VECTOR_BYTES, KVFormat, Layout, Variant
from portakv.kernels._triton.floats import FLOATS, decode, encode
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import (
    MOST_ROWS,
    UNITS,
    Tile,
    cache_layout,
    check_pair,
    row_alignment,
    row_pointers,
    too_many_rows,
)
from portakv.kernels._triton.slots import INDEX_TYPES, count_faults, load_slots, slot_offset
from portakv.kernels._triton.store_kv_rope import (
    ROPE_TENSORS,
    load_positions,
    load_rotated,
    rope_arguments,
    rope_constants,
)

Tensor = torch.Tensor

E4M3FN = FLOATS[torch.float8_e4m3fn]
BF16 = FLOATS[torch.bfloat16]
FP8_NAN = tl.constexpr(E4M3FN.nan)
FP8_MAX = tl.constexpr(E4M3FN.max)
BF16_INF = tl.constexpr(BF16.inf)
BF16_NAN = tl.constexpr(BF16.nan)


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    tensors = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "u8")
    return cut_blocks(kernel, variant, tensors, "store_kv", tiles, lanes)


def rope_source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    tensors = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "u8")
    return cut_blocks(rope_kernel, variant, tensors, "store_kv", tiles, lanes)


def cut_blocks(
    kernel: Any, variant: Variant, tensors: dict[str, str], fault: str, tiles: tuple[Tile, ...], lanes: int
) -> Source:
    fmt, dtype = variant.fmt, variant.dtype
    assert fmt is not None
    assert dtype is not None
    other = FLOATS[dtype]
    # A quarter of a row mover's warps, which is one: a block's largest value never leaves it. One vector a lane on the
    # wider side, so that both sides share a layout; four accesses where each is of one element.
    num_warps = tiles[-1].num_warps // 4
    aligned = variant.alignment == VECTOR_BYTES
    columns = lanes * num_warps * (VECTOR_BYTES // max(dtype.itemsize, 2) if aligned else 4)
    rows = max(1, columns // fmt.block)
    constants = {
        "BLOCKS": fmt.head_dim // fmt.block,
        "BLOCK": fmt.block,
        "ROPE": fmt.v_head_dim,
        "ROWS": rows,
        "V4": fmt.layout is Layout.FLASHMLA,
        "ALIGNED": aligned,
        "ITEM": dtype.itemsize,
        "UNIT": UNITS[dtype.itemsize],
        "SAME_ROPE": dtype == torch.bfloat16,
        "MANTISSA": other.mantissa,
        "BIAS": other.bias,
        "INF": other.inf,
        "NAN": other.nan,
        "RESERVED": fmt.page_size,
        "FAULT": FAULT_KINDS.index(fault),
    }
    tensors["loc"] = INDEX_TYPES[variant.index_dtype]
    if variant.rope is not None:
        tensors |= ROPE_TENSORS
        constants |= rope_constants(variant)
    tensors["faults"] = "i64"
    names = set(kernel.arg_names)
    return Source(kernel, tensors, {k: v for k, v in constants.items() if k in names}, num_warps, rows)


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
) -> None:
    """`portakv.kernels.reference.flashmla.store_kv_flashmla` has the contract."""
    launch_blocks(launcher, "store_kv_flashmla", (k, v), (k_cache, v_cache), (k, v, k_cache, v_cache), loc, faults, fmt)


def launch_rope(
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
    """`portakv.kernels.reference.flashmla.store_kv_rope_flashmla` has the contract; here positions are dense."""
    rope = cos_sin, positions, interleaved
    tensors = (k, v, k_cache, v_cache)
    launch_blocks(launcher, "store_kv_rope_flashmla", (k, v), (k_cache, v_cache), tensors, loc, faults, fmt, rope)


def launch_blocks(
    launcher: Launcher,
    op: str,
    rows: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    tensors: tuple[Tensor, ...],
    loc: Tensor,
    faults: Tensor,
    fmt: KVFormat,
    rope: tuple[Tensor, Tensor, bool] | None = None,
) -> None:
    num_tokens = loc.shape[0]
    if num_tokens == 0:
        return
    per_token = fmt.head_dim // fmt.block + 1
    if num_tokens * per_token > MOST_ROWS:
        raise too_many_rows(num_tokens, per_token)
    (k, v), (k_cache, v_cache) = rows, caches
    k_token, v_token = k.stride(0), v.stride(0)
    pages, k_page, k_slot, _ = cache_layout(k_cache)
    v_pages, v_page, v_slot, _ = cache_layout(v_cache)
    check_pair("v", k.dtype, v.dtype, "v_cache", pages, v_pages)
    if (k_cache.data_ptr() | k_page | k_slot) % VECTOR_BYTES:
        raise ValueError(f"k_cache: expected rows at multiples of {VECTOR_BYTES} bytes, got strides {k_cache.stride()}")
    angles: tuple[Tensor, ...] = ()
    more: tuple[int, ...] = ()
    alignment = k.element_size()
    if rope is None:
        addresses = k.data_ptr() | v.data_ptr() | (k_token | v_token) * k.dtype.itemsize
        alignment = row_alignment(fmt, k.dtype, addresses)
    else:
        angles, more = rope_arguments(*rope)
    kernel = launcher.find(op, k_cache, fmt, k.dtype, loc.dtype, None, alignment, rope and rope[0].dtype)
    scalars = (num_tokens, loc.stride()[0], *pages, k_token, v_token, k_page, k_slot, v_page, v_slot, *more)
    kernel((-(-num_tokens * per_token // kernel.rows), 1, 1), (*tensors, loc, *angles, faults), scalars)


@triton.jit
def pack_blocks(
    k,
    k_cache,
    v_cache,
    rope,
    token,
    block,
    slot,
    ok,
    page_size,
    k_token,
    k_page,
    k_slot,
    v_page,
    v_slot,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    V4: tl.constexpr,
    ALIGNED: tl.constexpr,
    ITEM: tl.constexpr,
    UNIT: tl.constexpr,
    SAME_ROPE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
):
    """Quantise and store blocks of K, and store `rope`, the units of V's dtype that the blocks after the last have."""
    column = tl.arange(0, BLOCK)
    is_rope = block == BLOCKS
    value_mask = (ok & (block < BLOCKS))[:, None] & (column < BLOCK)[None, :]
    rope_mask = (ok & is_rope)[:, None] & (column < ROPE)[None, :]
    raw = tl.load(row_pointers(k, token * k_token + block * BLOCK, column, ITEM, UNIT, ALIGNED), mask=value_mask)
    values = decode(raw, MANTISSA, BIAS, INF, NAN)
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.where(value_mask & (magnitude < 0x7F800000), magnitude, 0)
    # 0x38D1B717 is 1e-4. One exponent more for a mantissa above that of 448, 1.75.
    exponent = ((tl.maximum(tl.max(magnitude, axis=1), 0x38D1B717) + 0x1FFFFF) >> 23) - 8
    scale = tl.where(is_rope, 0, exponent)
    values *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    quantised = encode(values, 8, 3, 7, 0, FP8_NAN, FP8_MAX).to(tl.int8)
    if not SAME_ROPE:
        rope = encode(decode(rope, MANTISSA, BIAS, INF, NAN), 16, 7, 127, BF16_INF, BF16_NAN, 0).to(tl.int16)

    k_offset = slot_offset(slot, page_size, k_page, k_slot)
    v_offset = slot_offset(slot, page_size, v_page, v_slot)
    tl.store(row_pointers(k_cache, k_offset + block * BLOCK, column, 1, tl.int8, ALIGNED), quantised, mask=value_mask)
    once = ok[:, None] & (column == 0)[None, :]
    if V4:
        rope_to = row_pointers(k_cache, (k_offset >> 1) + BLOCKS * BLOCK // 2, column, 2, tl.int16, ALIGNED)
        # The rope part's scale, 0, is the pad byte.
        scale_to = row_pointers(v_cache, v_offset + block, column, 1, tl.int8, False)
        tl.store(scale_to, tl.broadcast_to(scale.to(tl.int8)[:, None], (ROWS, BLOCK)), mask=once)
    else:
        rope_to = row_pointers(v_cache, v_offset >> 1, column, 2, tl.int16, ALIGNED)
        scale_to = row_pointers(k_cache, (k_offset >> 2) + BLOCKS * BLOCK // 4 + block, column, 4, tl.int32, False)
        bits = tl.broadcast_to((scale << 23)[:, None], (ROWS, BLOCK))
        tl.store(scale_to, bits, mask=once & (block < BLOCKS)[:, None])
    tl.store(rope_to, rope, mask=rope_mask)


@triton.jit
def kernel(
    k,
    v,
    k_cache,
    v_cache,
    loc,
    faults,
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
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    V4: tl.constexpr,
    ALIGNED: tl.constexpr,
    ITEM: tl.constexpr,
    UNIT: tl.constexpr,
    SAME_ROPE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    RESERVED: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // (BLOCKS + 1)).to(tl.int64)
    block = (row % (BLOCKS + 1)).to(tl.int64)
    slot = load_slots(loc, loc_stride, token, num_tokens, -1)
    count_faults(faults + FAULT, (slot >= num_slots) & (block == 0))
    ok = (slot >= RESERVED) & (slot < num_slots)
    column = tl.arange(0, BLOCK)
    rope_mask = (ok & (block == BLOCKS))[:, None] & (column < ROPE)[None, :]
    rope = tl.load(row_pointers(v, token * v_token, column, ITEM, UNIT, ALIGNED), mask=rope_mask)
    pack_blocks(
        *(k, k_cache, v_cache, rope, token, block, slot, ok, page_size, k_token, k_page, k_slot, v_page, v_slot),
        *(BLOCKS, BLOCK, ROPE, ROWS, V4, ALIGNED, ITEM, UNIT, SAME_ROPE, MANTISSA, BIAS, INF, NAN),
    )


@triton.jit
def rope_kernel(
    k,
    v,
    k_cache,
    v_cache,
    loc,
    cos_sin,
    positions,
    faults,
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
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    V4: tl.constexpr,
    ALIGNED: tl.constexpr,
    ITEM: tl.constexpr,
    UNIT: tl.constexpr,
    SAME_ROPE: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    INF: tl.constexpr,
    NAN: tl.constexpr,
    ROPE_UNIT: tl.constexpr,
    ROPE_MANTISSA: tl.constexpr,
    ROPE_BIAS: tl.constexpr,
    ROPE_INF: tl.constexpr,
    ROPE_NAN: tl.constexpr,
    RESERVED: tl.constexpr,
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // (BLOCKS + 1)).to(tl.int64)
    block = (row % (BLOCKS + 1)).to(tl.int64)
    slot = load_slots(loc, loc_stride, token, num_tokens, -1)
    position, known = load_positions(positions, words, token, num_tokens, num_positions)
    ok = (slot >= RESERVED) & (slot < num_slots)
    count_faults(faults + FAULT, ((slot >= num_slots) | (ok & ~known)) & (block == 0))
    ok = ok & known
    column = tl.arange(0, BLOCK)
    rope_mask = (ok & (block == BLOCKS))[:, None] & (column < ROPE)[None, :]
    rope = load_rotated(
        *(v, token * v_token, column, rope_mask, position, cos_sin, dims, angle_stride, interleaved),
        *(ITEM, UNIT, MANTISSA, BIAS, INF, NAN, ROPE_UNIT, ROPE_MANTISSA, ROPE_BIAS, ROPE_INF, ROPE_NAN),
    )
    pack_blocks(
        *(k, k_cache, v_cache, rope, token, block, slot, ok, page_size, k_token, k_page, k_slot, v_page, v_slot),
        *(BLOCKS, BLOCK, ROPE, ROWS, V4, ALIGNED, ITEM, UNIT, SAME_ROPE, MANTISSA, BIAS, INF, NAN),
    )
