"""Checked mode: the slots of a call, read back once and looked at before it launches. And what attaches two pools."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from portakv.arguments import Bools, Ints, are_plain, require_plain, shown
from portakv.errors import IntegrityError, MissingSwaLoc, SlotFault, SlotOwnership, StaleWriteLoc
from portakv.groups import Layer, LayerGroup, widest_window
from portakv.write_loc import WriteLoc, require_location

if TYPE_CHECKING:
    from portakv.allocator import HybridSlotAllocator
    from portakv.pool import HybridKVPool

UNHELD = "a handed-out slot, got {}: freed already, or never handed out"


def side_slots(name: str, layer_id: int, layer: Layer, locations: WriteLoc) -> torch.Tensor:
    """The slots of the layer's side. Raises `MissingSwaLoc`, or `TypeError` for what is no location."""
    require_location(name, locations)
    slots = locations.swa_loc if layer.on_swa else locations.loc
    if slots is None:
        raise MissingSwaLoc(f"{name}: layer {layer_id} has a sliding window and needs swa_loc, got None")
    return slots


def read_back(*slots: torch.Tensor) -> list[Ints]:
    """Slots of one length on the host, in one copy where a device has them. Waits for it."""
    if not are_plain(*slots):
        for each in slots:
            require_plain("slots", each)
    one, *other = slots
    if one.is_meta:
        raise TypeError(f"slots: expected slots with memory, got {one.device}")
    if other and not one.is_cpu and (one.dtype, one.device) == (other[0].dtype, other[0].device):
        return list(torch.stack(slots).cpu().numpy())
    return list(map(_to_numpy, slots))


_to_numpy = operator.methodcaller("numpy", force=True)


def _at(name: str, values: Ints, bad: Bools, expected: str) -> str:
    """What is wrong with the first of `values` that is `bad`."""
    at = int(bad.argmax())
    return f"{name}[{at}]: expected {expected.format(values[at])}"


def _past(name: str, values: Ints, over: Bools, num_rows: int) -> SlotFault:
    return SlotFault(_at(name, values, over, f"a slot below {num_rows}, got {{}}"))


def _repeated(name: str, ordered: Ints) -> SlotFault:
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return SlotFault(f"{name}: expected each slot once, got slot {twice[0]} twice")


def check_slots(name: str, values: Ints, num_rows: int, page_size: int | None = None) -> None:
    """Raise `SlotFault` for a slot past the last row, and with `page_size` for a writable one that stands twice."""
    if (over := values >= num_rows).any():
        raise _past(name, values, over, num_rows)
    ordered = values[:0] if page_size is None else np.sort(values[values >= page_size])
    if (ordered[1:] == ordered[:-1]).any():
        raise _repeated(name, ordered)


def check_store(layer: Layer, write_loc: WriteLoc, loc: torch.Tensor, allocator: HybridSlotAllocator) -> Ints:
    """Raise for slots of a store, `loc` those of the layer's side: out of range, twice there, stale, or free.

    To whom a slot is handed out, nobody keeps. Returns the slots of `loc`.
    """
    name, (values, *rest) = "loc", read_back(*((loc, write_loc.loc) if layer.on_swa else (loc,)))
    full, page_size = values, allocator.page_size
    if layer.on_swa:
        name, (full,) = "swa_loc", rest
    # As `check_slots`, whose call would be one more for each layer.
    if (over := values >= layer.num_rows).any():
        raise _past(name, values, over, layer.num_rows)
    ordered = np.sort(values[values >= page_size])
    if (ordered[1:] == ordered[:-1]).any():
        raise _repeated(name, ordered)
    if layer.on_swa:
        mapping = allocator.mapping
        inside = (full >= 0) & (full < len(mapping) - 1)
        live = np.where(inside, mapping[np.where(inside, full, 0)], -1)
        if (stale := live != values).any():
            at = int(stale.argmax())
            was = f"slot {full[at]} was translated to {values[at]}, the mapping says {live[at]} now"
            raise StaleWriteLoc(f"write_loc[{at}]: {was}")
    if (free := (full >= page_size) & ~allocator.owns(full)).any():
        raise SlotOwnership(_at("loc", full, free, UNHELD))
    return values


