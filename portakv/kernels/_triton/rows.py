# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the row movers share: how a tile is cut, and where its rows lie.

To a kernel a row is one head of one token: row r is head `r % HEADS` of token `r // HEADS`. A program moves
`ROWS` rows by a block of columns, of both K and V. A column is an element, or, where bytes move unchanged,
an integer as wide as the variant's alignment allows; four of 32 bits make the 16-byte access of one lane. Rows of one
slot are written in any order, column by column: what that leaves of them says `portakv.kernels.reference.rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from portakv.formats import VECTOR_BYTES, KVFormat
from portakv.kernels._triton.floats import FLOATS
from portakv.kernels._triton.slots import pointers

UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32}

MOST_ROWS = 1 << 31
"""Of one launch: kernels count rows in 32 bits, and a row past the last one of a full program must still fit."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Bytes of K (and as many of V) that one program moves, and its warps, where a head has at most
    `max_head_bytes`."""

    max_head_bytes: int
    bytes: int
    num_warps: int


Tiles = Mapping[int, tuple[Tile, ...]]
"""A device's tiles by lanes per warp, each tuple by rising `max_head_bytes`; the last serves larger heads."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tile as constexprs, and what it covers: `rows` of `chunks` blocks each."""

    rows: int
    chunks: int
    num_warps: int
    constants: dict[str, Any]


def cut_rows(
    fmt: KVFormat,
    src: torch.dtype,
    dst: torch.dtype,
    alignment: int,
    tiles: tuple[Tile, ...],
    lanes: int,
    by_element: bool = False,
) -> Cut:
    """The tile for rows of `fmt` that lie as `src` on one side and as `dst` on the other.

    A column is an element where dtypes differ or `by_element` asks for it."""
    if src == dst and not by_element:
        src_unit = dst_unit = min(alignment, 4)
        k_dim, v_dim = (dim * src.itemsize // src_unit for dim in (fmt.head_dim, fmt.v_head_dim))
    else:
        src_unit, dst_unit = src.itemsize, dst.itemsize
        k_dim, v_dim = fmt.head_dim, fmt.v_head_dim
    unit = max(src_unit, dst_unit)
    tile = next((t for t in tiles if max(k_dim, v_dim) * unit <= t.max_head_bytes), tiles[-1])
    columns = tile.bytes // unit
    if alignment < VECTOR_BYTES:
        # Each column is an access of its own; four a lane, with their masks, stay in registers everywhere.
        columns = min(columns, lanes * tile.num_warps * 4)
    elif src != dst:
        # One vector a lane on the wider side, so that both sides share a layout and nothing is exchanged.
        columns = min(columns, lanes * tile.num_warps * VECTOR_BYTES // unit)
    block = _block(k_dim, v_dim, unit, columns)
    # A load of a slot for every lane and more is shared among lanes instead of repeated, through shared memory.
    rows = min(columns // block, lanes * tile.num_warps // 2)
    constants = {
        "HEADS": fmt.num_kv_heads,
        "ROWS": rows,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK": block,
        "ALIGNED": alignment == VECTOR_BYTES,
        "SRC": replace(FLOATS[src], unit=UNITS[src_unit]),
        "DST": replace(FLOATS[dst], unit=UNITS[dst_unit]),
    }
    return Cut(rows, triton.cdiv(max(k_dim, v_dim), block), tile.num_warps, constants)


def _block(k_dim: int, v_dim: int, unit: int, limit: int) -> int:
    """Columns of a row that one tile covers: the largest power of two that leaves at most a quarter of the
    lanes idle, but not less than the 64 bytes that memory moves at once."""
    block: int = min(triton.next_power_of_2(max(k_dim, v_dim)), limit)
    while block * unit > 64:
        covered = block * (triton.cdiv(k_dim, block) + triton.cdiv(v_dim, block))
        if 3 * covered <= 4 * (k_dim + v_dim):
            break
        block //= 2
    return block


def row_alignment(fmt: KVFormat, dtype: torch.dtype, addresses: int) -> int:
    """A variant's alignment: 16 if every row starts at a multiple of 16 bytes on both sides, else the item
    size of `dtype`. `addresses` is the bitwise or of every pointer and stride, in bytes."""
    item = dtype.itemsize
    dims = (fmt.head_dim | fmt.v_head_dim) * min(item, fmt.dtype.itemsize)
    return item if (addresses | dims) & (VECTOR_BYTES - 1) else VECTOR_BYTES


def cache_layout(cache: torch.Tensor) -> tuple[tuple[int, int], int, int, int]:
    """(slots, page size) and the strides of page, slot and head. A row cache is one of pages of one slot."""
    stride = cache.stride()
    if len(stride) == 3:
        return (cache.shape[0], 1), 0, stride[0], stride[1]
    shape = cache.shape
    if shape[1] == 1:  # kernels tell a paged cache by its page size
        return (shape[0], 1), 0, stride[0], stride[2]
    return (shape[0] * shape[1], shape[1]), stride[0], stride[1], stride[2]


def too_many_rows(num_tokens: int, per_token: int) -> ValueError:
    """What a launcher raises above `MOST_ROWS`."""
    most = MOST_ROWS // per_token
    return ValueError(f"loc: expected at most {most} tokens of {per_token} rows in one launch, got {num_tokens}")


def check_pair(
    rows: str,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype,
    cache: str,
    k_pages: tuple[int, int],
    v_pages: tuple[int, int],
) -> None:
    """Refuse what one kernel for both K and V cannot do."""
    if k_dtype != v_dtype:
        raise TypeError(f"{rows}: expected the dtype of K, {k_dtype}, got {v_dtype}")
    if k_pages != v_pages:
        raise ValueError(f"{cache}: expected (slots, page size) of K, {k_pages}, got {v_pages}")


@triton.jit
def row_pointers(base, offset, column, FLOAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers `[rows, columns]` to units of `FLOAT`; a row starts `offset` items after `base`."""
    base = base.to(tl.pointer_type(FLOAT.value.unit))
    if ALIGNED:
        # As a number of vectors times their width, which is how the compiler learns that it is aligned.
        offset = ((offset * FLOAT.value.item) >> 4) * (128 // base.dtype.element_ty.primitive_bitwidth)
    return pointers(base, offset)[:, None] + column[None, :]
