"""NVIDIA GPUs, sm_80 and newer."""

from __future__ import annotations

from collections.abc import Callable

from portakv.kernels import _triton
from portakv.kernels._triton.launch import Launcher
from portakv.kernels._triton.rows import Tile

TILES = {32: (Tile(32, 1024, 2), Tile(1 << 20, 4096, 4))}
"""Two 16-byte vectors a lane, of K and of V each. Heads of 32 bytes and less are rare and mostly tests."""

LAUNCHER = Launcher("cuda", _triton.OPS, TILES)


def __getattr__(op: str) -> Callable[..., None]:
    return LAUNCHER.bind(op)
