"""Rows: K `[rows, H, D]` and V `[rows, H, Dv]`, a buffer each."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from portakv.formats import KVFormat, Layout
from portakv.memory.parts import Buffer, Part, PartTable, Tile


@functools.cache
def table(fmt: KVFormat) -> PartTable:
    size, heads, dtype = fmt.dtype.itemsize, fmt.num_kv_heads, str(fmt.dtype).removeprefix("torch.")
    rows = (("k", fmt.head_dim, fmt.k_row_bytes), ("v", fmt.v_head_dim, fmt.v_row_bytes))
    return PartTable(
        tuple(Buffer(row) for _, _, row in rows),
        tuple(
            Part(role, dtype, dim, size, Tile.row(row, size), heads, dim * size, i)
            for i, (role, dim, row) in enumerate(rows)
        ),
    )


def caches(fmt: KVFormat, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.view(*x.shape[:2], fmt.num_kv_heads, -1) for x in buffers)
    return k, v


ROWS = Layout(name="rows", table=table, caches=caches)
