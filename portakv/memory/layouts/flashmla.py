"""FlashMLA's layouts of an MLA latent in e4m3fn, whose blocks have scales of their own, and a rope part in bfloat16.

"flashmla" is DeepSeek-V4's pages: 584 bytes a token, block scales behind the rows of a page. "flashmla_v32" is
DeepSeek-V3.2's rows: 656 bytes a token. Source: FlashMLA's `tests/quant.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from portakv.formats import KVFormat, Layout
from portakv.memory.parts import Buffer, Part, PartTable, Tile

_PAGE_UNIT = 576
"""FlashMLA wants the bytes of a DeepSeek-V4 page to be a multiple of this."""


@functools.cache
def v4_table(fmt: KVFormat) -> PartTable:
    page, latent, rope, scales = fmt.page_size, fmt.head_dim, fmt.v_head_dim, fmt.head_dim // fmt.block + 1
    row = latent + 2 * rope
    return PartTable(
        (Buffer(-(-page * (row + scales) // _PAGE_UNIT) * _PAGE_UNIT, page),),
        (
            Part("latent", "float8_e4m3fn", latent, 1, Tile.row(row, 1)),
            Part("rope", "bfloat16", rope, 2, Tile.row(row, 2), offset=latent),
            Part("latent_scale", "float8_e8m0fnu", scales, 1, Tile.row(scales, 1), offset=page * row),
        ),
    )


def v4_caches(fmt: KVFormat, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[L, pages, page, 1, 576]` has a token's quantised values and its rope part, V `[L, pages, page, 1, 8]` their
    scales."""
    (x,), raw = buffers, fmt.raw
    end = fmt.page_size * raw.head_dim
    parts = x[..., :end], x[..., end : end + fmt.page_size * raw.v_head_dim]
    k, v = (part.view(*part.shape[:2], fmt.page_size, 1, -1) for part in parts)
    return k, v


def v4_raw(fmt: KVFormat) -> KVFormat:
    dims = fmt.head_dim + 2 * fmt.v_head_dim, fmt.head_dim // fmt.block + 1
    return KVFormat(1, *dims, fmt.dtype, fmt.page_size)


@functools.cache
def v32_table(fmt: KVFormat) -> PartTable:
    latent, rope, scales = fmt.head_dim, fmt.v_head_dim, fmt.head_dim // fmt.block
    row = latent + 4 * scales + 2 * rope
    return PartTable(
        (Buffer(row),),
        (
            Part("latent", "float8_e4m3fn", latent, 1, Tile.row(row, 1)),
            Part("latent_scale", "float32", scales, 4, Tile.row(row, 4), offset=latent),
            Part("rope", "bfloat16", rope, 2, Tile.row(row, 2), offset=latent + 4 * scales),
        ),
    )


def v32_caches(fmt: KVFormat, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """K `[L, rows, 1, 528]` has values and scales, V `[L, rows, 1, 128]` the rope part."""
    (x,), dim = buffers, fmt.raw.head_dim
    rows = x.view(*x.shape[:2], 1, -1)
    return rows[..., :dim], rows[..., dim:]


def v32_raw(fmt: KVFormat) -> KVFormat:
    dims = fmt.head_dim + 4 * (fmt.head_dim // fmt.block), 2 * fmt.v_head_dim
    return KVFormat(1, *dims, fmt.dtype, fmt.page_size)


def readable(fmt: KVFormat, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice the uint8 pages `[pages, page, 1, 584 or 656]`, in DeepSeek-V4 further apart than they are long."""
    page, row = fmt.page_size, fmt.raw.row_bytes
    size = k_cache.shape[0] * fmt.item_slots // page, page, 1, row
    stride = k_cache.stride(0) * page // fmt.item_slots, row, row, 1
    pages = k_cache.as_strided(size, stride).view(torch.uint8)
    return pages, pages


def _problem(dims: tuple[int, int], fmt: KVFormat, mla: bool) -> str | None:
    if not mla:
        return "K and V heads"
    if (fmt.head_dim, fmt.v_head_dim) != dims:
        return f"dims {fmt.head_dim} and {fmt.v_head_dim} instead of {dims}"
    return None if fmt.dtype == torch.float8_e4m3fn else f"{fmt.dtype} instead of torch.float8_e4m3fn"


FLASHMLA = Layout(
    name="flashmla",
    table=v4_table,
    caches=v4_caches,
    readable=readable,
    problem=functools.partial(_problem, (448, 64)),
    raw=v4_raw,
    family="_flashmla",
    block=64,
    rotates="v",
)
FLASHMLA_V32 = Layout(
    name="flashmla_v32",
    table=v32_table,
    caches=v32_caches,
    readable=readable,
    problem=functools.partial(_problem, (512, 64)),
    raw=v32_raw,
    family="_flashmla",
    block=128,
    rotates="v",
)
