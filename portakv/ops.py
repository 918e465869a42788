"""The ops as `torch.library` ops: what torch.compile, torch.export and dispatch modes see of a pool's calls.

Each op of the dispatch table is `torch.ops.portakv.<op>`, with the arguments of its kernel, the tensors it writes
declared, fp8 tensors as uint8, and at the end, as text, the format (if the kernel takes one) and the kernel that runs.
Importing this module registers them. Eager calls never come here: a pool asks `arguments.tracing` first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

import torch

from portakv import dispatch, kernels
from portakv.arguments import (
    as_choice,
    as_int,
    as_member,
    require_apart,
    require_disjoint,
    require_plain,
    require_rows,
    require_shape,
    require_slots,
    span_of,
)
from portakv.formats import (
    FAULT_KINDS,
    FLOAT_DTYPES,
    FP8_DIALECTS,
    INDEX_DTYPES,
    KVFormat,
    Layout,
    ReadFormat,
    Structure,
)
from portakv.memory.layouts import find_layout

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
        _targets(op).add(target)
        # A format becomes text now: a tracer may take its integers for symbols.
        calls[op] = functools.partial(_call, overload, () if fmt is None else (encode(fmt),), target)
    return calls


def _call(overload: torch._ops.OpOverload, text: tuple[str, ...], target: str, *args: Any) -> None:
    """Call an op with a kernel's arguments, whose last may be a format."""
    end: tuple[Any, ...] = text
    if isinstance(args[-1], ReadFormat):
        *args, fmt = args  # type: ignore[assignment]
        end = (fmt.structure.value, fmt.window, fmt.page_size, fmt.pad, fmt.prefix_only)
    elif text:
        args = tuple(x.view(torch.uint8) if _dtype(x) in FP8_DIALECTS else x for x in args[:-1])
    overload(*args, *end, target)


def _dtype(x: Any) -> torch.dtype | None:
    return x.dtype if isinstance(x, torch.Tensor) else None


def _run(op: str, *args: Any) -> None:
    """Call the kernel that an op's last argument names, once its arguments are such as kernels take."""
    *rest, target = args
    if target not in _targets(op):
        raise ValueError(f"kernel: expected one of {sorted(_targets(op))}, got {target!r}")
    end: tuple[KVFormat | ReadFormat, ...] = ()
    if op == "build_read":
        *rest, structure, window, page_size, pad, prefix_only = rest
        kind = as_member("structure", structure, Structure)
        window = None if window is None else as_int("window", window)
        end = (ReadFormat(kind, window, as_int("page_size", page_size), as_choice("pad", pad, (0, -1)), prefix_only),)
    elif SCHEMAS[op].endswith("str fmt"):
        *rest, text = rest
        fmt = decode(text)
        rest = [x.view(fmt.dtype) if fmt.fp8 is not None and _dtype(x) is torch.uint8 else x for x in rest]
        end = (fmt,)
    given = dict(zip(_names(op), rest, strict=False))
    _require_arguments(op, given, *end)
    with torch.inference_mode(any(isinstance(x, torch.Tensor) and x.is_inference() for x in rest)):
        _load(target)(*rest, *end)


@functools.cache
def _names(op: str) -> tuple[str, ...]:
    return tuple(argument.split()[-1] for argument in SCHEMAS[op].split(", "))


@functools.cache
def _targets(op: str) -> set[str]:
    """The kernels that may be named for an op: of our devices, and those that a pool was bound to."""
    return {row.target.format(op=op) for device in dispatch.DEVICES for row in dispatch.rows(op, device)}


def _require_arguments(op: str, given: Mapping[str, Any], fmt: KVFormat | ReadFormat | None = None) -> None:
    """Raise for tensors that a kernel of any row would misread: memory, shapes, dtypes and devices."""
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    device = tensors["faults" if "faults" in tensors else "mapping"].device
    for name, x in tensors.items():
        require_plain(name, x)
        if x.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got {x.device}")
    if (faults := tensors.get("faults")) is not None:
        require_shape("faults", faults, (torch.int64,), (None,))
        if len(faults) < len(FAULT_KINDS):
            raise ValueError(f"faults: expected {len(FAULT_KINDS)} or more counters, got {len(faults)}")
    for name in _SLOTS.get(op, ("loc",)):
        if name in tensors:
            require_slots(name, tensors[name])
    if isinstance(fmt, KVFormat):
        _require_rows(given, tensors, fmt)
    elif op == "patch_map":
        mapping, slots = tensors["mapping"], tensors["slots"]
        for name, size in (("mapping", None), ("slots", None), ("values", len(slots))):
            require_shape(name, tensors[name], (torch.int64,), (size,))
        if slots.is_cpu and ((slots < 0) | (slots >= len(mapping))).any():
            raise ValueError(f"slots: expected 0 <= slot < {len(mapping)}, got {slots.tolist()}")
    elif op == "build_read":
        _require_read(tensors, given["num_slots"], fmt)
    else:
        if "mapping" in tensors:
            require_shape("mapping", tensors["mapping"], (torch.int64,), (None,))
        for name in ("swa_out", "loc_out", "swa_twin", "loc_twin", "out"):
            if (out := tensors.get(name)) is not None and require_slots(name, out).shape[0] < len(tensors["loc"]):
                raise ValueError(f"{name}: expected {len(tensors['loc'])} or more slots, got {out.shape[0]}")
    outputs = {name: tensors[name] for name in _WRITTEN if name in tensors and device.type != "meta"}
    require_disjoint(**outputs)


_SLOTS = {"patch_map": ("slots",), "move_kv": ("tgt", "src"), "move_kv_packed": ("tgt", "src"), "build_read": ("rows",)}
_WRITTEN = ("k_out", "v_out", "swa_out", "loc_out", "swa_twin", "loc_twin", "out", "indptr", "lens", "starts")


