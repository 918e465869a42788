"""What each op means, in plain torch: the last row of every op on every device, and the test oracle.

Slots are 1-D int32 or int64. A negative slot is skipped; one past the last row is skipped and counted in
`faults`; nothing writes a row of the reserved page. No function here waits for the device.

The same slot twice in one store or move is an error in checked mode. Otherwise that slot, and no other, holds one whole
row on CPUs and in the reference: the last of them, all of K and V, values and scales, in every layout. On GPUs each
element of that slot (in FlashMLA's layouts each byte) is of one of the rows named for it, but heads, K and V,
neighbours or a block's values and scale may be of different ones. PAD and negatives may repeat.
"""

from __future__ import annotations

import numpy as np
import torch

from portakv.formats import (
    CANONICAL_NAN,
    FAULT_KINDS,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    PAD,
    Fp8,
    KVFormat,
    ReadFormat,
    Structure,
)

Tensor = torch.Tensor


def translate_loc(
    mapping: Tensor,
    loc: Tensor,
    swa_out: Tensor,
    loc_out: Tensor | None,
    swa_twin: Tensor | None,
    loc_twin: Tensor | None,
    faults: Tensor,
) -> None:
    """Write the SWA slot of each full slot into `swa_out`, and a copy of `loc` into `loc_out`.

    The outputs may be longer than `loc`: the tail becomes PAD. The twins are int32 copies of both. A slot
    without a peer gives PAD, a negative one -1, one past the last row -1 and a fault.
    """
    num_rows = mapping.shape[0] - 1
    wide = loc.long()
    over = wide >= num_rows
    swa = torch.where(over | (wide < 0), -1, mapping[wide.clamp(0, num_rows)])
    _count(faults, "translate_loc", over)
    for out, value in ((swa_out, swa), (swa_twin, swa), (loc_out, wide), (loc_twin, wide)):
        if out is not None:
            _write_slots(out, value, faults)


def cast_loc(loc: Tensor, out: Tensor, faults: Tensor) -> None:
    """Copy slots into int32 `out`, whose tail becomes PAD; what does not fit becomes -1 and a fault."""
    _write_slots(out, loc.long(), faults)


def patch_map(mapping: Tensor, slots: Tensor, values: Tensor) -> None:
    """Set `mapping[slots] = values`, in the current stream's order. All int64, on the mapping's device."""
    mapping[slots] = values


