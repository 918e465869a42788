"""Which devices there are, which rows each has, and the pure choice among them, with what explains it."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from portakv import kernels as implementations
from portakv.arguments import require_bool, require_plain
from portakv.device import Device, DeviceFacts, DeviceKind, Package, Probe, Row, shares_host_memory
from portakv.errors import DeviceUnavailable, NoKernel
from portakv.formats import SLOT_OPS, KVFormat, Layout
from portakv.kernels.cpu_amx.device import CPU
from portakv.kernels.cuda.device import CUDA
from portakv.kernels.hip.device import HIP
from portakv.kernels.reference.device import OTHER
from portakv.kernels.xpu.device import XPU
from portakv.memory.layouts import LAYOUTS

_warn_once = functools.cache(logging.getLogger("portakv").warning)

DEVICES: tuple[Device, ...] = (CUDA, HIP, XPU, CPU)
"""Every device with kernels of its own, in the order in which one is chosen at import."""

OPS: dict[str, tuple[Layout, ...]] = {
    **dict.fromkeys(SLOT_OPS, ()),
    **{
        op + family: tuple(layout for layout in LAYOUTS if layout.family == family)
        for family, ops in (
            ("", ("store_kv", "gather_kv", "move_kv", "store_kv_rope")),
            ("_flashmla", ("store_kv", "store_kv_rope", "gather_kv")),
            ("_packed", ("store_kv", "gather_kv", "move_kv")),
        )
        for op in ops
    },
}
"""Every op, and the layouts that it is of; those of slots are of none."""

HOST_OPS = ("measure_read",)
"""What launches nothing and answers a caller: it runs on the host for pools of every device."""

ENTRY_POINTS = "portakv.devices"
"""The group in which a package outside the tree names its `Device`."""


@functools.cache
def rows(op: str, device: Device) -> tuple[Row, ...]:
    """The kernels of `op` on `device` in order of preference: its own, then the reference."""
    layouts = [layout.name for layout in OPS.get(op, ())]
    of = CPU if op in HOST_OPS else device
    own = (
        row
        for row in of.rows
        if (row.ops is None or op in row.ops) and (not layouts or any(layout in row.layouts for layout in layouts))
    )
    family = OPS[op][0].family if layouts else ""
    target = f"portakv.kernels.reference.{family.removeprefix('_') or 'rows'}:{{op}}"
    reference = Row("reference", target, "portakv, in torch ops", proof="executed on a CPU")
    return *own, replace(reference, layouts=(*layouts,)) if family == "_packed" else reference


def device_of(at: torch.device) -> Device:
    """The device of a torch device: of those with its type the one that torch was built for, else the first."""
    of_type = [device for device in DEVICES if device.torch_type == at.type]
    return next((device for device in of_type if device.built()), of_type[0] if of_type else OTHER)


def find_device(name: str) -> Device | None:
    """A device by its name, from `DEVICES` or from outside the tree, or None.

    Raises `DeviceUnavailable` for an entry point that brings no `Device` of that name.
    """
    for device in DEVICES:
        if device.name == name:
            return device
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        try:
            joined = point.load()
        except Exception as e:  # somebody else's code
            raise DeviceUnavailable(f"{name}: {point.value} failed: {type(e).__name__}: {e}") from e
        if not isinstance(joined, Device) or joined.name != name:
            raise DeviceUnavailable(f"{name}: expected {point.value} to be a Device of that name, got {joined!r}")
        return joined
    return None


@functools.cache
def probe() -> tuple[Probe, ...]:
    """What was found of each of `DEVICES`. Never raises."""
    return tuple(device.probe() for device in DEVICES)


def choose(requested: str | None) -> Device:
    """The device to use: `requested` if given, else the first that is there.

    Raises `ValueError` for a name that is no device's, `DeviceUnavailable` for one that is not there.
    """
    if requested is None:
        return next(found.device for found in probe() if found.count)
    device = find_device(requested)
    if device is None:
        names = [known.name for known in DEVICES]
        raise ValueError(f"PORTAKV_DEVICE: expected one of {names}, got {requested!r}")
    device.require()
    return device


CHOSEN = choose(os.environ.get("PORTAKV_DEVICE"))
DEVICE = CHOSEN.kind

AnyDevice = torch.device | str | DeviceKind | Device | None
"""What a user may pass as a device: None is the one that was chosen at import."""


def resolve(device: AnyDevice = None) -> tuple[Device, torch.device]:
    """A device, and the torch device, with an index where its type has one, that a pool on it lives on.

    The name of a torch device is one ("cuda" is an AMD GPU where torch was built for those). Raises `ValueError` for an
    unknown device and `DeviceUnavailable` for one that is not there.
    """
    of: Device | None = None
    wanted: Any = CHOSEN if device is None else device
    if isinstance(wanted, DeviceKind):
        wanted = find_device(wanted.value)
    elif isinstance(wanted, str):
        name, colon, index = wanted.partition(":")
        if name not in {known.torch_type for known in DEVICES} and (of := find_device(name)) is not None:
            wanted = f"{of.torch_type}{colon}{index}"
    if isinstance(wanted, Device):
        of, wanted = wanted, wanted.torch_type
    try:
        at = torch.device(wanted)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        names = [known.name for known in DEVICES]
        raise ValueError(f"device: expected a torch device, a Device or one of {names}, got {device!r}") from None
    of = of or device_of(at)
    return of, _placed(of, at)


def _placed(device: Device, at: torch.device) -> torch.device:
    """`at` with an index where its type has one. Raises `DeviceUnavailable` if it is not there."""
    if device is OTHER:
        return at
    if shares_host_memory(at):  # one, whatever its index
        at = torch.device(at.type)
    found = device.probe()
    if (at.index or 0) >= found.count:
        raise DeviceUnavailable(f"{at if at.type == device.name else device.name}: {found.reason}")
    if shares_host_memory(at) or at.index is not None:
        return at
    return torch.device(at.type, torch.get_device_module(at).current_device())


def facts(device: AnyDevice = None) -> DeviceFacts:
    """What a device can do. May create a context."""
    of, at = resolve(device)
    return of.facts(at)


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
    """The chosen row, and every other row of the device with all the reasons why not."""

    row: Row
    rejected: tuple[tuple[Row, str], ...]
    automatic: bool


def select(op: str, found: DeviceFacts, request: Request = Request()) -> Selection:
    """Choose the first row that can serve; pure, so it answers for any device on any machine.

    Raises `NoKernel` with each candidate's reasons.
    """
    chosen, rejected = None, []
    for row in rows(op, found.device):
        if reasons := list(_reasons_against(row, found, request)):
            rejected.append((row, "; ".join(reasons)))
        elif chosen is None:
            chosen = row
        else:
            rejected.append((row, f"{chosen.name} comes first"))
    if chosen is None:
        raise NoKernel(op, f"{found.device.name} {found.arch}".strip(), [(r.name, why) for r, why in rejected])
    return Selection(chosen, tuple(rejected), automatic=request.wanted is None)


def _reasons_against(row: Row, found: DeviceFacts, request: Request) -> Iterator[str]:
    if request.wanted is not None and row.name != request.wanted:
        yield f"{request.wanted!r} was requested"
    if request.strict and request.wanted is None and row.name == "reference":
        yield "strict: an automatic choice may not end at the reference"
    if (fmt := request.fmt) is not None:
        if fmt.layout.name not in row.layouts:
            yield f"cannot store layout {fmt.layout.name!r}"
        if row.refuses is not None and (reason := row.refuses(fmt, request.num_rows)):
            yield reason
    if row.package is not None:
        name, _, oldest = row.package.partition(">=")
        if reason := found.packages.get(name, Package(problem="not installed")).why_not(name, oldest):
            yield reason


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
    """A selection for each op of `formats`, or of all; `kernels` (op -> row name) goes before `PORTAKV_KERNELS`.

    Raises `ValueError` for an op or a row that there is not.
    """
    if kernels is not None and not isinstance(kernels, Mapping):
        raise TypeError(f"kernels: expected a mapping of op to row, got {kernels!r}")
    require_bool("strict", strict)
    wanted = parse_kernels(os.environ.get("PORTAKV_KERNELS", "")) | dict(kernels or {})
    every = (*OPS, *HOST_OPS)
    for op, name in wanted.items():
        if op not in every:
            raise ValueError(f"kernels: expected an op of {list(every)}, got {op!r}")
        names = sorted({row.name for device in (*DEVICES, found.device) for row in rows(op, device)})
        if not isinstance(name, str) or name not in names:
            raise ValueError(f"kernels: expected a row of {op} among {names}, got {name!r}")
    asked = dict.fromkeys(OPS) if formats is None else formats
    return {op: select(op, found, Request(fmt, wanted.get(op), strict, num_rows)) for op, fmt in asked.items()}


def select_host() -> dict[str, Selection]:
    """A selection for each of `HOST_OPS`: the same for pools of every device."""
    wanted, found = parse_kernels(os.environ.get("PORTAKV_KERNELS", "")), CPU.facts(torch.device("cpu"))
    return {op: select(op, found, Request(wanted=wanted.get(op))) for op in HOST_OPS}


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


def explain(device: AnyDevice = None) -> str:
    """What was probed, which row serves each op on `device` (default: `DEVICE`), and why every other one does not."""
    found = facts(device)
    lines = [f"{CHOSEN.name} was chosen at import", *(f"  {p.device.name}: {p.reason}" for p in probe())]
    lines.append(f"kernels on {found.device.name} {found.arch} {found.name} {sorted(found.features)}")
    for op, selection in (select_all(found) | select_host()).items():
        lines.append(f"  {op}: {selection.row.name} ({selection.row.origin}; {selection.row.proof})")
        lines += [f"    not {row.name}: {why}" for row, why in selection.rejected]
    return "\n".join(lines)
