"""Pages as CPU attention reads them: `cpu_amx` has pairs in tiles for matrix units, `cpu_vec` K transposed for vectors.

Source of both: vLLM's CPU attention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from portakv.formats import KVFormat, Layout
from portakv.memory.parts import Buffer, Part, PartTable, Tile


@functools.cache
def _table(tiles: str, fmt: KVFormat) -> PartTable:
    page, size, heads, dtype = (
        fmt.page_size,
        fmt.dtype.itemsize,
        fmt.num_kv_heads,
        str(fmt.dtype).removeprefix("torch."),
    )
    dims = {"k": fmt.head_dim, "v": fmt.v_head_dim}
    if tiles == "amx":  # pairs of K for 16 tokens, pairs of tokens of V for 16 dims
        of = {
            "k": Tile(16, 16 * dims["k"] * size, 2 * size, 2, 32 * size, size),
            "v": Tile(2, 32 * size, size, 16, 16 * page * size, 2 * size),
        }
    else:
        of = {"k": Tile(1, size, 0, 1, page * size, 0), "v": Tile.row(dims["v"] * size, size)}
    return PartTable(
        tuple(Buffer(heads * page * dim * size, page) for dim in dims.values()),
        tuple(
            Part(role, dtype, dim, size, of[role], heads, page * dim * size, i)
            for i, (role, dim) in enumerate(dims.items())
        ),
    )


def caches(fmt: KVFormat, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`[L, pages, H, page, D]` and `[L, pages, H, page, Dv]`, the last two axes in the order of the layout."""
    k, v = (x.view(*x.shape[:2], fmt.num_kv_heads, fmt.page_size, -1) for x in buffers)
    return k, v


def _problem(multiple: int, dtype: torch.dtype | None, fmt: KVFormat, mla: bool) -> str | None:
    if mla:
        return "an MLA latent"
    if fmt.head_dim % multiple or fmt.v_head_dim % multiple:
        return f"head dims {fmt.head_dim} and {fmt.v_head_dim}, not multiples of {multiple},"
    if fmt.page_size % 32:
        return f"pages of {fmt.page_size} slots, not a multiple of 32,"
    return None if dtype in (None, fmt.dtype) else f"{fmt.dtype} instead of {dtype}"


CPU_AMX = Layout(
    name="cpu_amx",
    table=functools.partial(_table, "amx"),
    caches=caches,
    problem=functools.partial(_problem, 32, torch.bfloat16),
    family="_packed",
    rotates=None,
    packed=True,
)
CPU_VEC = Layout(
    name="cpu_vec",
    table=functools.partial(_table, "vec"),
    caches=caches,
    problem=functools.partial(_problem, 16, None),
    family="_packed",
    rotates=None,
    packed=True,
)
