"""What the ops mean on packed CPU pages, in plain torch; as in `reference`, nothing waits for the device."""

from __future__ import annotations

import torch

from portakv.formats import KVFormat, Layout
from portakv.kernels.reference.rows import convert, readable_slots, restore, writable_slots

Tensor = torch.Tensor


def store_kv_packed(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_inv: Tensor,
    v_inv: Tensor,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`store_kv` into packed pages `[pages, H, page, D]` and `[pages, H, page, Dv]`, see `packed_tokens`."""
    slots, ok = writable_slots(loc, _num_slots(k_cache), fmt, faults, "store_kv")
    for x, cache, inv, is_v in ((k, k_cache, k_inv, False), (v, v_cache, v_inv, True)):
        tokens, where = packed_tokens(cache, slots, fmt, is_v)
        old = tokens[where]
        new = _as_ints(convert(x, fmt, inv)).reshape(old.shape)
        tokens[where] = torch.where(ok.view(-1, *[1] * (old.dim() - 1)), new, old)


def gather_kv_packed(
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`gather_kv` from packed pages `[pages, H, page, D]` and `[pages, H, page, Dv]`."""
    slots, ok = readable_slots(loc, _num_slots(k_cache), faults, "gather_kv")
    for cache, out, scale, is_v in ((k_cache, k_out, k_scale, False), (v_cache, v_out, v_scale, True)):
        tokens, where = packed_tokens(cache, slots, fmt, is_v)
        rows = tokens[where].reshape(out.shape).view(fmt.dtype)
        fresh = _as_ints(restore(rows, out.dtype, fmt, scale))
        _as_ints(out).copy_(torch.where(ok[:, None, None], fresh, _as_ints(out)))


def move_kv_packed(k_caches: Tensor, v_caches: Tensor, tgt: Tensor, src: Tensor, faults: Tensor, fmt: KVFormat) -> None:
    """`move_kv` in packed pages `[L, pages, H, page, D]` and `[L, pages, H, page, Dv]`."""
    num_slots = _num_slots(k_caches[0])
    read, readable = readable_slots(src, num_slots, faults, "move_kv")
    write, ok = writable_slots(torch.where(readable, tgt.long(), -1), num_slots, fmt, faults, "move_kv")
    for caches, is_v in ((k_caches, False), (v_caches, True)):
        for cache in caches:
            tokens, source = packed_tokens(cache, read, fmt, is_v)
            target = packed_tokens(cache, write, fmt, is_v)[1]
            old = tokens[target]
            tokens[target] = torch.where(ok.view(-1, *[1] * (old.dim() - 1)), tokens[source], old)


def packed_tokens(cache: Tensor, slots: Tensor, fmt: KVFormat, is_v: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A packed cache `[pages, H, page, D]` as integers whose first axes are indexed by a token, and that index.

    With t the token in the page and d the element, a head's page holds it at, for `cpu_vec`, `d * page + t` in K and
    `t * D + d` in V; for `cpu_amx`, whose tiles multiply pairs, at
    `((t // 16) * (D // 2) + d // 2) * 32 + t % 16 * 2 + d % 2` in K and
    `(d // 16) * (page * 16) + (t // 2) * 32 + d % 16 * 2 + t % 2` in V. Source: vLLM's CPU attention.
    """
    pages, heads, page, dim = cache.shape
    ints, at, t = _as_ints(cache), slots // page, slots % page
    if fmt.layout is Layout.CPU_AMX and is_v:
        tokens = ints.view(pages, heads, dim // 16, page // 2, 16, 2).permute(0, 3, 5, 1, 2, 4)
        return tokens, (at, t // 2, t % 2)
    if fmt.layout is Layout.CPU_AMX:
        tokens = ints.view(pages, heads, page // 16, dim // 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
        return tokens, (at, t // 16, t % 16)
    if is_v:
        return ints.permute(0, 2, 1, 3), (at, t)
    return ints.view(pages, heads, dim, page).permute(0, 3, 1, 2), (at, t)


def _num_slots(cache: Tensor) -> int:
    return cache.shape[0] * cache.shape[2]


def _as_ints(x: Tensor) -> Tensor:
    """`x` as integers of the same size, for copies of single elements."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