def _refuse(name: str, values: Ints, bad: Bools, expected: str) -> None:
    if bad.any():
        raise SlotOwnership(_at(name, values, bad, expected))


def check_move(to: Ints, source: Ints, allocator: HybridSlotAllocator, swa: bool) -> None:
    """Raise for full slots of a move: out of range, a target twice, a slot that is free, or with `swa` bytes that only
    one has."""
    num_rows = len(allocator.mapping) - 1
    check_slots("tgt", to, num_rows, allocator.page_size)
    check_slots("src", source, num_rows)
    moved = (to >= allocator.page_size) & (source >= 0)
    _refuse("tgt", to, moved & ~allocator.is_owned(to), UNHELD)
    _refuse("src", source, moved & ~allocator.is_owned(source), UNHELD)
    if not swa:
        return
    there, here = allocator.has_peer(to), allocator.is_live(source)
    _refuse("src", source, moved & there & ~here, "a slot with live SWA bytes, as its target has, got {}")
    _refuse("tgt", to, moved & here & ~there, "a slot with an SWA peer, as its source has, got {}")


def check_load(slots: Ints, live: Bools | None, allocator: HybridSlotAllocator) -> None:
    """Raise for slots that a host copy is to fill: not handed out, one twice, or SWA bytes that only one has.

    `live` are the copy's tokens with SWA bytes, None where no layer has any.
    """
    allocator.require_owned(slots)
    check_slots("slots", slots, len(allocator.mapping) - 1, allocator.page_size)
    if live is None:
        return
    bare = live & ~allocator.has_peer(slots)
    _refuse("slots", slots, bare, "a slot with an SWA peer for a token that was copied with one, got {}")
    stale = ~live & allocator.is_live(slots)
    _refuse("slots", slots, stale, "a slot without live SWA bytes for a token that was copied without, got {}")


def check_storage(groups: Sequence[LayerGroup], on_device: torch.Tensor, mapping: npt.NDArray[np.int64]) -> None:
    """Raise `IntegrityError` unless the device's mapping is the host's and every reserved row is still zero."""
    if not np.array_equal(read_back(on_device)[0], mapping):
        raise IntegrityError("full_to_swa on the device differs from the allocator's mapping")
    for group in groups:
        if any(page.any() for page in group.reserved):
            raise IntegrityError(f"a reserved row of layers {group.layers} was written")


def check_attachable(pool: HybridKVPool, target: HybridKVPool, size: int, swa_size: int | None) -> None:
    """Raise unless every slot that `target` hands out is one of `pool` too, and is kept as long as it needs."""
    if not hasattr(target, "allocator"):
        raise TypeError(f"slots_of: expected a HybridKVPool, got {shown(target)}")
    if swa_size is not None and target.swa_size is None:
        raise ValueError(f"swa_size: expected None, as the pool whose slots are shared has, got {swa_size}")
    for name, mine, least in (("size", size, target.size), ("swa_size", swa_size, target.swa_size)):
        if mine is not None and mine < (least or 0):
            raise ValueError(f"{name}: expected at least {least} to share the other pool's slots, got {mine}")
    for name in ("page_size", "device"):
        mine, theirs = getattr(pool, name), getattr(target, name)
        if mine != theirs:
            raise ValueError(f"{name}: expected {theirs} as the pool whose slots are shared, got {mine}")
    if pool.window is not None and pool.window > (target.window or 0):
        name = "layers" if pool.window == widest_window(pool.layers, None) else "swa_window"
        raise ValueError(f"{name}: expected windows the shared slots keep, at most {target.window}, got {pool.window}")
