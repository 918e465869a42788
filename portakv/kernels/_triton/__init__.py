"""Kernel bodies in Triton, shared by every device that has it. Importing this imports triton."""

from __future__ import annotations

import functools

from portakv.device import Gpu
from portakv.kernels._triton import (
    build_read,
    cast_loc,
    gather_flashmla,
    gather_kv,
    move_kv,
    patch_map,
    store_flashmla,
    store_kv,
    store_kv_rope,
    translate_loc,
)
from portakv.kernels._triton.launch import Launcher
from portakv.kernels._triton.rows import Tile

SOURCES = {
    "translate_loc": translate_loc.source,
    "cast_loc": cast_loc.source,
    "patch_map": patch_map.source,
    "build_read": build_read.source,
    "store_kv": store_kv.source,
    "gather_kv": gather_kv.source,
    "move_kv": move_kv.source,
    "store_kv_rope": store_kv_rope.source,
    "store_kv_rope_flashmla": store_flashmla.rope_source,
    "store_kv_flashmla": store_flashmla.source,
    "gather_kv_flashmla": gather_flashmla.source,
}
"""How each op's variants become kernels."""


@functools.cache
def launcher(gpu: Gpu) -> Launcher:
    """The one launcher of a device's kernels."""
    return Launcher(gpu.backend, SOURCES, {lanes: tuple(Tile(*x) for x in of) for lanes, of in gpu.tiles.items()})
