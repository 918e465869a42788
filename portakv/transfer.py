"""Copies to the host and back, and descriptions of a pool's memory for a transfer engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from portakv import device as devices
from portakv.allocator import HybridSlotAllocator
from portakv.arguments import require_plain, require_slots, shown
from portakv.formats import FP8_DIALECTS, Layout
from portakv.groups import LayerGroup
from portakv.write_loc import KVWriteLoc


@dataclass(frozen=True, slots=True)
class HostCopy:
    """KV of one sequence's slots in host memory, as the stored bytes.

    `live [N]` says which tokens had a live SWA peer. Per layer group, `keys` is `[L, n, H, D]` and `values`
    `[L, n, H, Dv]` of `KVFormat.raw`, with n = N on the full side and the number of live tokens on the SWA side.
    `scales` is float32 `[2, L, H]`, what K and V of a quantised layer are multiplied with, and `[2, 0, H]` of others.
    """

    live: npt.NDArray[np.bool_]
    tags: tuple[tuple[str, str, int], ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.keys, *self.values, *self.scales))

    def __reduce__(self) -> tuple[Any, ...]:
        """Tensors as uint8 and their dtypes: torch pickles no fp8."""
        tensors = ([(x.view(torch.uint8), x.dtype) for x in part] for part in (self.keys, self.values, self.scales))
        return _unpickle, (self.live, self.tags, *tensors)


def _unpickle(live: Any, tags: Any, *parts: list[tuple[torch.Tensor, torch.dtype]]) -> HostCopy:
    return HostCopy(live, tags, *(tuple(x.view(dtype) for x, dtype in part) for part in parts))


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """One layer group for a transfer engine.

    Slot ids are those of `side` ("full" or "swa"), `num_slots` of them with the reserved page. Item i of a buffer is
    `k_item_bytes` (`v_item_bytes`) at `i * k_item_bytes` and has the slots from `i * item_slots` on, `item_slots` of
    them. Buffers are (address, bytes), one per layer, contiguous; where K and V lie in one, it is K's, and there is
    none of V. `tag` is equal where the bytes mean the same, given the same `scales`: (address, bytes) of float32
    `[2, L, H]`, what K and V of quantised layers are multiplied with, set in place; None where there are none.
    """

    side: str
    layers: tuple[int, ...]
    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    num_slots: int
    item_slots: int
    k_item_bytes: int
    v_item_bytes: int
    tag: str
    k_buffers: tuple[tuple[int, int], ...]
    v_buffers: tuple[tuple[int, int], ...]
    scales: tuple[int, int] | None


def describe(group: LayerGroup) -> GroupDescription:
    fmt = group.fmt
    spans = [tuple((layer.data_ptr(), layer.nbytes) for layer in buffer) for buffer in group.buffers]
    return GroupDescription(
        group.side,
        group.layers,
        group.windows,
        fmt.num_kv_heads,
        fmt.head_dim,
        fmt.v_head_dim,
        fmt.page_size,
        group.num_rows,
        fmt.item_slots,
        fmt.item_bytes[0],
        sum(fmt.item_bytes[1:]),
        fmt.tag,
        spans[0],
        spans[1] if len(spans) > 1 else (),
        (group.scales.data_ptr(), group.scales[:2].nbytes) if _is_scaled(group) else None,
    )


def copy_to_host(
    groups: Sequence[LayerGroup], locations: KVWriteLoc, live: npt.NDArray[np.bool_], faults: torch.Tensor
) -> HostCopy:
    """The bytes at `locations`, on the SWA side those of `live` tokens only. Waits for the device."""
    copies = []
    for group in groups:
        loc = _side(group, locations, live)
        raw, device = group.raw, group.k_caches.device
        keys, values = (
            torch.empty((len(group.layers), len(loc), raw.num_kv_heads, dim), dtype=raw.dtype, device="cpu")
            for dim in (raw.head_dim, raw.v_head_dim)
        )
        gather = group.kernel("gather_kv")
        # A layer at a time: requests leave when the device's memory is short.
        apart = not devices.shares_host_memory(device)
        staged = [torch.empty_like(x[0], device=device) for x in (keys, values)] if apart else None
        for i in range(len(group.layers)):
            k, v = staged or (keys[i], values[i])
            k_scale, v_scale = group.scales[:2, i]
            gather(group.k_caches[i], group.v_caches[i], loc, k, v, k_scale, v_scale, faults, raw)
            if apart:
                keys[i].copy_(k)
                values[i].copy_(v)
        copies.append((keys, values, _scales(group)))
    return HostCopy(live, _tags(groups), *zip(*copies, strict=True))


def load_from_host(groups: Sequence[LayerGroup], copy: HostCopy, locations: KVWriteLoc, faults: torch.Tensor) -> None:
    """Store a copy's bytes at `locations`, the new slots of its tokens."""
    for group, keys, values in zip(groups, copy.keys, copy.values, strict=True):
        loc = _side(group, locations, copy.live)
        store = group.kernel("store_kv")
        for i in range(len(group.layers)):
            k, v = (x[i].to(group.k_caches.device) for x in (keys, values))
            k_inv, v_inv = group.scales[2:, i]
            store(k, v, group.k_caches[i], group.v_caches[i], loc, k_inv, v_inv, faults, group.raw)


