"""The CPU ops in C++, one build per instruction set; same signatures and bits as `portakv.kernels.reference`.

The extension is loaded when an op is first asked for, so this package imports at no cost and without a build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portakv.kernels.cpu_amx._native import build_read as build_read
    from portakv.kernels.cpu_amx._native import cast_loc as cast_loc
    from portakv.kernels.cpu_amx._native import gather_kv as gather_kv
    from portakv.kernels.cpu_amx._native import gather_kv_flashmla as gather_kv_flashmla
    from portakv.kernels.cpu_amx._native import gather_kv_packed as gather_kv_packed
    from portakv.kernels.cpu_amx._native import isa as isa
    from portakv.kernels.cpu_amx._native import isas as isas
    from portakv.kernels.cpu_amx._native import measure_read as measure_read
    from portakv.kernels.cpu_amx._native import move_kv as move_kv
    from portakv.kernels.cpu_amx._native import move_kv_packed as move_kv_packed
    from portakv.kernels.cpu_amx._native import patch_map as patch_map
    from portakv.kernels.cpu_amx._native import store_kv as store_kv
    from portakv.kernels.cpu_amx._native import store_kv_flashmla as store_kv_flashmla
    from portakv.kernels.cpu_amx._native import store_kv_packed as store_kv_packed
    from portakv.kernels.cpu_amx._native import store_kv_rope as store_kv_rope
    from portakv.kernels.cpu_amx._native import store_kv_rope_flashmla as store_kv_rope_flashmla
    from portakv.kernels.cpu_amx._native import translate_loc as translate_loc

_NAMES = (
    *("translate_loc", "cast_loc", "patch_map", "store_kv", "gather_kv", "move_kv", "build_read", "measure_read"),
    *("store_kv_flashmla", "gather_kv_flashmla", "store_kv_packed", "gather_kv_packed", "move_kv_packed"),
    *("store_kv_rope", "store_kv_rope_flashmla", "isa", "isas"),
)


def build_problem() -> str | None:
    """Why this installation has no CPU extension, or None. Loads neither torch nor the extension."""
    try:
        from portakv.kernels.cpu_amx._build import PROBLEM
    except ModuleNotFoundError:
        return "not built: Python imported a source tree; run it elsewhere, or install with `pip install -e .`"
    return PROBLEM


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if problem := build_problem():
        raise ImportError(f"{__name__}: {problem}")
    import torch  # noqa: F401 (first, so that the extension shares torch's OpenMP runtime)

    from portakv.kernels.cpu_amx import _native

    globals().update({each: getattr(_native, each) for each in _NAMES})
    return globals()[name]
