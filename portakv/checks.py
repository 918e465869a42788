"""What a pool demands of its arguments, and checked mode: the slots of a call read back before it launches."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from portakv.arguments import require_plain, shown
from portakv.device import DeviceFacts
from portakv.errors import IntegrityError, MissingSwaLoc, SlotFault, SlotOwnership, StaleWriteLoc
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS, KVFormat, Layout
from portakv.groups import Layer, LayerGroup, widest_window
from portakv.layers import LayerSpec, check_positive
from portakv.memory.layouts import LAYOUTS, find_layout
from portakv.write_loc import WriteLoc, require_location

if TYPE_CHECKING:
    from portakv.allocator import HybridSlotAllocator
    from portakv.pool import HybridKVPool


def pool_layers(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    if not isinstance(layers, Sequence):
        raise TypeError(f"layers: expected a sequence of LayerSpec, got {type(layers).__name__}")
    for i, spec in enumerate(layers):
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"layers[{i}]: expected a LayerSpec, got {spec!r}")
    if not layers:
        raise ValueError("layers: expected at least one LayerSpec, got none")
    return tuple(layers)


def checked_mode(check: bool | None) -> bool:
    if isinstance(check, bool):
        return check
    if check is not None:
        raise TypeError(f"check: expected True, False or None, got {check!r}")
    value = os.environ.get("PORTAKV_CHECK", "0")
    if value not in ("0", "1"):
        raise ValueError(f"PORTAKV_CHECK: expected 0 or 1, got {value!r}")
    return value == "1"


def storage_dtype(dtype: torch.dtype | str, found: DeviceFacts) -> torch.dtype:
    if isinstance(dtype, str) and dtype == "fp8":
        return found.fp8_dialect
    if isinstance(dtype, torch.dtype) and (dtype in FLOAT_DTYPES or dtype in FP8_DIALECTS):
        return dtype
    allowed = [str(d) for d in (*FLOAT_DTYPES, *FP8_DIALECTS)]
    raise TypeError(f"dtype: expected 'fp8' or one of {allowed}, got {dtype!r}")


def pool_layout(
    layout: str, layers: Sequence[LayerSpec], dtype: torch.dtype, page_size: int, found: DeviceFacts
) -> Layout:
    """A layout by its name. "auto": on a CPU the packed pages that it multiplies fastest, if they hold every layer."""
    on_host = found.device.torch_type == "cpu"
    allowed = ["auto", *(x.name for x in LAYOUTS if on_host or not x.packed)]
    if not isinstance(layout, str):
        raise TypeError(f"layout: expected one of {allowed}, got {layout!r}")
    if layout not in allowed:
        raise ValueError(f"layout: expected one of {allowed} on a device of kind {found.device.name}, got {layout!r}")
    if layout != "auto":
        return find_layout(layout)
    for choice in map(find_layout, found.device.packed(found.features)):
        shapes = ((spec, KVFormat(1, spec.head_dim, spec.v_dim, dtype, page_size, choice)) for spec in layers)
        if not any(fmt.problem(spec.mla) for spec, fmt in shapes):
            return choice
    return Layout.ROWS


def scales(name: str, scale: float | torch.Tensor | None, num_kv_heads: int) -> torch.Tensor:
    """A scale, or one per KV head, as float32 on the host: `[1]` or `[H]`."""
    if scale is None:
        scale = 1.0
    if isinstance(scale, torch.Tensor):
        require_plain(name, scale)
        good, got = scale.is_floating_point() and not scale.is_meta, f"{scale.dtype} on {scale.device}"
    else:
        good, got = isinstance(scale, (int, float)) and not isinstance(scale, bool), type(scale).__name__
    if not good:
        raise TypeError(f"{name}: expected a number or a tensor of floats, got {got}")
    if isinstance(scale, int):  # as a float where it is one: torch takes ints of 64 bits only
        scale = float(scale) if scale.bit_length() <= 128 else math.inf
    if not isinstance(scale, torch.Tensor):
        scale = torch.tensor(scale, dtype=torch.float32, device="cpu")
    value = scale.detach().to("cpu", torch.float32).reshape(-1)
    if value.numel() not in (1, num_kv_heads):
        raise ValueError(f"{name}: expected 1 value or {num_kv_heads}, one per KV head, got {value.numel()}")
    if not (value.isfinite() & (value > 0) & (1 / value).isfinite()).all():
        raise ValueError(f"{name}: expected finite positive scales with a finite reciprocal, got {scale}")
    return value


def no_layer(layer_id: int, layers: Sequence[LayerSpec]) -> ValueError:
    """The error for an id of no layer, or of one that reads another layer's KV."""
    if type(layer_id) is int and 0 <= layer_id < len(layers):
        producer = layers[layer_id].alias_of
        return ValueError(
            f"layer_id: expected a layer that stores its KV, got {layer_id}, which reads layer {producer}'s"
        )
    return ValueError(f"layer_id: expected 0 to {len(layers) - 1}, got {shown(layer_id)}")


