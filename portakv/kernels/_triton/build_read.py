# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""build_read: the slots that attention reads, with every tail, in one launch.

The host knows no length, so the grid covers what the output has room for. A line is a sequence or, of QUERY_ROWS, a
query; its programs find where it begins by summing over the sequences before it, a warp at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from portakv.formats import FAULT_KINDS, ReadFormat, Structure, Variant
from portakv.kernels._triton.launch import Launcher, Source
from portakv.kernels._triton.rows import Tile
from portakv.kernels._triton.slots import INDEX_TYPES, count_faults, pointers

Tensor = torch.Tensor

SEQUENCES = 64
"""Those that one step of a sum takes."""

COLUMNS = 256
STEPS = 8
"""A program takes this many times COLUMNS places of a line: eight slots a lane are under way at once."""


def source(variant: Variant, tiles: tuple[Tile, ...], lanes: int) -> Source:
    assert variant.dtype is not None
    assert variant.out_index_dtype is not None
    lengths, out = INDEX_TYPES[variant.dtype], INDEX_TYPES[variant.out_index_dtype]
    return Source(
        kernel,
        {"mapping": "i64", "table": INDEX_TYPES[variant.index_dtype]}
        | dict.fromkeys(("rows", "seq_lens", "extra_lens", "query_lens"), lengths)
        | dict.fromkeys(("out", "indptr", "lens", "starts"), out)
        | {"faults": "i64"},
        {
            "RAGGED": variant.structure is Structure.RAGGED,
            "PER_QUERY": variant.structure is Structure.QUERY_ROWS,
            "SEQUENCES": SEQUENCES,
            "COLUMNS": COLUMNS,
            "SPAN": COLUMNS * STEPS,
            "FAULT": FAULT_KINDS.index("build_read"),
            "CAST_FAULT": FAULT_KINDS.index("cast_loc"),
        },
        1,  # sums over one warp need no shared memory
        COLUMNS * STEPS,
    )


