"""AMD GPUs: CDNA with waves of 64 lanes, RDNA with waves of 32."""

from __future__ import annotations

from collections.abc import Callable

from portakv.kernels import _triton
from portakv.kernels._triton.launch import Launcher
from portakv.kernels._triton.rows import Tile

TILES = {64: (Tile(1 << 20, 4096, 4),), 32: (Tile(1 << 20, 4096, 4),)}
"""One 16-byte vector a lane of a wave64, two of a wave32. A smaller tile leaves 8-byte accesses on CDNA."""

LAUNCHER = Launcher("hip", _triton.OPS, TILES)


def __getattr__(op: str) -> Callable[..., None]:
    return LAUNCHER.bind(op)
