"""Kernels by device. A row of a `portakv.device.Device` names a function here; none is imported before it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, TypedDict

from torch import Tensor

from portakv.formats import KVFormat

Out = Tensor | None


class TranslateLoc(Protocol):
    def __call__(
        self,
        mapping: Tensor,
        loc: Tensor,
        swa_out: Tensor,
        loc_out: Out,
        swa_twin: Out,
        loc_twin: Out,
        faults: Tensor,
        /,
    ) -> None: ...


class CastLoc(Protocol):
    def __call__(self, loc: Tensor, out: Tensor, faults: Tensor, /) -> None: ...


class PatchMap(Protocol):
    def __call__(self, mapping: Tensor, slots: Tensor, values: Tensor, /) -> None: ...


class StoreKV(Protocol):
    # fmt: off
    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc: Tensor, k_inv: Tensor, v_inv: Tensor,
        faults: Tensor, fmt: KVFormat, /,
    ) -> None: ...


class StoreRope(Protocol):
    # fmt: off
    def __call__(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc: Tensor, k_inv: Tensor, v_inv: Tensor,
        cos_sin: Tensor, positions: Tensor, interleaved: bool, faults: Tensor, fmt: KVFormat, /,
    ) -> None: ...


class GatherKV(Protocol):
    # fmt: off
    def __call__(
        self, k_cache: Tensor, v_cache: Tensor, loc: Tensor, k_out: Tensor, v_out: Tensor, k_scale: Tensor,
        v_scale: Tensor, faults: Tensor, fmt: KVFormat, /,
    ) -> None: ...


class SlotOps(TypedDict):
    """The ops that know no format, bound."""

    translate_loc: TranslateLoc
    cast_loc: CastLoc
    patch_map: PatchMap
    build_read: Callable[..., None]  # whose lengths come as a list


def load(target: str) -> Callable[..., Any]:
    """The kernel that "module:function" names."""
    module, function = target.split(":")
    kernel: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return kernel