def _require_rows(given: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], fmt: KVFormat) -> None:
    heads, lead = fmt.num_kv_heads, (None,) if "tgt" in tensors else ()
    count = None
    for side, raw in (("k", fmt.raw.head_dim), ("v", fmt.raw.v_head_dim)):
        name = f"{side}_caches" if lead else f"{side}_cache"
        cache = tensors[name]
        if fmt.packed:
            shapes = [(*lead, count, heads, fmt.page_size, raw)]
        else:
            row = fmt.raw.num_kv_heads, raw
            shapes = [(*lead, count, *row), (*lead, count, fmt.page_size, *row)]
        require_shape(name, cache, (fmt.dtype,), *shapes)
        count = cache.shape[len(lead)]
        if raw > 1 and cache.stride(-1) != 1:
            raise ValueError(f"{name}: expected a dense last axis, got strides {cache.stride()}")
    if lead:
        require_shape("src", tensors["src"], INDEX_DTYPES, (len(tensors["tgt"]),))
        return
    names = ("k_out", "v_out") if "k_out" in tensors else ("k", "v")
    loc = tensors["loc"]
    tails = (heads, fmt.head_dim), (heads, fmt.v_head_dim)
    k, v = (tensors[name] for name in names)
    require_rows((*names, "loc"), tails, loc, k, v, fmt.source_dtypes, loc.device)
    if not fmt.block:
        for name in ("k_inv", "v_inv", "k_scale", "v_scale"):
            if name in tensors:
                require_shape(name, tensors[name], (torch.float32,), (heads,))
    if not loc.is_meta:
        for name in names:
            require_apart(name, tensors[name], [span_of(tensors["k_cache"]), span_of(tensors["v_cache"])])
    if "cos_sin" in tensors:
        table, dtype = tensors["cos_sin"], tensors["k"].dtype
        require_shape("cos_sin", table, (torch.float32, dtype), (None, None))
        if table.shape[1] % 2 or not 0 < table.shape[1] <= fmt.rotated_dim or table.stride(1) != 1:
            expected = f"a dense, even number of dims, {fmt.rotated_dim} at most"
            raise ValueError(f"cos_sin: expected {expected}, got {table.shape[1]}")
        require_shape("positions", tensors["positions"], INDEX_DTYPES, (len(loc),))


def _require_read(tensors: Mapping[str, torch.Tensor], num_slots: int, fmt: ReadFormat | None) -> None:
    assert fmt is not None
    batch, rows = len(tensors["rows"]), tensors["rows"].dtype
    as_int("num_slots", num_slots, 0)
    require_slots("table", tensors["table"], 2)
    for name in ("seq_lens", "extra_lens", "query_lens"):
        if name in tensors:
            require_shape(name, tensors[name], (rows,), (batch,))
    if "mapping" in tensors:
        require_shape("mapping", tensors["mapping"], (torch.int64,), (None,))
        if len(tensors["mapping"]) < max(num_slots, 1):
            raise ValueError(f"mapping: expected {max(num_slots, 1)} entries or more, got {len(tensors['mapping'])}")
    ragged, out = fmt.structure is Structure.RAGGED, tensors["out"]
    require_slots("out", out, 1 if ragged else 2)
    lines = len(require_slots("lens", tensors["lens"]))
    if lines < batch and fmt.structure is not Structure.QUERY_ROWS:
        raise ValueError(f"lens: expected {batch} entries or more, got {lines}")
    if ("indptr" in tensors) is not ragged:
        raise TypeError(f"indptr: expected {'a tensor' if ragged else 'None'} for {fmt.structure.value}")
    for name, size in (("lens", lines), ("starts", lines), ("indptr", lines + 1)):
        if name in tensors:
            require_shape(name, tensors[name], (out.dtype,), (size,))
    if not ragged:
        require_shape("out", out, INDEX_DTYPES, (lines, None))


def encode(fmt: KVFormat) -> str:
    """A format as text: "num_kv_heads=8/head_dim=128/.../dtype=bfloat16/layout=rows"."""
    return "/".join(f"{field.name}={_text(getattr(fmt, field.name))}" for field in fields(fmt))


@functools.cache
def decode(text: str) -> KVFormat:
    """The format that `encode` made `text` of; any other text is a `ValueError`."""
    types = get_type_hints(KVFormat)
    try:
        values = dict(item.split("=") for item in text.split("/"))
        read: dict[Any, Callable[[str], Any]] = {
            torch.dtype: lambda x: getattr(torch, x),
            Layout: find_layout,
            int: int,
        }
        fmt = KVFormat(**{name: read[types[name]](value) for name, value in values.items()})
        sizes = (fmt.num_kv_heads, fmt.head_dim, fmt.v_head_dim, fmt.page_size)
        good = (
            encode(fmt) == text and fmt.dtype in (*FLOAT_DTYPES, *FP8_DIALECTS) and 0 < min(sizes) <= max(sizes) < 2**63
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"fmt: expected a format as `ops.encode` writes it, got {text!r}")
    return fmt


def _text(value: int | torch.dtype | Layout) -> str:
    return value.name if isinstance(value, Layout) else str(value).removeprefix("torch.")


def _register() -> Any:
    make: Any = torch.library.Library  # untyped
    library = make("portakv", "DEF")
    for op, schema in SCHEMAS.items():
        library.define(f"{op}({schema}, str kernel) -> ()", tags=torch.Tag.pt2_compliant_tag)
        library.impl(op, functools.partial(_run, op), "CompositeExplicitAutograd")
        torch.library.register_fake(f"portakv::{op}", lambda *args: None, lib=library)
    return library


_LIBRARY = _register()
"""Kept: the ops live as long as it does."""
