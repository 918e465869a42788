# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""gather_kv_flashmla: blocks times the scales stored with them, and the rope part, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import KVFormat, Variant
from portakv.kernels._triton.floats import decode, encode
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import Tile, row_pointers
from portakv.kernels._triton.slots import count_faults, load_slots, slot_offset
from portakv.kernels._triton.store_flashmla import BF16_INF, BF16_NAN, FP8_NAN, cut_blocks, launch_blocks

Tensor = torch.Tensor


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    tensors = dict.fromkeys(("k_cache", "v_cache", "k_out", "v_out"), "u8")
    return cut_blocks(kernel, variant, tensors, "gather_kv", tiles, lanes)


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
    """`portakv.kernels.reference.flashmla.gather_kv_flashmla` has the contract."""
    tensors = (k_cache, v_cache, k_out, v_out)
    launch_blocks(launcher, "gather_kv_flashmla", (k_out, v_out), (k_cache, v_cache), tensors, loc, faults, fmt)


@triton.jit
def kernel(
    k_cache,
    v_cache,
    k_out,
    v_out,
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
    FAULT: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // (BLOCKS + 1)).to(tl.int64)
    block = (row % (BLOCKS + 1)).to(tl.int64)
    slot = load_slots(loc, loc_stride, token, num_tokens, -1)
    count_faults(faults + FAULT, (slot >= num_slots) & (block == 0))
    ok = (slot >= 0) & (slot < num_slots)
    column = tl.arange(0, BLOCK)
    has_values = ok & (block < BLOCKS)
    value_mask = has_values[:, None] & (column < BLOCK)[None, :]
    rope_mask = (ok & (block == BLOCKS))[:, None] & (column < ROPE)[None, :]
    k_offset = slot_offset(slot, page_size, k_page, k_slot)
    v_offset = slot_offset(slot, page_size, v_page, v_slot)
    raw = tl.load(row_pointers(k_cache, k_offset + block * BLOCK, column, 1, tl.int8, ALIGNED), mask=value_mask)
    if V4:
        rope_from = row_pointers(k_cache, (k_offset >> 1) + BLOCKS * BLOCK // 2, column, 2, tl.int16, ALIGNED)
        scale = tl.load(v_cache.to(tl.pointer_type(tl.uint8)) + v_offset + block, mask=has_values, other=0)
        bits = scale.to(tl.int32) << 23
    else:
        rope_from = row_pointers(v_cache, v_offset >> 1, column, 2, tl.int16, ALIGNED)
        scales = k_cache.to(tl.pointer_type(tl.int32)) + (k_offset >> 2) + BLOCKS * BLOCK // 4
        bits = tl.load(scales + block, mask=has_values, other=0)
    rope = tl.load(rope_from, mask=rope_mask)
    values = decode(raw, 3, 7, 0, FP8_NAN) * bits.to(tl.float32, bitcast=True)[:, None]
    out = encode(values, 8 * ITEM, MANTISSA, BIAS, INF, NAN, 0).to(UNIT)
    if not SAME_ROPE:
        rope = encode(decode(rope, 7, 127, BF16_INF, BF16_NAN), 8 * ITEM, MANTISSA, BIAS, INF, NAN, 0).to(UNIT)
    tl.store(row_pointers(k_out, token * k_token + block * BLOCK, column, ITEM, UNIT, ALIGNED), out, mask=value_mask)
    tl.store(row_pointers(v_out, token * v_token, column, ITEM, UNIT, ALIGNED), rope, mask=rope_mask)
