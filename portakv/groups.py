"""LayerGroup: the layers of one side and one format, and the memory they share."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from portakv import device as devices
from portakv import dispatch, ops
from portakv.allocator import HybridSlotAllocator
from portakv.arguments import Ints, Span, as_dtype, as_int, shown, span_of, tracing
from portakv.errors import PortaKVError
from portakv.formats import FAULT_KINDS, FLOAT_DTYPES, FP8_DIALECTS, SLOT_OPS, KVFormat, Layout
from portakv.kernels import GatherKV, SlotOps, StoreKV, StoreRope
from portakv.layers import LayerSpec
from portakv.memory.layouts import LAYOUTS, find_layout

Kernels = Mapping[str, Callable[..., None]]
Plan = dict[tuple[str, KVFormat], tuple[int, ...]]
"""(side, format) -> the model layers stored so."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What the hot path reads of one layer, resolved when the pool is built."""

    fmt: KVFormat
    on_swa: bool
    k_tail: tuple[int, int]
    v_tail: tuple[int, int]
    sources: frozenset[torch.dtype]
    num_rows: int
    readable: tuple[torch.Tensor, torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scales: torch.Tensor  # [4, H]: what the next four are rows of
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_inv: torch.Tensor
    v_inv: torch.Tensor
    spans: tuple[Span, ...]  # of the caches, for kernels that do not look themselves; empty where no bytes are
    rotated_dim: int
    store: StoreKV
    store_checks: bool  # both stores refuse by themselves what they cannot take
    store_rope: StoreRope | None  # None where the layout takes no rope
    gather: GatherKV
    gather_checks: bool
    gathers_batches: bool


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The storage of all layers of one side and format.

    `layers` are the model layers in the order of axis 0, `windows` theirs. `buffers` are the allocations `[L, items,
    bytes]`, `k_caches` and `v_caches` views of them (`KVFormat.caches`). `scales` is float32 `[4, L, H]`: K scale,
    V scale and the reciprocal of each. `kernels` are the rows chosen for each of `fmt.ops`;
    `traced` those that a tracer sees; `raw` is the format in which stored bytes move.
    """

    side: str
    fmt: KVFormat
    layers: tuple[int, ...]
    windows: tuple[int | None, ...]
    num_rows: int
    buffers: tuple[torch.Tensor, ...]
    k_caches: torch.Tensor
    v_caches: torch.Tensor
    scales: torch.Tensor
    store_checks: bool
    gather_checks: bool
    raw: KVFormat
    kernels: Kernels
    traced: Kernels

    @property
    def kv_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def reserved(self) -> list[torch.Tensor]:
        """The reserved page of every layer, in each buffer."""
        return [buffer[:, : self.fmt.page_size // self.fmt.item_slots] for buffer in self.buffers]

    def kernel(self, op: str) -> Callable[..., None]:
        """What now moves raw bytes by "store_kv", "gather_kv" or "move_kv"."""
        return (self.traced if tracing() else self.kernels)[f"{op}{self.raw.family}"]

    def layer(self, at: int, traced: bool) -> Layer:
        """The layer at `at` of axis 0, its kernels eager or as a tracer sees them."""
        fmt, kernels = self.fmt, self.traced if traced else self.kernels
        k_scale, v_scale, k_inv, v_inv = self.scales[:, at]
        k_cache, v_cache = self.k_caches[at], self.v_caches[at]
        return Layer(
            fmt=fmt,
            on_swa=self.side == "swa",
            k_tail=(fmt.num_kv_heads, fmt.head_dim),
            v_tail=(fmt.num_kv_heads, fmt.v_head_dim),
            sources=frozenset(fmt.source_dtypes),
            num_rows=self.num_rows,
            readable=fmt.readable(k_cache, v_cache),
            k_cache=k_cache,
            v_cache=v_cache,
            scales=self.scales[:, at],
            k_scale=k_scale,
            v_scale=v_scale,
            k_inv=k_inv,
            v_inv=v_inv,
            spans=() if traced or k_cache.is_meta else (span_of(k_cache), span_of(v_cache)),
            rotated_dim=fmt.rotated_dim,
            store=kernels[f"store_kv{fmt.family}"],
            store_checks=self.store_checks and not traced,
            store_rope=kernels.get(f"store_kv_rope{fmt.family}"),
            gather=kernels[f"gather_kv{fmt.family}"],
            gather_checks=self.gather_checks and not traced,
            gathers_batches=self.gather_checks and not traced and not fmt.family,
        )


@functools.cache
def _one_object(fmt: KVFormat) -> KVFormat:
    """The first format equal to `fmt`: launchers tell formats apart by identity, and remember each."""
    return fmt


def storage_dtype(dtype: torch.dtype | str, found: devices.DeviceFacts) -> torch.dtype:
    """The dtype of a pool, by itself or its name; "fp8" is the dialect that the device reads."""
    if isinstance(dtype, str) and dtype == "fp8":
        return found.fp8_dialect
    return as_dtype("dtype", dtype, (*FLOAT_DTYPES, *FP8_DIALECTS), "'fp8' or one of {}")


def choose_layout(
    layout: Layout | str, layers: Sequence[LayerSpec], dtype: torch.dtype, page_size: int, found: devices.DeviceFacts
) -> Layout:
    """A layout, or that of its name. "auto": of the packed pages that a CPU reads fastest the first that holds every
    layer, else rows."""
    allowed = [x for x in LAYOUTS if found.device.on_host or not x.packed]
    if not (isinstance(layout, str) and layout == "auto"):
        where = f" or 'auto' on a device of kind {found.device.name}"
        return find_layout(layout, allowed, where)
    for choice in map(find_layout, found.device.packed(found.features)):
        shapes = ((spec, KVFormat(1, spec.head_dim, spec.v_dim, dtype, page_size, choice)) for spec in layers)
        if not any(fmt.problem(spec.mla) for spec, fmt in shapes):
            return choice
    return Layout.ROWS


def plan_groups(layers: Sequence[LayerSpec], has_swa: bool, dtype: torch.dtype, page_size: int, layout: Layout) -> Plan:
    """Which layers share a side and a format; layers that alias another's KV are in none.

    Raises `ValueError` for an alias that is not of an earlier, storing layer of the same kind and shape, and for a
    layer that `layout` cannot hold.
    """
    groups: Plan = {}
    for i, spec in enumerate(layers):
        if spec.alias_of is not None:
            _check_alias(layers, i, spec.alias_of)
            continue
        side = "swa" if has_swa and spec.window is not None else "full"
        of_layer = Layout.MLA if spec.mla and layout is Layout.ROWS else layout
        fmt = _one_object(KVFormat(spec.num_kv_heads, spec.head_dim, spec.v_dim, dtype, page_size, of_layer))
        if problem := fmt.problem(spec.mla):
            raise ValueError(f"layout: expected layers that {layout.name!r} can hold, got {problem} in layer {i}")
        groups[side, fmt] = (*groups.get((side, fmt), ()), i)
    return groups


def check_kernels(kernels: Mapping[str, str] | None, groups: Plan) -> None:
    """Raise `ValueError` for an op, asked for by name, that no layer of `groups` needs: its row would never run."""
    used = list(dict.fromkeys((*SLOT_OPS, *(op for _, fmt in groups for op in fmt.ops))))
    for op in kernels or ():
        if op not in used:
            raise ValueError(f"kernels: expected ops that this pool runs, {used}, got {op!r}")


def name_rows(selections: Iterable[Mapping[str, dispatch.Selection]]) -> dict[str, str]:
    """Each op's rows in use: a format that a row cannot store may send one group elsewhere."""
    names: dict[str, dict[str, None]] = {}
    for chosen in selections:
        for op, selection in chosen.items():
            names.setdefault(op, {})[selection.row.name] = None
    return {op: ", ".join(of) for op, of in names.items()}


def _check_alias(layers: Sequence[LayerSpec], i: int, producer: int) -> None:
    if not 0 <= producer < i or layers[producer].alias_of is not None:
        raise ValueError(f"layers[{i}].alias_of: expected an earlier layer that stores its KV, got {producer}")
    for what in ("num_kv_heads", "head_dim", "v_dim", "mla"):
        mine, theirs = getattr(layers[i], what), getattr(layers[producer], what)
        if mine != theirs:
            raise ValueError(f"layers[{i}].alias_of: layer {producer} has {what} {theirs}, expected {mine}")
    if (layers[i].window is None) != (layers[producer].window is None):
        raise ValueError(f"layers[{i}].alias_of: expected one of its kind, full or sliding window, got {producer}")


def widest_window(layers: Sequence[LayerSpec], swa_window: int | None) -> int | None:
    """What an SWA side keeps: the largest window of `layers` and `swa_window`, None without either."""
    windows = [spec.window for spec in layers if spec.window is not None]
    if swa_window is not None:
        windows.append(as_int("swa_window", swa_window))
    return max(windows, default=None)


def buffer_rows(size: int, swa_size: int | None, page_size: int) -> dict[str, int]:
    """The slots of each side's buffers: whole pages, and the reserved one."""
    return {side: n // page_size * page_size + page_size for side, n in (("full", size), ("swa", swa_size or 0))}


def pool_bytes(
    groups: Plan, size: int, swa_size: int | None, page_size: int, device: torch.device, owns_slots: bool = True
) -> dict[torch.device, int]:
    """What a pool of these sizes allocates on the host and on `device`; `nbytes` of it is their sum."""
    rows, host = buffer_rows(size, swa_size, page_size), torch.device("cpu")
    needs = {host: 0, device: 8 * len(FAULT_KINDS)}
    for (side, fmt), ids in groups.items():
        needs[device] += len(ids) * (fmt.nbytes(rows[side]) + 16 * fmt.num_kv_heads)  # and the scales
    if owns_slots:
        needs[host] += HybridSlotAllocator.host_bytes(size, swa_size, page_size)
        if not devices.shares_host_memory(device):
            needs[device] += 8 * (rows["full"] + 1)  # the mapping's copy
    return needs


def as_ratio(swa_ratio: float | None) -> float | None:
    """A share of a full side."""
    if swa_ratio is None:
        return None
    if not isinstance(swa_ratio, (int, float, np.integer, np.floating)) or isinstance(swa_ratio, bool):
        raise TypeError(f"swa_ratio: expected a number in (0, 1], got {shown(swa_ratio)}")
    if not 0 < swa_ratio <= 1:
        raise ValueError(f"swa_ratio: expected a number in (0, 1], got {swa_ratio}")
    return float(swa_ratio)


def fit_sizes(
    groups: Plan, budget: int, swa_ratio: float | None, page_size: int, device: torch.device
) -> tuple[int, int | None]:
    """The largest `size`, and `swa_size = size * swa_ratio`, whose pool stays within `budget` bytes.

    Raises `ValueError` if not one page fits.
    """
    budget = as_int("budget", budget)

    def sizes(pages: int) -> tuple[int, int | None]:
        size = pages * page_size
        return size, None if swa_ratio is None else max(int(size * swa_ratio), 1)

    def cost(pages: int) -> int:
        return sum(pool_bytes(groups, *sizes(pages), page_size, device).values())

    pages = bisect.bisect_right(range(1, budget), budget, key=cost)
    if pages == 0:
        raise ValueError(f"budget: expected at least {cost(1)} bytes for one page of tokens, got {budget}")
    return sizes(pages)


def allocate_slots(
    size: int,
    swa_size: int | None,
    page_size: int,
    window: int | None,
    kind: devices.Device,
    device: torch.device,
    kernels: tuple[SlotOps, SlotOps],
) -> tuple[HybridSlotAllocator, torch.Tensor]:
    """An allocator and its mapping on `device`, which op `patch_map` of `kernels` keeps up to date.

    On a device that reads host memory the mapping is the allocator's own array. On another, calls that edit it while
    a graph is captured raise `PortaKVError`: every replay would edit it again.
    """

    def patch(slots: Ints, values: Ints) -> None:
        if devices.is_capturing(device):
            raise PortaKVError(f"full_to_swa: expected no edit while {device} captures a graph, got {len(slots)} slots")
        edit = kind.upload(torch.from_numpy(np.stack((slots, values))), device)
        kernels[tracing()]["patch_map"](mapping, edit[0], edit[1])

    shared = devices.shares_host_memory(device)
    allocator = HybridSlotAllocator(size, swa_size, page_size, window=window, on_patch=None if shared else patch)
    mirror = torch.from_numpy(allocator.mapping)
    mapping = mirror if shared else mirror.to(device)
    return allocator, mapping


def allocate_group(
    key: tuple[str, KVFormat],
    ids: tuple[int, ...],
    layers: Sequence[LayerSpec],
    num_rows: int,
    device: torch.device,
    chosen: Mapping[str, dispatch.Selection],
) -> LayerGroup:
    """Zeroed storage for layers `ids`, scales of 1, and the kernels chosen for the format."""
    side, fmt = key
    shapes = [(len(ids), num_rows // fmt.item_slots, item) for item in fmt.item_bytes]
    buffers = tuple(devices.zeros(math.prod(shape), device).view(shape) for shape in shapes)
    k_caches, v_caches = fmt.caches(buffers)
    return LayerGroup(
        side=side,
        fmt=fmt,
        layers=ids,
        windows=tuple(layers[i].window for i in ids),
        num_rows=num_rows,
        buffers=buffers,
        k_caches=k_caches,
        v_caches=v_caches,
        scales=torch.ones((4, len(ids), fmt.num_kv_heads), dtype=torch.float32, device=device),
        store_checks=all(selection.row.checks for op, selection in chosen.items() if op.startswith("store_kv")),
        gather_checks=all(selection.row.checks for op, selection in chosen.items() if op.startswith("gather_kv")),
        raw=_one_object(fmt.raw),
        kernels={op: dispatch.load(op, selection) for op, selection in chosen.items()},
        traced=ops.traced(chosen, fmt.ops),
    )
