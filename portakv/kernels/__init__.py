"""Kernels by device. A row of `portakv.table` names a function here; nothing is imported before it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable


def load(target: str) -> Callable[..., None]:
    """The kernel that "module:function" names, its module relative to this package."""
    module, function = target.split(":")
    kernel: Callable[..., None] = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    return kernel