def launch(
    launcher: Launcher,
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
    """`portakv.kernels.reference.rows.build_read`, whose docstring is the contract."""
    structure = fmt.structure
    # Pages are rows of every `step`-th slot.
    step, structure = (fmt.page_size, Structure.ROWS) if structure is Structure.PAGES else (1, structure)
    lengths = (rows, seq_lens, rows if extra_lens is None else extra_lens, rows if query_lens is None else query_lens)
    outs = (out, lens if indptr is None else indptr, lens, starts)
    if len({x.dtype for x in lengths}) > 1 or len({x.dtype for x in outs}) > 1:
        raise TypeError(f"rows, out: expected one dtype each, got {[x.dtype for x in (*lengths, *outs)]}")
    batch, (num_requests, width) = rows.shape[0], table.shape
    lines, places = lens.shape[0], out.shape[-1]
    longest = min(width, places) if structure is Structure.RAGGED else places
    kernel = launcher.find("build_read", table, None, rows.dtype, table.dtype, out.dtype, structure=structure)
    kernel(
        (lines + 1, max(1, -(-longest // kernel.rows)), 1),
        # What is absent is not read: its flag or its number of entries is 0.
        (table if mapping is None else mapping, table, *lengths, *outs, faults),
        (
            *(int(mapping is not None), int(fmt.prefix_only)),
            *(batch, 0 if extra_lens is None else batch, 0 if query_lens is None else batch),
            *(num_requests, width, lines, places, num_slots, fmt.page_size, step, fmt.pad),
            width + 1 if fmt.window is None else min(fmt.window, width + 1),
            *(table.stride(0), *(x.stride(0) for x in lengths), out.stride(0)),
        ),
    )


@triton.jit
def read_length(lengths, stride, sequence, live, other, width):
    """A length as int64 in [0, width + 1]; `other` where it is not live."""
    length = tl.load(lengths + sequence * stride, mask=live, other=0).to(tl.int64)
    return tl.where(live, tl.minimum(tl.maximum(length, 0), width + 1), other)


@triton.jit
def read_queries(query_lens, stride, sequence, batch, num_queries, width):
    queries = read_length(query_lens, stride, sequence, sequence < num_queries, 1, width)
    return tl.where(sequence < batch, tl.minimum(queries, width), 0)


@triton.jit
def read_sequence(
    rows,
    seq_lens,
    extra_lens,
    query_lens,
    sequence,
    batch,
    num_requests,
    width,
    num_extra,
    num_queries,
    rows_stride,
    seq_stride,
    extra_stride,
    query_stride,
):
    """Row, end and queries of one or more sequences, and whether they count as a fault; empty past the batch."""
    live = sequence < batch
    row = tl.load(rows + sequence * rows_stride, mask=live, other=0).to(tl.int64)
    end = read_length(seq_lens, seq_stride, sequence, live, 0, width)
    end += read_length(extra_lens, extra_stride, sequence, sequence < num_extra, 0, width)
    queries = read_queries(query_lens, query_stride, sequence, batch, num_queries, width)
    known = live & (row >= 0) & (row < num_requests)
    faulty = live & ((end > width) | (row < 0) | (row >= num_requests))
    end = tl.where(known, tl.minimum(end, width), 0)
    return tl.where(known, row, 0), end, queries, faulty


@triton.jit
def kernel(
    mapping,
    table,
    rows,
    seq_lens,
    extra_lens,
    query_lens,
    out,
    indptr,
    lens,
    starts,
    faults,
    has_mapping,
    prefix_only,
    batch,
    num_extra,
    num_queries,
    num_requests,
    width,
    num_lines,
    num_places,
    num_slots,
    reserved,
    step,
    pad,
    window,
    table_stride,
    rows_stride,
    seq_stride,
    extra_stride,
    query_stride,
    out_stride,
    RAGGED: tl.constexpr,
    PER_QUERY: tl.constexpr,
    SEQUENCES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    FAULT: tl.constexpr,
    CAST_FAULT: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    # The line past the last one has nothing to name; its first program counts the faults of whole sequences.
    num_judged = tl.where((line == num_lines) & (split == 0), batch, 0)
    sequence = line
    before = line * 0
    total = line * 0
    if PER_QUERY:
        sequence = line * 0
        for low in range(0, batch, SEQUENCES):
            block = low + tl.arange(0, SEQUENCES).to(tl.int64)
            queries = read_queries(query_lens, query_stride, block, batch, num_queries, width)
            ends = total + tl.cumsum(queries, 0)
            count_faults(faults + FAULT, (ends > num_lines) & (queries > 0) & (block < num_judged))
            passed = (ends <= line) & (block < batch)
            sequence += tl.sum(passed.to(tl.int64), 0)
            before += tl.sum(tl.where(passed, queries, 0), 0)
            total += tl.sum(queries, 0)
    for low in range(0, batch if RAGGED else num_judged, SEQUENCES):
        block = low + tl.arange(0, SEQUENCES).to(tl.int64)
        _, end, queries, faulty = read_sequence(
            rows,
            seq_lens,
            extra_lens,
            query_lens,
            block,
            batch,
            num_requests,
            width,
            num_extra,
            num_queries,
            rows_stride,
            seq_stride,
            extra_stride,
            query_stride,
        )
        count_faults(faults + FAULT, faulty & (block < num_judged))
        if RAGGED:
            first = end - queries
            stop = end - prefix_only * queries
            count = tl.maximum(stop - tl.maximum(first - window + 1, 0), 0)
            before += tl.sum(tl.where(block < line, count, 0), 0)
            total += tl.sum(count, 0)

    row, end, queries, _ = read_sequence(
        rows,
        seq_lens,
        extra_lens,
        query_lens,
        sequence,
        batch,
        num_requests,
        width,
        num_extra,
        num_queries,
        rows_stride,
        seq_stride,
        extra_stride,
        query_stride,
    )
    query = end - queries
    stop = end - prefix_only * queries
    if PER_QUERY:
        query += line - before
        stop = tl.minimum(query + 1, stop)
    start = tl.maximum(query - window + 1, 0)
    stop = tl.where((line < num_lines) & (sequence < batch), stop, start)
    some = start < stop
    at = line * out_stride
    room = num_places
    if not (RAGGED or PER_QUERY):
        room *= step
        if step != 1:
            start = start // step * step
    count = tl.where(some, stop - start, 0)
    if RAGGED:
        at = tl.minimum(before, num_places)
        room = num_places - at
    named = tl.minimum(count, room)
    start = tl.where(named > 0, start, 0)
    writes = (line < num_lines) & (split == 0)
    tl.atomic_add(faults + FAULT, tl.full((), 1, tl.int64), mask=writes & (named < count), sem="relaxed")
    tl.store(lens + line, named, mask=writes)
    tl.store(starts + line, start, mask=writes)

    entries = named
    if RAGGED:
        tl.store(indptr + line, at, mask=split == 0)
        places = entries
    else:
        if not PER_QUERY and step != 1:
            entries = (named + step - 1) // step
        places = tl.where(line < num_lines, num_places, 0)
    slots = pointers(table, row * table_stride + start)
    for low in range(split * SPAN, tl.minimum(split * SPAN + SPAN, places), COLUMNS):
        column = low + tl.arange(0, COLUMNS).to(tl.int64)
        live = column < entries
        place = column if RAGGED or PER_QUERY else column * step
        slot = tl.load(pointers(slots, place), mask=live, other=0).to(tl.int64)
        lost = slot >= num_slots
        named_here = (slot > 0) & (slot < num_slots)
        held = named_here & (slot >= reserved)
        if has_mapping != 0:
            slot = tl.load(pointers(mapping, slot), mask=named_here, other=0)
            lost = lost | (held & (slot <= 0))
            named_here = named_here & (slot > 0)
        if not (RAGGED or PER_QUERY) and step != 1:
            page = slot // step
            askew = named_here & (page > 0) & (page * step != slot)
            lost = lost | askew
            named_here = named_here & (askew == 0)
            slot = page
        count_faults(faults + FAULT, lost)
        if out.dtype.element_ty == tl.int32:
            unfit = named_here & (slot.to(tl.int32).to(tl.int64) != slot)
            count_faults(faults + CAST_FAULT, unfit)
            named_here = named_here & (unfit == 0)
        tl.store(out + at + column, tl.where(named_here, slot, pad), mask=column < places)
    if RAGGED:
        # Every program resets its part of the tail.
        tail = tl.minimum(total, num_places)
        parts = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
        part = (num_places - tail + parts - 1) // parts
        tail += (line * tl.num_programs(1) + split) * part
        for low in range(tail, tl.minimum(tail + part, num_places), COLUMNS):
            column = low + tl.arange(0, COLUMNS).to(tl.int64)
            padding = tl.full((COLUMNS,), 0, tl.int64) + pad
            tl.store(out + column, padding, mask=(column < tail + part) & (column < num_places))
