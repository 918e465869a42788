"""The Triton kernels on such a device, each under its op's name."""

from __future__ import annotations

from collections.abc import Callable

from portakv.kernels import _triton
from portakv.kernels.hip.device import HIP

assert HIP.gpu is not None
LAUNCHER = _triton.launcher(HIP.gpu)


def __getattr__(op: str) -> Callable[..., None]:
    return LAUNCHER.bind(op)
