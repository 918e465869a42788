"""Kernel bodies in Triton, shared by every device that has it. Importing this imports triton."""

from __future__ import annotations

import functools

from portakv.device import Gpu
from portakv.kernels._triton import (
    build_read,
    cast_loc,
    copy_flashmla,
    copy_rows,
    move_kv,
    patch_map,
    translate_loc,
)
from portakv.kernels._triton.launch import Launcher, Op, gathering
from portakv.kernels._triton.rope import rotating
from portakv.kernels._triton.rows import Tile

OPS = {
    "translate_loc": Op(translate_loc.source, translate_loc.launch),
    "cast_loc": Op(cast_loc.source, cast_loc.launch),
    "patch_map": Op(patch_map.source, patch_map.launch),
    "build_read": Op(build_read.source, build_read.launch),
    "store_kv": Op(copy_rows.source, copy_rows.launch),
    "gather_kv": Op(copy_rows.source, gathering(copy_rows.launch, "gather_kv")),
    "move_kv": Op(move_kv.source, move_kv.launch),
    "store_kv_rope": Op(copy_rows.source, rotating(copy_rows.launch, "store_kv_rope")),
    "store_kv_rope_flashmla": Op(copy_flashmla.source, rotating(copy_flashmla.launch, "store_kv_rope_flashmla")),
    "store_kv_flashmla": Op(copy_flashmla.source, copy_flashmla.launch),
    "gather_kv_flashmla": Op(copy_flashmla.source, gathering(copy_flashmla.launch, "gather_kv_flashmla")),
}
"""The ops that a device with Triton has."""


@functools.cache
def launcher(gpu: Gpu) -> Launcher:
    """The one launcher of a device's kernels."""
    return Launcher(gpu.backend, OPS, {lanes: tuple(Tile(*x) for x in of) for lanes, of in gpu.tiles.items()})
