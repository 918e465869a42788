"""What `build_read` means: the reference against a definition in Python, one sequence and one key at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from portakv import check, dispatch, testing
from portakv.formats import FAULT_KINDS, ReadFormat, Structure
from portakv.kernels.reference import rows as reference

Tensor = torch.Tensor

BUILD_READ = reference.build_read


def define(mapping, table, rows, seq_lens, extra_lens, query_lens, out, indptr, lens, starts, faults, num_slots, fmt):
    """The op, slowly."""
    num_requests, width = table.shape
    paged, ragged = fmt.structure is Structure.PAGES, fmt.structure is Structure.RAGGED
    per_query = fmt.structure is Structure.QUERY_ROWS
    step = fmt.page_size if paged else 1
    narrow = out.dtype == torch.int32
    count = dict.fromkeys(FAULT_KINDS, 0)
    wanted: list[tuple[int, int, int]] = []  # request, first position, end: one for each line of the output
    for b in range(len(rows)):
        end = max(int(seq_lens[b]), 0) + (0 if extra_lens is None else max(int(extra_lens[b]), 0))
        queries = 1 if query_lens is None else min(max(int(query_lens[b]), 0), width)
        request = int(rows[b])
        if not 0 <= request < num_requests:
            count["build_read"] += 1
            request, end = 0, 0
        if end > width:
            count["build_read"] += 1
            end = width
        first = end - queries
        last = first if fmt.prefix_only else end
        if per_query:
            count["build_read"] += len(wanted) + queries > len(lens) and queries > 0
        for p in range(first, end) if per_query else [first]:
            begin = 0 if fmt.window is None else max(0, p - fmt.window + 1)
            wanted.append((request, begin, min(p + 1, last) if per_query else last))

    def read(request: int, position: int) -> int:
        slot = int(table[request, position])
        if slot >= num_slots:
            count["build_read"] += 1
            return fmt.pad
        if slot <= 0:
            return fmt.pad
        held = slot >= fmt.page_size
        if mapping is not None:
            slot = int(mapping[slot])
        if slot <= 0:
            count["build_read"] += held
            return fmt.pad
        if slot >= step and slot % step:
            count["build_read"] += 1
            return fmt.pad
        slot //= step
        if narrow and slot >= 2**31:
            count["cast_loc"] += 1
            return fmt.pad
        return slot

    for x, value in ((out, fmt.pad), (lens, 0), (starts, 0)):
        x.fill_(value)
    at = 0
    for line in range(len(lens)):
        if ragged:
            indptr[line] = at
        if line >= len(wanted):
            continue
        request, begin, end = wanted[line]
        if begin >= end:
            continue
        begin = begin // step * step
        room = len(out) - at if ragged else out.shape[1] * step
        if end - begin > room:
            count["build_read"] += 1
            end = begin + room
        entries = [read(request, position) for position in range(begin, end, step)]
        target = out[at:] if ragged else out[line]
        target[: len(entries)] = torch.tensor(entries, dtype=out.dtype)
        at += len(entries)
        lens[line] = end - begin
        starts[line] = begin if end > begin else 0
    if ragged:
        indptr[len(lens)] = at
    for i, kind in enumerate(FAULT_KINDS):
        faults[i] += count[kind]


def test_reference_is_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "build_read", define)
    seen = torch.zeros(len(FAULT_KINDS), dtype=torch.int64)

    def kernel(*args):
        BUILD_READ(*args)
        seen.add_(args[10])

    for case in testing.cases("build_read"):
        testing.check("build_read", kernel, case, torch.device("cpu"))
    assert seen[FAULT_KINDS.index("build_read")] > 100
    assert seen[FAULT_KINDS.index("cast_loc")] > 10


def build(
    structure: Structure,
    lens: list[int],
    *,
    shape: tuple[int, ...],
    queries: list[int] | None = None,
    extra: list[int] | None = None,
    window: int | None = None,
    page_size: int = 1,
    pad: int = -1,
    prefix_only: bool = False,
    mapping: Tensor | None = None,
    lines: int | None = None,
) -> tuple[list, list[int], list[int], list[int], Tensor]:
    """Over a table whose row r holds slots 100 r + 16 and on: out, indptr, lens, starts and the faults."""
    batch = len(lens)
    table = 100 * torch.arange(batch)[:, None] + torch.arange(16, 16 + 32)
    n = batch if lines is None else lines
    out, indptr, got, starts = (torch.full(s, 77, dtype=torch.int32) for s in (shape, (n + 1,), (n,), (n,)))
    faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    extra_lens, query_lens = (None if x is None else torch.tensor(x) for x in (extra, queries))
    fmt = ReadFormat(structure, window, page_size, pad, prefix_only)
    reference.build_read(
        *(mapping, table, torch.arange(batch), torch.tensor(lens, dtype=torch.int64), extra_lens, query_lens),
        *(out, indptr if structure is Structure.RAGGED else None, got, starts, faults, 1000, fmt),
    )
    return out.tolist(), indptr.tolist(), got.tolist(), starts.tolist(), faults


def test_ragged_decode_in_a_window() -> None:
    out, indptr, lens, starts, faults = build(Structure.RAGGED, [3, 0, 6], shape=(10,), window=4, lines=4)
    assert out == [16, 17, 18, 218, 219, 220, 221, -1, -1, -1]
    assert indptr == [0, 3, 3, 7, 7]
    assert lens == [3, 0, 4, 0]
    assert starts == [0, 0, 2, 0]
    assert not faults.any()


def test_the_window_counts_from_the_smallest_query() -> None:
    out, _, lens, starts, _ = build(Structure.ROWS, [8], extra=[2], queries=[3], window=4, shape=(1, 8))
    assert (lens, starts) == ([6], [4])
    assert out == [[20, 21, 22, 23, 24, 25, -1, -1]]


def test_prefix_only_leaves_the_queries_out() -> None:
    out, _, lens, starts, _ = build(Structure.ROWS, [8], queries=[3], window=4, shape=(1, 4), prefix_only=True)
    assert (lens, starts) == ([3], [2])
    assert out == [[18, 19, 20, -1]]


def test_pages_begin_at_a_page_and_end_in_one() -> None:
    out, _, lens, starts, _ = build(Structure.PAGES, [10, 8], window=4, page_size=4, shape=(2, 3))
    assert (lens, starts) == ([6, 4], [4, 4])
    assert out == [[5, 6, -1], [30, -1, -1]]


def test_a_row_for_each_query() -> None:
    out, _, lens, starts, _ = build(Structure.QUERY_ROWS, [4, 2], queries=[2, 3], window=3, shape=(6, 4), lines=6)
    assert out[:2] == [[16, 17, 18, -1], [17, 18, 19, -1]]
    assert out[2:] == [[-1] * 4, [116, -1, -1, -1], [116, 117, -1, -1], [-1] * 4]
    assert (lens, starts) == ([3, 3, 0, 1, 2, 0], [0, 1, 0, 0, 0, 0])


def test_a_token_without_a_peer_is_padding_before_any_division() -> None:
    mapping = torch.zeros(1001, dtype=torch.int64)
    mapping[20:24] = torch.arange(8, 12)
    for pad in (0, -1):
        out, *_ = build(Structure.PAGES, [8], page_size=4, shape=(1, 2), mapping=mapping, pad=pad)
        assert out == [[pad, 2]]


def test_what_does_not_fit_is_cut_and_counted() -> None:
    out, indptr, lens, _, faults = build(Structure.RAGGED, [3, 3, 2], shape=(4,))
    assert (out, indptr, lens) == ([16, 17, 18, 116], [0, 3, 4, 4], [3, 1, 0])
    assert faults[FAULT_KINDS.index("build_read")] == 2
    out, _, lens, _, faults = build(Structure.ROWS, [40], shape=(1, 2), window=3)
    assert (out, lens) == ([[45, 46]], [2])  # of the table's 32 positions, the last three
    assert faults[FAULT_KINDS.index("build_read")] == 2


def test_what_is_measured_is_what_is_named() -> None:
    """`build_read` cuts nothing in buffers of the measured shapes, and leaves no column, element or row unused."""
    seen = 0
    for *lengths, num_rows, max_len, max_query_len, multiple, formats in list(check.batches())[::5]:
        measured = reference.measure_read(*lengths, num_rows, max_len, max_query_len, multiple, formats)
        if measured is None:
            continue
        size, shapes = measured
        rows, _, _, query_lens = lengths
        assert size == len(rows)
        table = torch.ones((num_rows, max_len), dtype=torch.int64)
        for fmt, shape in zip(formats, shapes, strict=True):
            ragged, per_query = fmt.structure is Structure.RAGGED, fmt.structure is Structure.QUERY_ROWS
            n = size if ragged else shape[0]
            out, indptr, lens, starts = (torch.zeros(s, dtype=torch.int64) for s in (shape, n + 1, n, n))
            faults = testing.faults().tensor
            reference.build_read(
                None, table, *lengths, out, indptr if ragged else None, lens, starts, faults, 1000, fmt
            )
            assert not faults.any()
            step = fmt.page_size if fmt.structure is Structure.PAGES else 1
            named = [-(-x // step) for x in lens.tolist()]
            most = max(named, default=0)
            if ragged:
                assert shape == (sum(named),)
            elif not per_query:
                assert shape == (size, most)
            else:
                assert n == (size if query_lens is None else query_lens.sum())
                assert shape[1] % multiple == 0
                assert fmt.prefix_only or shape[1] - most in range(multiple)
            seen += bool(most)
    assert seen > 500


def test_a_batch_out_of_order_is_not_measured() -> None:
    """Each of what the contract names, by one number that is one too many or one of a kind it is not."""
    good = {"rows": [2, 0], "seq_lens": [4, 3], "extra_lens": [1, 0], "query_lens": [2, 3]}
    bounds = (3, 5, 4, 1, (ReadFormat(Structure.ROWS),))

    def measured(measure, **changes):
        given = {name: torch.tensor(x) for name, x in good.items()} | changes
        return measure(*given.values(), *bounds)

    found = dispatch.facts("cpu")
    for row in dispatch.rows("measure_read", found.device):
        measure = dispatch.load(
            "measure_read", dispatch.select("measure_read", found, dispatch.Request(wanted=row.name))
        )
        assert measured(measure) == (2, [(2, 5)])
        for name, value in (
            *(("rows", [3, 0]), ("rows", [-1, 0]), ("seq_lens", [5, 3]), ("seq_lens", [4, -1])),
            *(("extra_lens", [2, 0]), ("extra_lens", [-1, 0]), ("extra_lens", [1, 2**63 - 1])),
            *(("query_lens", [5, 3]), ("query_lens", [2, 4]), ("query_lens", [2, -1]), ("seq_lens", [-(2**63), 3])),
        ):
            assert measured(measure, **{name: torch.tensor(value)}) is None, (row.name, name, value)
        for name, values in good.items():
            x = torch.tensor(values)
            for wrong in (x.int(), x.short(), x.double(), x[:1], x[:, None], x.to("meta"), values, 1):
                assert measured(measure, **{name: wrong}) is None, (row.name, name, wrong)
        for name in ("rows", "seq_lens"):
            assert measured(measure, **{name: None}) is None
        for wrong in (lambda x: x[None], lambda x: x[0], lambda x: x.short(), lambda x: x.to("meta")):
            every = {name: wrong(torch.tensor(values)) for name, values in good.items()}
            assert measured(measure, **every) is None, (row.name, every)


@pytest.mark.parametrize("row", ["native", "reference"])
def test_tables_past_2_31(row: str, tmp_path: Path) -> None:
    """Row 3 of a table whose row stride is 2**31 elements lies past 2**34 bytes, in a sparse file."""
    chosen = dispatch.select("build_read", dispatch.facts("cpu"), dispatch.Request(wanted=row))
    stride = 2**31
    storage = torch.from_file(str(tmp_path / "table"), shared=True, size=3 * stride + 4, dtype=torch.int32)
    storage[-4:] = torch.tensor([5, 6, 7, 8])
    table = storage.as_strided((4, 4), (stride, 1))
    out, lens, starts = torch.zeros(1, 5, dtype=torch.int32), *torch.zeros(2, 1, dtype=torch.int32)
    dispatch.load("build_read", chosen)(
        *(None, table, torch.tensor([3]), torch.tensor([4]), None, None, out, None, lens, starts),
        *(testing.faults().tensor, 9, ReadFormat(Structure.ROWS, window=3)),
    )
    assert (out.tolist(), lens.tolist(), starts.tolist()) == ([[6, 7, 8, 0, 0]], [3], [1])
