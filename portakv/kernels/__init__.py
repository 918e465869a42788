"""Kernels by device. A row of a `portakv.device.Device` names a function here; none is imported before it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def load(target: str) -> Callable[..., Any]:
    """The kernel that "module:function" names."""
    module, function = target.split(":")
    kernel: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return kernel