def side_slots(name: str, layer_id: int, layer: Layer, locations: WriteLoc) -> torch.Tensor:
    """The slots of the layer's side. Raises `MissingSwaLoc`, or `TypeError` for what is no location."""
    require_location(name, locations)
    slots = locations.swa_loc if layer.on_swa else locations.loc
    if slots is None:
        raise MissingSwaLoc(f"{name}: layer {layer_id} has a sliding window and needs swa_loc, got None")
    return slots


def check_rows(
    names: tuple[str, str, str],
    layer: Layer,
    loc: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtypes: Collection[torch.dtype],
    device: torch.device,
    mixed: bool = False,
    batched: bool = False,
) -> None:
    """Raise for K rows, V rows or slots that a store or a gather of `layer` cannot take.

    With `mixed` K and V may be of two dtypes, with `batched` rows of a batch, `[B, S, H, D]`.
    """
    for name, x in ((names[0], k), (names[1], v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    lead: tuple[int, ...] = (loc.shape[0],)
    try:
        if batched and k.dim() == 4 and k.shape[0] * k.shape[1] == lead[0]:
            lead = tuple(k.shape[:2])
        if (
            k.shape == (*lead, *layer.k_tail)
            and v.shape == (*lead, *layer.v_tail)
            and k.dtype in dtypes
            and (v.dtype is k.dtype or (mixed and v.dtype in dtypes))
            and k.device == v.device == loc.device == device
            and (k.is_contiguous() or k.stride(-1) == 1)
            and (v.is_contiguous() or v.stride(-1) == 1)
        ):
            return
    except RuntimeError:  # of a nested tensor, which has no shape
        pass
    for name, x, tail in ((names[0], k, layer.k_tail), (names[1], v, layer.v_tail)):
        require_plain(name, x)
        if x.shape != (*lead, *tail):
            raise ValueError(f"{name}: expected shape {(*lead, *tail)}, got {tuple(x.shape)}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: expected a dtype of {sorted(map(str, dtypes))}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got {x.device}")
        if not x.is_contiguous() and x.stride(-1) != 1:
            raise ValueError(f"{name}: expected a dense last axis, got strides {x.stride()}")
    if k.dtype != v.dtype and not mixed:
        raise TypeError(f"{names[1]}: expected {k.dtype} as {names[0]}, got {v.dtype}")
    if loc.device != device:
        raise ValueError(f"{names[2]}: expected slots on {device}, got {loc.device}")


def check_outputs(k_out: torch.Tensor, v_out: torch.Tensor) -> None:
    """Raise for rows, or heads, that are one memory: `expand` makes such."""
    if k_out.is_contiguous() and v_out.is_contiguous():
        return
    for name, x in (("k_out", k_out), ("v_out", v_out)):
        if 0 in x.stride() and any(n > 1 and not stride for n, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"{name}: expected rows with memory of their own, got strides {x.stride()}")


def host(slots: torch.Tensor) -> npt.NDArray[Any]:
    require_plain("slots", slots)
    array: npt.NDArray[Any] = slots.cpu().numpy()
    return array


def check_range(name: str, slots: torch.Tensor, num_rows: int) -> None:
    """Raise `SlotFault` for a slot past the last row."""
    _check_range(name, host(slots), num_rows)


def _check_range(name: str, values: npt.NDArray[Any], num_rows: int) -> None:
    over = values >= num_rows
    if over.any():
        at = int(over.argmax())
        raise SlotFault(f"{name}[{at}]: expected a slot below {num_rows}, got {values[at]}")


def check_distinct(name: str, values: npt.NDArray[Any], page_size: int) -> None:
    """Raise `SlotFault` for a writable slot that stands twice."""
    ordered = np.sort(values[values >= page_size])
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise SlotFault(f"{name}: expected each slot once, got slot {twice[0]} twice")


def check_store(layer: Layer, write_loc: WriteLoc, loc: torch.Tensor, allocator: HybridSlotAllocator) -> None:
    """Raise for slots of a store, `loc` those of the layer's side: out of range, twice there, stale, or free."""
    name, values = "swa_loc" if layer.on_swa else "loc", host(loc)
    _check_range(name, values, layer.num_rows)
    check_distinct(name, values, allocator.page_size)
    if layer.on_swa:
        full = host(write_loc.loc)
        check_fresh(full, values, allocator.mapping)
        values = full
    check_owned("loc", values, allocator)


def check_owned(name: str, values: npt.NDArray[Any], allocator: HybridSlotAllocator) -> None:
    """Raise `SlotOwnership` for a writable slot that is not handed out; to whom it is, nobody keeps."""
    _refuse(
        name,
        values,
        (values >= allocator.page_size) & ~allocator.is_owned(values),
        "a handed-out slot, got {}: freed already, or never handed out",
    )


def _refuse(name: str, values: npt.NDArray[Any], bad: npt.NDArray[np.bool_], expected: str) -> None:
    if bad.any():
        at = int(bad.argmax())
        raise SlotOwnership(f"{name}[{at}]: expected {expected.format(values[at])}")


def check_fresh(full: npt.NDArray[Any], swa: npt.NDArray[Any], mapping: npt.NDArray[np.int64]) -> None:
    """Raise `StaleWriteLoc` unless `swa` is what `mapping` says of `full` now."""
    inside = (full >= 0) & (full < len(mapping) - 1)
    live = np.where(inside, mapping[np.where(inside, full, 0)], -1)
    stale = live != swa
    if stale.any():
        at = int(stale.argmax())
        raise StaleWriteLoc(
            f"write_loc[{at}]: slot {full[at]} was translated to {swa[at]}, the mapping says {live[at]} now"
        )


def check_move(tgt: torch.Tensor, src: torch.Tensor, allocator: HybridSlotAllocator, swa: bool) -> None:
    """Raise for full slots of a move: a target twice, a slot that is free, or with `swa` bytes that only one has."""
    to, source = host(tgt), host(src)
    check_distinct("tgt", to, allocator.page_size)
    moved = (to >= allocator.page_size) & (source >= 0)
    unheld = "a handed-out slot, got {}: freed already, or never handed out"
    _refuse("tgt", to, moved & ~allocator.is_owned(to), unheld)
    _refuse("src", source, moved & ~allocator.is_owned(source), unheld)
    if not swa:
        return
    there, here = allocator.has_peer(to), allocator.is_live(source)
    _refuse("src", source, moved & there & ~here, "a slot with live SWA bytes, as its target has, got {}")
    _refuse("tgt", to, moved & here & ~there, "a slot with an SWA peer, as its source has, got {}")


def check_load(slots: torch.Tensor, live: npt.NDArray[np.bool_] | None, allocator: HybridSlotAllocator) -> None:
    """Raise for slots that a host copy is to fill: not handed out, one twice, or SWA bytes that only one has.

    `live` are the copy's tokens with SWA bytes, None where no layer has any.
    """
    allocator.require_owned(slots)
    values = host(slots)
    check_distinct("slots", values, allocator.page_size)
    if live is None:
        return
    bare = live & ~allocator.has_peer(values)
    _refuse("slots", values, bare, "a slot with an SWA peer for a token that was copied with one, got {}")
    stale = ~live & allocator.is_live(values)
    _refuse("slots", values, stale, "a slot without live SWA bytes for a token that was copied without, got {}")


def check_storage(groups: Sequence[LayerGroup], on_device: torch.Tensor, mapping: npt.NDArray[np.int64]) -> None:
    """Raise `IntegrityError` unless the device's mapping is the host's and every reserved row is still zero."""
    if not np.array_equal(host(on_device), mapping):
        raise IntegrityError("full_to_swa on the device differs from the allocator's mapping")
    for group in groups:
        if any(page.any() for page in group.reserved):
            raise IntegrityError(f"a reserved row of layers {group.layers} was written")


def check_attachable(pool: HybridKVPool, target: HybridKVPool, size: int, swa_size: int | None) -> None:
    """Raise unless every slot that `target` hands out is one of `pool` too, and is kept as long as it needs."""
    if not hasattr(target, "allocator"):
        raise TypeError(f"slots_of: expected a HybridKVPool, got {target!r}")
    if swa_size is not None and target.swa_size is None:
        raise ValueError(f"swa_size: expected None, as the pool whose slots are shared has, got {swa_size}")
    for name, mine, least in (("size", size, target.size), ("swa_size", swa_size, target.swa_size)):
        if mine is not None and check_positive(name, mine) < (least or 0):
            raise ValueError(f"{name}: expected at least {least} to share the other pool's slots, got {mine}")
    for name in ("page_size", "device"):
        mine, theirs = getattr(pool, name), getattr(target, name)
        if mine != theirs:
            raise ValueError(f"{name}: expected {theirs} as the pool whose slots are shared, got {mine}")
    if pool.window is not None and pool.window > (target.window or 0):
        name = "layers" if pool.window == widest_window(pool.layers, None) else "swa_window"
        raise ValueError(f"{name}: expected windows the shared slots keep, at most {target.window}, got {pool.window}")
