"""MLA rows `[rows, 1, D + Dv]`: the latent and the rope part of a token, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from portakv.formats import KVFormat, Layout
from portakv.memory.parts import Buffer, Part, PartTable, Tile


@functools.cache
def table(fmt: KVFormat) -> PartTable:
    size, heads, dtype = fmt.dtype.itemsize, fmt.num_kv_heads, str(fmt.dtype).removeprefix("torch.")
    step = (fmt.head_dim + fmt.v_head_dim) * size
    tile = Tile.row(heads * step, size)
    return PartTable(
        (Buffer(heads * step),),
        (
            Part("latent", dtype, fmt.head_dim, size, tile, heads, step),
            Part("rope", dtype, fmt.v_head_dim, size, tile, heads, step, offset=fmt.head_dim * size),
        ),
    )


def caches(fmt: KVFormat, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """K is the latent, V the rope part."""
    (x,) = buffers
    rows = x.view(*x.shape[:2], fmt.num_kv_heads, -1)
    return rows[..., : fmt.head_dim], rows[..., fmt.head_dim :]


def readable(fmt: KVFormat, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole rows `[rows, 1, D + Dv]`, and their latent: V is part of K."""
    rows = *k_cache.shape[:-1], fmt.head_dim + fmt.v_head_dim
    return k_cache.as_strided(rows, k_cache.stride()), k_cache


def problem(fmt: KVFormat, mla: bool) -> str | None:
    return None if mla else "K and V heads"


MLA = Layout(name="mla", table=table, caches=caches, readable=readable, problem=problem, rotates="v")