def store_kv(
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
    """Write row t of `k [T, H, D]` and `v [T, H, Dv]` to slot `loc[t]` of the caches.

    A cache is `[rows, H, D]` or, paged, `[pages, page, H, D]`, with any strides but a dense last axis.
    `k_inv` and `v_inv` are one float32 reciprocal scale per KV head, used by a quantising store only.
    """
    slots, ok = writable_slots(loc, count_rows(k_cache), fmt, faults, "store_kv")
    for x, cache, inv in ((k, k_cache, k_inv), (v, v_cache, v_inv)):
        rows, where = as_bytes(cache), _index(cache, slots)
        rows[where] = torch.where(ok[:, None, None], as_bytes(convert(x, fmt, inv)), rows[where])


def gather_kv(
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
    """Read slot `loc[t]` into row t of `k_out [T, H, D]` and `v_out [T, H, Dv]`; skipped rows stay as they are.

    An output of the storage dtype gets the bytes; another float dtype gets the value, times the scale of its
    KV head where the pool is quantised.
    """
    slots, ok = readable_slots(loc, count_rows(k_cache), faults, "gather_kv")
    for cache, out, scale in ((k_cache, k_out, k_scale), (v_cache, v_out, v_scale)):
        rows = as_bytes(cache)[_index(cache, slots)].view(fmt.dtype)
        fresh = as_bytes(restore(rows, out.dtype, fmt, scale))
        as_bytes(out).copy_(torch.where(ok[:, None, None], fresh, as_bytes(out)))


def move_kv(k_caches: Tensor, v_caches: Tensor, tgt: Tensor, src: Tensor, faults: Tensor, fmt: KVFormat) -> None:
    """Copy slot `src[i]` to slot `tgt[i]` in every layer of `[L, rows, H, D]` or `[L, pages, page, H, D]` caches, as if
    every source were read before any write."""
    num_rows = count_rows(k_caches[0])
    read, readable = readable_slots(src, num_rows, faults, "move_kv")
    write, ok = writable_slots(torch.where(readable, tgt.long(), -1), num_rows, fmt, faults, "move_kv")
    for caches in (k_caches, v_caches):
        for layer in as_bytes(caches):
            to = _index(layer, write)
            layer[to] = torch.where(ok[:, None, None], layer[_index(layer, read)], layer[to])


def build_read(
    mapping: Tensor | None,
    table: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    extra_lens: Tensor | None,
    query_lens: Tensor | None,
    out: Tensor,
    indptr: Tensor | None,
    lens: Tensor,
    starts: Tensor,
    faults: Tensor,
    num_slots: int,
    fmt: ReadFormat,
) -> None:
    """Name the slots that attention reads for B sequences, and reset what is past them.

    `table [R, C]` holds the full slot of each request and position, int32 or int64; sequence b is its row `rows[b]`.
    Slots end at `num_slots`; `mapping`, int64 with as many entries or more, that of PAD being PAD, translates them.
    `rows`, `seq_lens`, `extra_lens` (None: 0) and `query_lens` (None: 1) are `[B]`, of one integer dtype and any
    stride. A sequence has `end = seq_lens + extra_lens` keys, those of its last `query_lens` tokens, the queries, among
    them. Named are the keys from `max(0, first query - window + 1)` to the end, or with `prefix_only` to the first
    query.

    `lens [n]` and `starts [n]`, n >= B, become the number of keys and the position of the first (0 where there is
    none), `out` what is read, all of one integer dtype, dense but for the row stride of a 2-D `out`:

    - RAGGED: `out [N]` slots of the sequences one after another, sequence b from `indptr[b]`; `indptr [n + 1]`.
    - ROWS: `out [n, columns]`, a row of slots per sequence.
    - PAGES: `out [n, columns]`, the pages that hold the keys. `starts` is the first position of the first page and
      `lens` counts from there. A page id is the slot at the page's first position divided by the page size.
    - QUERY_ROWS: `out [n, columns]`, the row of query i of sequence b stands after those of the sequences before, and
      names the keys from `max(0, p - window + 1)` to its own position p; `lens` and `starts` tell of rows too.

    Slots PAD and below become `fmt.pad`; so do, each as a fault, a slot past the last, one past the reserved page that
    `mapping` has no peer for, and a page's first slot that is not at a multiple of the page size. One fault each: a
    sequence whose row `table` does not have (it is empty), one with more keys than C (it ends at C), one
    whose query rows `out` cannot hold, and each row or ragged sequence that is cut because `out` is too small. A slot
    or page that int32 cannot hold becomes `fmt.pad` and a fault of `cast_loc`. A negative length is 0.
    """
    num_requests, width = table.shape
    known = (rows >= 0) & (rows < num_requests)
    end = seq_lens.long().clamp(0, width + 1)
    if extra_lens is not None:
        end = end + extra_lens.long().clamp(0, width + 1)
    queries = torch.ones_like(end) if query_lens is None else query_lens.long().clamp(0, width)
    end = torch.where(known, end, 0)
    _count(faults, "build_read", ~known)
    _count(faults, "build_read", end > width)
    end = end.clamp(max=width)

    # From here on sequence B is an empty one, for the rows past the batch, and a row n for what is past a ragged end.
    row_of, end, queries = (
        torch.nn.functional.pad(x, (0, 1)) for x in (torch.where(known, rows.long(), 0), end, queries)
    )
    first = end - queries
    last = first if fmt.prefix_only else end
    row = torch.arange(lens.shape[0] + 1, device=out.device)
    if fmt.structure is Structure.QUERY_ROWS:
        ends = queries.cumsum(0)
        _count(faults, "build_read", (ends > lens.shape[0]) & (queries > 0))
        sequence = torch.searchsorted(ends[:-1], row, right=True)
        query = (first - ends + queries)[sequence] + row
        stop = torch.minimum(query + 1, last[sequence])
    else:
        sequence = row.clamp(max=rows.shape[0])
        query, stop = first[sequence], last[sequence]
    window = width + 1 if fmt.window is None else min(fmt.window, width + 1)
    start = (query - window + 1).clamp(min=0)
    step = fmt.page_size if fmt.structure is Structure.PAGES else 1
    some = start < stop
    start = torch.where(some, start // step * step, 0)
    count = torch.where(some, stop - start, 0)

    if fmt.structure is Structure.RAGGED:
        assert indptr is not None
        ends = count.cumsum(0).clamp(max=out.shape[0])
        begins = torch.nn.functional.pad(ends[:-1], (1, 0))
        indptr.copy_(begins)
        named = ends - begins
        element = torch.arange(out.shape[0], device=out.device)
        row = torch.searchsorted(ends[:-1], element, right=True)
        position = start[row] + element - begins[row]
    else:
        named = count.clamp(max=out.shape[1] * step)
        row = row[:-1, None]
        position = start[row] + step * torch.arange(out.shape[1], device=out.device)
    _count(faults, "build_read", (named < count)[:-1])
    lens.copy_(named[:-1])
    starts.copy_(torch.where(named > 0, start, 0)[:-1])

    ok = position < (start + named)[row]
    if table.numel():
        slot = table[row_of[sequence[row]], torch.where(ok, position, 0)].long()
    else:
        slot = torch.full_like(position, PAD)
    _count(faults, "build_read", ok & (slot >= num_slots))
    slot = torch.where(ok & (slot < num_slots), slot, PAD).clamp(min=PAD)
    if mapping is not None:
        peer = mapping[slot]
        _count(faults, "build_read", (slot >= fmt.page_size) & (peer <= PAD))
        slot = peer
    if step > 1:
        askew = (slot >= step) & (slot % step != 0)
        _count(faults, "build_read", askew)
        slot = torch.where(askew, PAD, slot)
    ok = slot > PAD
    value = slot // step
    if out.dtype == torch.int32:
        unfit = value != value.to(torch.int32)
        _count(faults, "cast_loc", unfit)
        ok &= ~unfit
    out.copy_(torch.where(ok, value, fmt.pad))


def measure_read(
    rows: Tensor,
    seq_lens: Tensor,
    extra_lens: Tensor | None,
    query_lens: Tensor | None,
    num_rows: int,
    max_len: int,
    max_query_len: int,
    column_multiple: int,
    formats: tuple[ReadFormat, ...],
) -> tuple[int, list[tuple[int, ...]]] | None:
    """B, and for each of `formats` the shape of `out` that holds what `build_read` names, with no room to spare.

    The first four are as `build_read` takes them, on the host; columns of QUERY_ROWS are rounded up to a multiple. None
    for a batch out of order: what is not such a tensor, a row outside [0, num_rows), a negative length, more than
    `max_len` keys, or `query_lens` of more than the sequence's keys or `max_query_len`.
    """
    columns = [rows, seq_lens, *(x for x in (extra_lens, query_lens) if x is not None)]
    kinds = {(x.dtype, x.shape, x.is_cpu) if isinstance(x, Tensor) else None for x in columns}
    if None in kinds or len(kinds) > 1 or not rows.is_cpu or rows.dim() != 1 or rows.dtype not in INDEX_DTYPES:
        return None
    # Lists, as no dispatch mode stands in their way: lengths are real even where what is planned is fake.
    row, tokens, extra, queries = (
        np.zeros(rows.shape, np.int64) if x is None else np.array(x.tolist(), np.int64)
        for x in (rows, seq_lens, extra_lens, query_lens)
    )
    good = (row >= 0) & (row < num_rows) & (tokens >= 0) & (extra >= 0) & (queries >= 0)
    # Where a difference or a sum wraps around, a summand is out of bounds too.
    good &= (tokens <= max_len) & (extra <= max_len - tokens) & (queries <= tokens + extra) & (queries <= max_query_len)
    if not good.all():
        return None
    end = tokens + extra
    queries = np.ones_like(end) if query_lens is None else queries
    shapes: list[tuple[int, ...]] = []
    for fmt in formats:
        window = max_len + 1 if fmt.window is None else min(fmt.window, max_len + 1)
        if fmt.structure is Structure.QUERY_ROWS:
            most = int(np.where(queries > 0, np.minimum(end, window), 0).max(initial=0))
            shapes.append((int(queries.sum()), -(-most // column_multiple) * column_multiple))
            continue
        step = fmt.page_size if fmt.structure is Structure.PAGES else 1
        begin, stop = np.maximum(end - queries - window + 1, 0), end - queries if fmt.prefix_only else end
        entries = np.where(begin < stop, -((begin // step * step - stop) // step), 0)
        ragged = fmt.structure is Structure.RAGGED
        shapes.append((int(entries.sum()),) if ragged else (len(end), int(entries.max(initial=0))))
    return len(end), shapes


def store_kv_rope(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_inv: Tensor,
    v_inv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`store_kv` of K rotated by its tokens' `positions [T]`; in an MLA format V, the rope part, is what is rotated.

    `cos_sin [max_position, dims]` has the cosines, then the sines, of each position. A token that would be stored but
    has no angle is skipped and counted.
    """
    loc, angles = rope_angles(cos_sin, positions, loc, k_cache, fmt, faults)
    k, v = (k, rotate(v, angles, interleaved)) if fmt.rotates_v else (rotate(k, angles, interleaved), v)
    store_kv(k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt)


def rope_angles(
    cos_sin: Tensor, positions: Tensor, loc: Tensor, k_cache: Tensor, fmt: KVFormat, faults: Tensor
) -> tuple[Tensor, Tensor]:
    """`loc` without the tokens that have no angle, and float32 cosines and sines `[T, dims]`."""
    wide, num_rows = loc.long(), count_rows(k_cache)
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    lost = ~known & (wide >= fmt.page_size) & (wide < num_rows)
    _count(faults, "store_kv", lost)
    return torch.where(lost, -1, wide), cos_sin[torch.where(known, positions, 0).long()].to(torch.float32)


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """`x [T, H, D]` with its first dims rotated by `angles [T, dims]`, in float32, rounded to the dtype of `x`.

    Dim i goes with dim i + dims / 2 (GPT-NeoX), or 2i with 2i + 1 where `interleaved` (GPT-J).
    """
    dims = angles.shape[1]
    cos, sin = angles[:, None, : dims // 2], angles[:, None, dims // 2 :]
    wide = x[..., :dims].to(torch.float32)
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else (wide[..., : dims // 2], wide[..., dims // 2 :])
    turned = a * cos - b * sin, b * cos + a * sin
    out = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    rotated = x.clone()  # not by `cat`, which autocast refuses for a dtype that is not its own
    rotated[..., :dims] = by_value(out, x.dtype)
    return rotated


def convert(x: Tensor, fmt: KVFormat, inv: Tensor) -> Tensor:
    """`x [T, H, D]` as the storage dtype of `fmt`: unchanged, by value, or quantised with `inv [H]`."""
    if x.dtype == fmt.dtype:
        return x
    if fmt.fp8 is not None:
        return quantise(x, fmt.fp8, inv)
    return by_value(x, fmt.dtype)


def restore(rows: Tensor, dtype: torch.dtype, fmt: KVFormat, scale: Tensor) -> Tensor:
    """The opposite of `convert`: stored rows `[T, H, D]` as `dtype`, times `scale [H]` where quantised."""
    if dtype == fmt.dtype:
        return rows
    if fmt.fp8 is not None:
        return by_value(rows.to(torch.float32) * scale[:, None], dtype)
    return by_value(rows, dtype)


def quantise(x: Tensor, fp8: Fp8, inv: Tensor) -> Tensor:
    """round_to_nearest_even(clamp(float32(x) * inv, +-max)) in dialect `fp8`; any NaN becomes its NaN byte."""
    scaled = x.to(torch.float32) * inv[:, None]
    bits = scaled.clamp(-fp8.max, fp8.max).to(fp8.dtype).view(torch.uint8)
    return torch.where(scaled.isnan(), fp8.nan_byte, bits).view(fp8.dtype)


def by_value(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a float to `dtype`, to nearest even; torch's own NaN bits differ with the device and vector width."""
    assert dtype in FLOAT_DTYPES
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return torch.where(x.isnan(), CANONICAL_NAN[dtype], x.to(dtype).view(bits)).to(bits).view(dtype)


def _write_slots(out: Tensor, value: Tensor, faults: Tensor) -> None:
    n = value.shape[0]
    if out.dtype == torch.int32:
        unfit = value != value.to(torch.int32)
        _count(faults, "cast_loc", unfit)
        value = torch.where(unfit, -1, value)
    out[:n] = value
    out[n:] = PAD


def readable_slots(loc: Tensor, num_rows: int, faults: Tensor, op: str) -> tuple[Tensor, Tensor]:
    """Slots that are safe to index, and which of them `loc` really names; the others became PAD."""
    wide = loc.long()
    _count(faults, op, wide >= num_rows)
    ok = (wide >= 0) & (wide < num_rows)
    return torch.where(ok, wide, PAD), ok


def writable_slots(loc: Tensor, num_rows: int, fmt: KVFormat, faults: Tensor, op: str) -> tuple[Tensor, Tensor]:
    """As `readable_slots`, without the reserved page and without tokens whose slot a later one names again: a skipped
    write puts PAD's own bytes back, and needs no sync."""
    slots, ok = readable_slots(loc, num_rows, faults, op)
    ok &= slots >= fmt.page_size
    ok &= ~named_again(torch.where(ok, slots, PAD))
    return torch.where(ok, slots, PAD), ok


def named_again(slots: Tensor) -> Tensor:
    """Which of `slots [T]` stand once more further on."""
    order = slots.argsort(stable=True)
    ordered = slots[order]
    again = torch.zeros_like(slots, dtype=torch.bool)
    again[order[:-1]] = ordered[1:] == ordered[:-1]
    return again


def _count(faults: Tensor, op: str, bad: Tensor) -> None:
    faults[FAULT_KINDS.index(op)] += bad.sum()


def count_rows(cache: Tensor) -> int:
    return cache.shape[0] if cache.dim() == 3 else cache.shape[0] * cache.shape[1]


def _index(cache: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """`slots` as an index of a row cache, or of a paged one."""
    return (slots,) if cache.dim() == 3 else (slots // cache.shape[1], slots % cache.shape[1])


def as_bytes(x: Tensor) -> Tensor:
    """`x` as uint8 over its dense last axis: indexed copies of fp8 are missing on several devices."""
    if x.shape[-1] == 1:  # dense whatever its stride is, which torch leaves at anything where it has no meaning
        x = x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x.view(torch.uint8)
