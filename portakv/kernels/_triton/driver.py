"""Triton's driver of one backend, also where the process has another's active, or several and so none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@contextlib.contextmanager
def driving(backend: str) -> Iterator[Any]:
    """The driver of `backend`, which is Triton's active one inside: compiled kernels are loaded through that.

    Raises `ValueError` where no driver of that backend finds a device.
    """
    try:
        active = driver.active
        served = active.get_current_target().backend == backend
    except Exception:  # there is none, or several
        served = False
    if served:
        yield active
        return
    before = vars(driver).get("_active", vars(driver).get("active"))  # since 3.6, until 3.5
    driver.set_active(own := _own_driver(backend))
    try:
        yield own
    finally:
        driver.set_active(before)


@functools.cache
def _own_driver(backend: str) -> Any:
    for each in backends.values():
        if each.compiler.supports_target(GPUTarget(backend, 0, 32)) and each.driver.is_active():
            return each.driver()
    raise ValueError(f"expected an active driver of Triton's for {backend}, got none")
