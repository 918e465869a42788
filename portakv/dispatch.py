"""The pure choice among the rows of `portakv.table`, and what explains it."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from portakv import kernels as implementations
from portakv.arguments import require_bool, require_plain
from portakv.device import DEVICE, DeviceFacts, DeviceKind, Package, facts, probe, resolve
from portakv.errors import NoKernel
from portakv.formats import KVFormat
from portakv.table import HOST_TABLE, TABLE, Row

_warn_once = functools.cache(logging.getLogger("portakv").warning)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of one op: the format it must take, a row by name (never falls back), no reference rows, and the
    slots of one layer's cache, reserved ones included."""

    fmt: KVFormat | None = None
    wanted: str | None = None
    strict: bool = False
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen row, and every other row of the column with the reason why not."""

    row: Row
    rejected: tuple[tuple[Row, str], ...]
    automatic: bool


def select(op: str, found: DeviceFacts, request: Request = Request()) -> Selection:
    """Choose the first row that can serve; pure, so it answers for any device on any machine.

    Raises `NoKernel` with each candidate's reason.
    """
    chosen, rejected = None, []
    for row in (TABLE | HOST_TABLE)[op][found.kind]:
        if reason := _why_not(row, found, request) or (chosen and f"{chosen.name} comes first"):
            rejected.append((row, reason))
        else:
            chosen = row
    if chosen is None:
        raise NoKernel(op, f"{found.kind.value} {found.arch}".strip(), [(r.name, why) for r, why in rejected])
    return Selection(chosen, tuple(rejected), automatic=request.wanted is None)


def _why_not(row: Row, found: DeviceFacts, request: Request) -> str | None:
    if request.wanted is not None and row.name != request.wanted:
        return f"{request.wanted!r} was requested"
    if request.strict and request.wanted is None and row.name == "reference":
        return "strict: an automatic choice may not end at the reference"
    if request.fmt is not None and (reason := _cannot_store(row, request.fmt, request.num_rows)):
        return reason
    if row.package is None:
        return None
    name, _, oldest = row.package.partition(">=")
    return found.packages.get(name, Package(problem="not installed")).why_not(name, oldest, row.backend)


def _cannot_store(row: Row, fmt: KVFormat, num_rows: int) -> str | None:
    if fmt.layout not in row.layouts:
        return f"cannot store layout {fmt.layout.value!r}"
    if row.dtypes is not None and fmt.dtype not in row.dtypes:
        return f"cannot store {fmt.dtype}"
    if row.equal_dims and fmt.head_dim != fmt.v_head_dim:
        return f"needs one head dim of K and V, not {fmt.head_dim} and {fmt.v_head_dim}"
    elements = num_rows * fmt.num_kv_heads * max(fmt.head_dim, fmt.v_head_dim)
    if row.max_elements is not None and elements > row.max_elements:
        return f"addresses {row.max_elements} elements of a cache, not {elements}"
    return None


def parse_kernels(text: str) -> dict[str, str]:
    """`PORTAKV_KERNELS`: "store_kv=triton,gather_kv=reference" as op -> row. Raises `ValueError` for an op twice."""
    wanted: dict[str, str] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        op, _, name = map(str.strip, item.partition("="))
        if op in wanted:
            raise ValueError(f"PORTAKV_KERNELS: expected each op once, got {op!r} twice")
        wanted[op] = name
    return wanted


def select_all(
    found: DeviceFacts,
    kernels: Mapping[str, str] | None = None,
    strict: bool = False,
    formats: Mapping[str, KVFormat | None] | None = None,
    num_rows: int = 0,
) -> dict[str, Selection]:
    """A selection for each op of `formats`, or of the table; `kernels` (op -> row name) goes before `PORTAKV_KERNELS`.

    Raises `ValueError` for an op or a row that the table does not have.
    """
    if kernels is not None and not isinstance(kernels, Mapping):
        raise TypeError(f"kernels: expected a mapping of op to row, got {kernels!r}")
    require_bool("strict", strict)
    wanted = parse_kernels(os.environ.get("PORTAKV_KERNELS", "")) | dict(kernels or {})
    every = TABLE | HOST_TABLE
    for op, name in wanted.items():
        if op not in every:
            raise ValueError(f"kernels: expected an op of {list(every)}, got {op!r}")
        names = sorted({row.name for rows in every[op].values() for row in rows})
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"kernels: expected a row of {op} among {names}, got {name!r}")
    asked = dict.fromkeys(TABLE) if formats is None else formats
    return {op: select(op, found, Request(fmt, wanted.get(op), strict, num_rows)) for op, fmt in asked.items()}


def select_host() -> dict[str, Selection]:
    """A selection for each op of `HOST_TABLE`: the same for pools of every device."""
    return select_all(facts(resolve(DeviceKind.CPU)), formats=dict.fromkeys(HOST_TABLE))


def load(op: str, selection: Selection) -> Callable[..., None]:
    """Import the chosen kernel. Says once in the log if an automatic choice ended at the reference."""
    if selection.row.name == "reference" and selection.automatic:
        reasons = "; ".join(f"{row.name}: {why}" for row, why in selection.rejected)
        reasons = reasons or "this device has no other row"
        _warn_once("%s runs on the reference kernel (%s)", op, reasons)
    kernel = implementations.load(selection.row.target.format(op=op))
    return _of_plain_tensors(kernel) if selection.row.name == "reference" else kernel


@functools.cache
def _of_plain_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, in torch ops, which would meet what they cannot take half way, with tensors that they can.

    What was made in inference mode is written there, as torch demands; kernels of other rows write it in any mode.
    """
    names = tuple(inspect.signature(kernel).parameters)

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        inference = False
        for name, x in zip(names, args, strict=True):
            if isinstance(x, torch.Tensor):
                require_plain(name, x)
                inference |= x.is_inference()
        if not inference:
            return kernel(*args)
        with torch.inference_mode():
            return kernel(*args)

    return run


def explain(device: torch.device | str | DeviceKind | None = None) -> str:
    """What was probed, which row serves each op on `device` (default: `DEVICE`), and why every other one does not."""
    found = facts(resolve(device))
    lines = [f"{DEVICE.value} was chosen at import", *(f"  {p.kind.value}: {p.reason}" for p in probe())]
    lines.append(f"kernels on {found.kind.value} {found.arch} {found.name} {sorted(found.features)}")
    for op, selection in (select_all(found) | select_host()).items():
        lines.append(f"  {op}: {selection.row.name} ({selection.row.origin}; {selection.row.proof})")
        lines += [f"    not {row.name}: {why}" for row, why in selection.rejected]
    return "\n".join(lines)
