"""The ops as `torch.library` ops: what torch.compile, torch.export and dispatch modes see of a pool's calls.

Each op of the dispatch table is `torch.ops.portakv.<op>`, with the arguments of its kernel, the tensors it writes
declared, fp8 tensors as uint8, and at the end, as text, the format (if the kernel takes one) and the kernel that runs.
Importing this module registers them. Eager calls never come here: a pool asks `tracing()` first.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import torch

from portakv import dispatch, kernels
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS, KVFormat, ReadFormat, Structure

_STORE = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor loc, Tensor k_inv, Tensor v_inv, "
    "Tensor(c!) faults, str fmt"
)
_ROPE = _STORE.replace("Tensor(c!)", "Tensor cos_sin, Tensor positions, bool interleaved, Tensor(c!)")
_GATHER = (
    "Tensor k_cache, Tensor v_cache, Tensor loc, Tensor(a!) k_out, Tensor(b!) v_out, Tensor k_scale, Tensor v_scale, "
    "Tensor(c!) faults, str fmt"
)
_MOVE = "Tensor(a!) k_caches, Tensor(b!) v_caches, Tensor tgt, Tensor src, Tensor(c!) faults, str fmt"
SCHEMAS = {
    "translate_loc": "Tensor mapping, Tensor loc, Tensor(a!) swa_out, Tensor(b!)? loc_out, Tensor(c!)? swa_twin, "
    "Tensor(d!)? loc_twin, Tensor(e!) faults",
    "cast_loc": "Tensor loc, Tensor(a!) out, Tensor(b!) faults",
    "patch_map": "Tensor(a!) mapping, Tensor slots, Tensor values",
    "build_read": "Tensor? mapping, Tensor table, Tensor rows, Tensor seq_lens, Tensor? extra_lens, "
    "Tensor? query_lens, Tensor(a!) out, Tensor(b!)? indptr, Tensor(c!) lens, Tensor(d!) starts, Tensor(e!) faults, "
    "int num_slots, str structure, int? window, int page_size, int pad, bool prefix_only",
    "store_kv": _STORE,
    "gather_kv": _GATHER,
    "move_kv": _MOVE,
    "store_kv_rope": _ROPE,
    "store_kv_flashmla": _STORE,
    "store_kv_rope_flashmla": _ROPE,
    "gather_kv_flashmla": _GATHER,
    "store_kv_packed": _STORE,
    "gather_kv_packed": _GATHER,
    "move_kv_packed": _MOVE,
}
"""Arguments of each op, before `str kernel`."""

Kernel = Callable[..., None]
_load = functools.cache(kernels.load)


def traced(chosen: Mapping[str, dispatch.Selection], formats: Mapping[str, KVFormat | None]) -> dict[str, Kernel]:
    """The kernel of each op's chosen row, called as an op; `formats` are those that the ops will be given."""
    calls: dict[str, Kernel] = {}
    for op, fmt in formats.items():
        overload, target = getattr(torch.ops.portakv, op).default, chosen[op].row.target.format(op=op)
        if op == "build_read":
            calls[op] = functools.partial(_call_read, overload, target)
            continue
        # A format becomes text now: a tracer may take its integers for symbols.
        calls[op] = functools.partial(_call, overload, target, None if fmt is None else encode(fmt))
    return calls


def _call(overload: torch._ops.OpOverload, target: str, fmt: str | None, *args: Any) -> None:
    if fmt is None:
        overload(*args, target)
    else:
        overload(*[x.view(torch.uint8) if _dtype(x) in FP8_DIALECTS else x for x in args[:-1]], fmt, target)


def _dtype(x: Any) -> torch.dtype | None:
    return x.dtype if isinstance(x, torch.Tensor) else None


def _call_read(overload: torch._ops.OpOverload, target: str, *args: Any) -> None:
    *rest, fmt = args
    overload(*rest, fmt.structure.value, fmt.window, fmt.page_size, fmt.pad, fmt.prefix_only, target)


def _run_read(*args: Any) -> None:
    *rest, structure, window, page_size, pad, prefix_only, target = args
    _load(target)(*rest, ReadFormat(Structure(structure), window, page_size, pad, prefix_only))


def _run(*args: Any) -> None:
    *tensors, target = args
    _load(target)(*tensors)


def _run_with_format(*args: Any) -> None:
    *tensors, text, target = args
    fmt = decode(text)
    if fmt.fp8 is not None:
        tensors = [x.view(fmt.dtype) if _dtype(x) is torch.uint8 else x for x in tensors]
    _load(target)(*tensors, fmt)


def encode(fmt: KVFormat) -> str:
    """A format as text: "num_kv_heads=8/head_dim=128/.../dtype=bfloat16/layout=rows"."""
    return "/".join(f"{field.name}={_text(getattr(fmt, field.name))}" for field in fields(fmt))


@functools.cache
def decode(text: str) -> KVFormat:
    """The format that `encode` made `text` of; any other text is a `ValueError`."""
    types = get_type_hints(KVFormat)
    try:
        values = dict(item.split("=") for item in text.split("/"))
        fmt = KVFormat(
            **{
                name: getattr(torch, value) if types[name] is torch.dtype else types[name](value)
                for name, value in values.items()
            }
        )
        sizes = (fmt.num_kv_heads, fmt.head_dim, fmt.v_head_dim, fmt.page_size)
        good = (
            encode(fmt) == text and fmt.dtype in (*FLOAT_DTYPES, *FP8_DIALECTS) and 0 < min(sizes) <= max(sizes) < 2**63
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"fmt: expected a format as `ops.encode` writes it, got {text!r}")
    return fmt


def _text(value: int | torch.dtype | enum.Enum) -> str:
    return str(value.value if isinstance(value, enum.Enum) else value).removeprefix("torch.")


def _register() -> Any:
    make: Any = torch.library.Library  # untyped
    library = make("portakv", "DEF")
    for op, schema in SCHEMAS.items():
        library.define(f"{op}({schema}, str kernel) -> ()", tags=torch.Tag.pt2_compliant_tag)
        run = _run_read if op == "build_read" else _run_with_format if schema.endswith("str fmt") else _run
        library.impl(op, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"portakv::{op}", lambda *args: None, lib=library)
    return library


_LIBRARY = _register()
"""Kept: the ops live as long as it does."""
