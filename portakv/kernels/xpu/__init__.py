"""Intel GPUs, where Triton has an Intel backend."""

from __future__ import annotations

from collections.abc import Callable

from portakv.kernels import _triton
from portakv.kernels._triton.launch import Launcher
from portakv.kernels._triton.rows import Tile

TILES = {32: (Tile(1 << 20, 4096, 4),)}
"""Two 16-byte vectors a lane, of K and of V each; the backend compiles for sub-groups of 32."""

LAUNCHER = Launcher("xpu", _triton.OPS, TILES)


def __getattr__(op: str) -> Callable[..., None]:
    return LAUNCHER.bind(op)