def take_slots(copy: HostCopy, allocator: HybridSlotAllocator) -> torch.Tensor:
    """New full slots for the tokens of `copy`, with SWA peers, which wait for their bytes, where it has them."""
    check_pages("copy", copy.live, allocator.page_size)
    slots = allocator.alloc(len(copy.live), swa_tail=0)
    allocator.restore_swa(slots[torch.from_numpy(copy.live)])
    return slots


def check_copy(groups: Sequence[LayerGroup], copy: HostCopy, slots: torch.Tensor | None) -> None:
    """Raise unless `copy` came whole from layer groups whose bytes mean the same, and has a token for each of
    `slots`."""
    if not isinstance(copy, HostCopy):
        raise TypeError(f"copy: expected a HostCopy, got {type(copy).__name__}")
    if not isinstance(copy.tags, tuple) or not all(isinstance(tag, tuple) for tag in copy.tags):
        raise TypeError(f"copy.tags: expected a tuple of (side, tag, layers), got {shown(copy.tags)}")
    if copy.tags != _tags(groups):
        raise ValueError(f"copy: expected layer groups {_tags(groups)}, got {copy.tags}")
    if not isinstance(copy.live, np.ndarray) or copy.live.dtype != np.bool_ or copy.live.ndim != 1:
        raise ValueError(f"copy.live: expected a vector of bools, got {shown(copy.live)}")
    rows = {"full": copy.live.size, "swa": int(copy.live.sum())}
    raws = [(group.raw, (len(group.layers), rows[group.side], group.raw.num_kv_heads)) for group in groups]
    keys = [(raw.dtype, (*shape, raw.head_dim)) for raw, shape in raws]
    values = [(raw.dtype, (*shape, raw.v_head_dim)) for raw, shape in raws]
    scales = [_scales(group) for group in groups]
    described = [(x.dtype, tuple(x.shape)) for x in scales]
    for name, expected in (("keys", keys), ("values", values), ("scales", described)):
        given = getattr(copy, name)
        if not isinstance(given, tuple):
            raise TypeError(f"copy.{name}: expected a tuple of tensors, got {shown(given)}")
        for i, x in enumerate(given):
            require_plain(f"copy.{name}[{i}]", x)
            if not devices.shares_host_memory(x.device):
                raise ValueError(f"copy.{name}[{i}]: expected a tensor on the host, got {x.device}")
        got = [(x.dtype, tuple(x.shape)) for x in given]
        if got != expected:
            raise ValueError(f"copy.{name}: expected tensors of {expected}, got {got}")
    for group, mine, theirs in zip(groups, scales, copy.scales, strict=True):
        if not torch.equal(mine, theirs):
            at = f"of layers {group.layers}"
            raise ValueError(f"copy.scales: expected those {at}, {mine.tolist()}, got {theirs.tolist()}")
    if slots is None:
        return
    require_slots("slots", slots)
    if len(slots) != len(copy.live):
        raise ValueError(f"slots: expected {len(copy.live)}, one per token of the copy, got {len(slots)}")


def check_pages(name: str, live: npt.NDArray[np.bool_], page_size: int) -> None:
    """Raise `ValueError` if tokens that lost their SWA bytes stand behind live ones of a page: such a page is neither
    live nor gone."""
    behind = live[:-1] & ~live[1:]
    behind[page_size - 1 :: page_size] = False
    if behind.any():
        at = int(behind.argmax()) + 1
        expected = f"expected no token without SWA bytes behind live ones in a page of {page_size}"
        raise ValueError(f"{name}: {expected}, got one at token {at}")


def _tags(groups: Sequence[LayerGroup]) -> tuple[tuple[str, str, int], ...]:
    return tuple((group.side, group.fmt.tag, len(group.layers)) for group in groups)


def _is_scaled(group: LayerGroup) -> bool:
    """Whether stored numbers mean something only with scales; FlashMLA's pages have theirs among the bytes."""
    return group.fmt.dtype in FP8_DIALECTS and group.fmt.layout not in (Layout.FLASHMLA, Layout.FLASHMLA_V32)


def _scales(group: LayerGroup) -> torch.Tensor:
    return (group.scales[:2] if _is_scaled(group) else group.scales[:2, :0]).to("cpu", copy=True)


def _side(group: LayerGroup, locations: KVWriteLoc, live: npt.NDArray[np.bool_]) -> torch.Tensor:
    if group.side == "full":
        return locations.loc
    assert locations.swa_loc is not None
    return locations.swa_loc[torch.from_numpy(live).to(locations.swa_loc.device)]
