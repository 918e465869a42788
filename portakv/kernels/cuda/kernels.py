"""The Triton kernels on such a device, each under its op's name."""

from __future__ import annotations

from collections.abc import Callable

from portakv.kernels import _triton
from portakv.kernels.cuda.device import CUDA

assert CUDA.gpu is not None
LAUNCHER = _triton.launcher(CUDA.gpu)


def __getattr__(op: str) -> Callable[..., None]:
    return LAUNCHER.bind(op)
