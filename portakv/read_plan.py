"""What a forward reads: ReadPlan, made once per forward for the full side and each window."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from portakv import device as devices
from portakv import dispatch
from portakv.allocator import HybridSlotAllocator
from portakv.arguments import (
    Bools,
    Ints,
    as_int,
    as_layer,
    last_offset,
    require,
    require_bool,
    require_plain,
    require_slots,
    tracing,
)
from portakv.consumers import PAGES, QUERY_ROWS, RAGGED, ROWS, ReadStyle, check_offsets, read_style
from portakv.errors import SlotFault, SlotOwnership
from portakv.formats import INDEX_DTYPES, ReadFormat, Structure
from portakv.groups import Layer
from portakv.kernels import SlotOps
from portakv.layers import LayerSpec

Tensor = torch.Tensor
Lengths = Tensor | int | None
Choice = tuple[str | ReadStyle | None, Structure | str | None, torch.dtype | None, int | None]
"""A consumer (None: flashattention, or as `out` has it), and what replaces its structure, index_dtype and pad."""

Shapes = list[tuple[int, ...]]
_Bounds = tuple[int, int, int, tuple[ReadFormat, ...]]
_Measure = Callable[..., tuple[int, Shapes] | None]
"""`measure_read` of `portakv.kernels.reference.rows`, whose docstring is the contract."""

LARGE_PLAN = 1 << 24
"""Indices up to which nobody asks whether memory holds them, which takes half a millisecond."""

Key = tuple[str, int | None]
"""(side, window): layers of one key read the same indices."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadIndices:
    """What the layers of one side and window read, on the pool's device; every tensor is of one index dtype.

    `indices` holds slots or page ids of `side`, "full" or "swa": `[N]` for RAGGED, where sequence b has
    `indices[indptr[b]:indptr[b + 1]]`, else a row per sequence (QUERY_ROWS: per query token), left-aligned. A window
    is clipped as the smallest query position of the sequence needs: whoever has several queries, or PAGES, still masks
    by position. `lens[b]` is the number of keys named, `starts[b]` the position of the first: column c of row b is the
    key at `starts[b] + c` (PAGES: the page from `starts[b] + c * page_size`). Positions may be counted from `starts`:
    the last key is the last query's. Rows of a graph's buffers past its batch have length 0, and all that is
    unused is `pad`.
    """

    structure: Structure
    side: str
    window: int | None
    indices: Tensor
    indptr: Tensor | None
    lens: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """What each layer of one forward reads; from `pool.plan_read`, or at fixed addresses from `pool.graph_read_plan`.

    A snapshot, as KVWriteLoc is. `structures` has one entry per side and window that the pool's layers have.
    """

    style: ReadStyle
    structures: tuple[ReadIndices, ...]
    _planner: ReadPlanner

    def for_layer(self, layer_id: int) -> ReadIndices:
        """The structure that a layer reads; one that aliases another has its own window. Raises `ValueError`."""
        at = self._planner.at
        return self.structures[
            at[layer_id if type(layer_id) is int and layer_id in at else as_layer(layer_id, len(at))]
        ]


class ReadPlanner:
    """Makes the read plans of one pool, whose layer i is `layers[i]` and reads what is stored as `stored[i]`."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        stored: Mapping[int, Layer],
        mapping: Tensor,
        faults: Tensor,
        kind: devices.Device,
        kernels: tuple[SlotOps, SlotOps],
        allocator: HybridSlotAllocator,
    ) -> None:
        self._allocator, self._kind = allocator, kind
        keys = [("swa" if stored[i].on_swa else "full", spec.window) for i, spec in enumerate(layers)]
        self.keys = tuple(dict.fromkeys(keys))
        self.at = {i: self.keys.index(key) for i, key in enumerate(keys)}
        self._caches = tuple(cache for layer in stored.values() for cache in layer.readable)
        self._reach, self._page_size = max(map(last_offset, self._caches)), stored[0].fmt.page_size
        self._mapping, self._faults, self._device, self._kernels = mapping, faults, faults.device, kernels
        self._num_slots = mapping.shape[0] - 1
        self._measure: _Measure = dispatch.load("measure_read", dispatch.select_host()["measure_read"])
        # `torch.empty` takes twice as long to read its arguments.
        self._like = {dtype: faults.new_empty(0, dtype=dtype) for dtype in INDEX_DTYPES}
        self._in_place = [{(dtype, self._device)} for dtype in INDEX_DTYPES]

    def plan(
        self,
        table: Tensor,
        columns: dict[str, Lengths],
        choice: Choice,
        prefix_only: bool,
        max_len: int | None,
        max_query_len: int | None,
        out: ReadPlan | None,
        check: bool,
    ) -> ReadPlan:
        """The body of `pool.plan_read`; `columns` are the lengths by name, in the order of the op's arguments."""
        require_bool("prefix_only", prefix_only)
        if out is not None and not isinstance(out, ReadPlan):
            raise TypeError(f"out: expected a ReadPlan, got {type(out).__name__}")
        if out is not None and out._planner is not self:
            raise ValueError("out: expected a plan of this pool, got one of another pool")
        style, formats = self._choose(choice, prefix_only, out)
        if out is None:
            self._check_style(style)
        elif style is not out.style and style != out.style:
            raise ValueError(f"out: expected a plan of {style}, got one of {out.style}")
        require_slots("req_to_token", table, None)
        if table.dim() != 2 or (table.shape[1] > 1 and table.stride(1) != 1):
            got = f"shape {tuple(table.shape)} with strides {table.stride()}"
            raise ValueError(f"req_to_token: expected [requests, positions] with a dense last axis, got {got}")
        if table.device != self._device:
            raise ValueError(f"req_to_token: expected a tensor on {self._device}, got {table.device}")
        max_len = table.shape[1] if max_len is None else min(as_int("max_len", max_len, 0, None), table.shape[1])
        for name in ("extra_lens", "query_lens"):
            if (given := columns[name]) is not None and not isinstance(given, Tensor):
                columns[name] = as_int(name, given, -(2**63))
        if columns["query_lens"] is None:
            columns["query_lens"] = columns["extra_lens"]
        if max_query_len is None:
            given = columns["query_lens"]
            max_query_len = 1 if given is None else max(given, 0) if isinstance(given, int) else max_len
        else:
            max_query_len = as_int("max_query_len", max_query_len, 0, None)
        bounds = (max_len, min(max_query_len, max_len), style.column_multiple, formats)
        on_device: Sequence[Lengths] = tuple(columns.values())
        measured, known = None, None
        # On a CPU a batch in order is what the kernel takes: no more to do than to measure it.
        if not check and devices.shares_host_memory(self._device) and not is_dynamo_compiling():
            measured = self._measure(*on_device, table.shape[0], *bounds)
        if measured is None:
            size, on_device, measured, known = self._batch(table, columns, max_query_len, check, bounds)
        if measured is None:
            shapes = _bound(size, max_len, max_query_len, style.column_multiple, formats)
        else:
            size, shapes = measured
        if out is not None:
            _check_room(out, size, shapes, measured is not None)
        if check and known is not None:
            self._check_slots(table, known, formats)
        plan = self._new_plan(style, formats, shapes, size, max_len, bounds[1]) if out is None else out
        if size == 0 and out is None:  # an idle rank launches nothing
            for read in plan.structures:
                if read.indptr is not None:
                    read.indptr.zero_()
            return plan
        if not (devices.shares_host_memory(self._device) or tracing()):  # rows of its kernels do not look
            for name, x in {"req_to_token": table, **columns}.items():
                if isinstance(x, Tensor):
                    require_plain(name, x)
        build_read, faults, num_slots = self._kernels[tracing()]["build_read"], self._faults, self._num_slots
        try:
            for read, fmt in zip(plan.structures, formats, strict=True):
                mapping = self._mapping if read.side == "swa" else None
                results = (read.indices, read.indptr, read.lens, read.starts)
                build_read(mapping, table, *on_device, *results, faults, num_slots, fmt)
        except (TypeError, ValueError):
            require_plain("req_to_token", table)  # by this call's name for it
            raise
        return plan

    @torch.inference_mode(False)  # as the pool's own tensors: filled in any mode
    def graph_plan(self, choice: Choice, max_reqs: int, max_len: int, max_query_len: int) -> ReadPlan:
        """The body of `pool.graph_read_plan`."""
        style, formats = self._choose(choice, prefix_only=False)
        self._check_style(style)
        given = {"max_reqs": max_reqs, "max_len": max_len, "max_query_len": max_query_len}
        max_reqs, max_len, max_query_len = (as_int(name, value) for name, value in given.items())
        shapes = _bound(max_reqs, max_len, max_query_len, style.column_multiple, formats)
        plan = self._new_plan(style, formats, shapes, max_reqs, max_len, max_query_len)
        for read in plan.structures:
            read.indices.fill_(style.pad)
            for lengths in (read.indptr, read.lens, read.starts):
                if lengths is not None:
                    lengths.zero_()
        return plan

    def _choose(
        self, choice: Choice, prefix_only: bool, out: ReadPlan | None = None
    ) -> tuple[ReadStyle, tuple[ReadFormat, ...]]:
        """The style that a choice comes to, and what the structures of each key then name."""
        if choice[0] is None:
            choice = ("flashattention" if out is None else out.style, *choice[1:])
        if not is_dynamo_compiling():
            try:
                return _style_of(*choice, prefix_only, self.keys, self._page_size)
            except TypeError:  # what has no hash is refused, in words, below
                pass
        return _style_of.__wrapped__(*choice, prefix_only, self.keys, self._page_size)

    def _new_plan(
        self,
        style: ReadStyle,
        formats: Sequence[ReadFormat],
        shapes: Sequence[tuple[int, ...]],
        size: int,
        max_len: int,
        max_query_len: int,
    ) -> ReadPlan:
        """Buffers of `shapes`. Raises `OutOfMemory`."""
        # No structure has more lines than queries, nor, before they are rounded up, more columns than keys.
        most = size * (max_query_len or 1) * (max_len + style.column_multiple)
        if most <= LARGE_PLAN or sum(map(math.prod, shapes)) <= LARGE_PLAN:
            try:
                return self._allocate(style, formats, shapes, size)
            except torch.OutOfMemoryError:  # said with its numbers below, unless there is room by then
                pass
        count = 0
        for fmt, shape in zip(formats, shapes, strict=True):
            ragged = fmt.structure is RAGGED
            if ragged and style.index_dtype is torch.int32 and shape[0] > torch.iinfo(torch.int32).max:
                raise ValueError(f"index_dtype: expected torch.int64 for {shape[0]} indices, got {style.index_dtype}")
            count += math.prod(shape) + (3 * size + 1 if ragged else 2 * shape[0])
        if is_dynamo_compiling():
            return self._allocate(style, formats, shapes, size)
        needs = {self._device: count * style.index_dtype.itemsize}
        return devices.allocate(lambda: self._allocate(style, formats, shapes, size), needs)

    def _allocate(
        self, style: ReadStyle, formats: Sequence[ReadFormat], shapes: Sequence[tuple[int, ...]], size: int
    ) -> ReadPlan:
        like, structures = self._like[style.index_dtype], []
        for (side, window), fmt, shape in zip(self.keys, formats, shapes, strict=True):
            rows, indptr = shape[0], None
            if fmt.structure is RAGGED:
                rows, indptr = size, like.new_empty(size + 1)
            lengths = (indptr, like.new_empty(rows), like.new_empty(rows))
            structures.append(ReadIndices(fmt.structure, side, window, like.new_empty(shape), *lengths))
        return ReadPlan(style, tuple(structures), self)

    def _check_style(self, style: ReadStyle) -> None:
        page = self._page_size
        if style.page_divides is not None and style.page_divides % page:
            raise ValueError(f"consumer: expected a page size that divides {style.page_divides}, the pool's is {page}")
        if self._reach >> (style.offset_bits - 1):
            for cache in self._caches:
                check_offsets(style, cache)

    def _batch(
        self, table: Tensor, columns: dict[str, Lengths], max_query_len: int, check: bool, bounds: _Bounds
    ) -> tuple[int, list[Tensor | None], tuple[int, Shapes] | None, dict[str, Ints]]:
        """The number of requests, the columns as the op takes them, what `measure_read` finds, None unless all lengths
        are known on the host, and what is. Raises for what is wrong in shape, dtype or device, or is known to be."""
        size = self._check_columns(columns)
        on_host = {name: devices.shares_host_memory(x.device) for name, x in columns.items() if isinstance(x, Tensor)}
        if is_dynamo_compiling() and any(on_host.values()):
            reason = "plan_read looks at lengths that are on the host: plan outside of what is compiled"
            torch._dynamo.graph_break(msg=reason)
        known: dict[str, Ints] = {}
        for name, x in columns.items():
            if isinstance(x, int):
                known[name] = np.full(size, x)
            elif x is not None and (on_host[name] or check):
                require_plain(name, x)
                known[name] = (x if on_host[name] else x.cpu()).numpy().astype(np.int64, copy=False)
        measured, num_rows = None, table.shape[0]
        complete = all(x is None or name in known for name, x in columns.items() if name != "req_rows")
        if complete:
            # Rows that are not known stay unseen: they add nothing to a size.
            given = {"req_rows": np.zeros(size, np.int64)} | known
            tensors = (torch.from_numpy(given[name]) if name in given else None for name in columns)
            measured = self._measure(*tensors, num_rows if "req_rows" in known else 1, *bounds)
        if measured is None:
            _check_values(known, complete, num_rows, bounds[0], max_query_len)
        return size, self._place(columns, known, size), measured, known

    def _check_slots(self, table: Tensor, known: Mapping[str, Ints], formats: Sequence[ReadFormat]) -> None:
        """Raise for a slot that the plan would name and that is past the last one, free, without SWA bytes, or in
        another place of its page than its position; PAD, the reserved page and negative slots are padding."""
        require_plain("req_to_token", table)
        rows, end = known["req_rows"], known["seq_lens"] + known.get("extra_lens", 0)
        first = end - known.get("query_lens", 1)
        taken = table[torch.from_numpy(rows).to(table.device), : int(end.max(initial=0))].cpu().numpy()
        position, page = np.arange(taken.shape[1]), self._page_size

        def refuse(bad: Bools, error: type[Exception], side: str, expected: str) -> None:
            if bad.any():
                b, p = np.unravel_index(int(bad.argmax()), bad.shape)
                where = f"req_to_token[{rows[b]}, {p}] (request {b}, {side} side)"
                raise error(f"{where}: expected {expected}, got {taken[b, p]}")

        refuse(
            (taken >= self._num_slots) & (position < end[:, None]), SlotFault, "full", f"a slot below {self._num_slots}"
        )
        real, slots = taken >= page, taken.ravel()
        held, live = (ask(slots).reshape(taken.shape) for ask in (self._allocator.is_owned, self._allocator.is_live))
        for (side, window), fmt in zip(self.keys, formats, strict=True):
            begin = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0)
            stop = first if fmt.prefix_only else end
            named = real & (position >= begin[:, None]) & (position < stop[:, None])
            refuse(named & ~held, SlotOwnership, side, "a slot that is handed out")
            if side == "swa":
                refuse(named & ~live, SlotOwnership, side, f"a slot with live SWA bytes inside a window of {window}")
            if fmt.structure is PAGES:
                begins = taken[:, position // page * page]
                askew = (begins % page != 0) | (taken != begins + position % page)
                refuse(named & askew, ValueError, side, f"slots that lie in pages of {page} as their positions do")

    def _place(self, columns: dict[str, Lengths], known: dict[str, Ints], size: int) -> list[Tensor | None]:
        """The columns as tensors of one dtype on the device; what comes from the host comes in one copy."""
        kinds = {(x.dtype, x.device) if isinstance(x, Tensor) else None for x in columns.values() if x is not None}
        if kinds in self._in_place:
            return list(columns.values())  # type: ignore[arg-type]  # no int is among them
        tensors = {name: x for name, x in columns.items() if isinstance(x, Tensor)}
        there = {name: x for name, x in tensors.items() if x.device == self._device}
        dtypes = {x.dtype for x in there.values()}
        on_cpu = devices.shares_host_memory(self._device)
        if len(dtypes) > 1:
            if not on_cpu:
                got = {name: str(x.dtype) for name, x in there.items()}
                raise TypeError(f"req_rows: expected one dtype of all tensors on {self._device}, got {got}")
            there = {}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.int64
        if away := [name for name in tensors if name not in there]:
            if devices.is_capturing(self._device):
                # A replay would read the host's buffer again, whatever it holds by then.
                raise ValueError(f"{away[0]}: expected a tensor on {self._device} while a graph is captured")
            # What does not fit is more than a table can have, which the kernel cuts and counts.
            most = torch.iinfo(dtype).max
            packed = torch.from_numpy(np.stack([known[name] for name in away]).clip(max=most)).to(dtype)
            there |= dict(zip(away, packed if on_cpu else self._kind.upload(packed, self._device), strict=True))
        for name, x in columns.items():
            if isinstance(x, int):
                there[name] = torch.full((size,), min(x, torch.iinfo(dtype).max), dtype=dtype, device=self._device)
        return [there.get(name) for name in columns]

    def _check_columns(self, columns: dict[str, Lengths]) -> int:
        """Returns the number of requests."""
        size = None
        for name, given in columns.items():
            if name in ("extra_lens", "query_lens") and not isinstance(given, Tensor):
                continue
            x = require_slots(name, given, None)
            size = x.shape[0] if size is None and x.dim() == 1 else size
            if x.shape != (size,):
                raise ValueError(f"{name}: expected shape [{'B' if size is None else size}], got {tuple(x.shape)}")
            if x.device != self._device and not devices.shares_host_memory(x.device):
                raise ValueError(f"{name}: expected a tensor on the host or on {self._device}, got {x.device}")
        assert size is not None
        return size


@functools.lru_cache(maxsize=256, typed=True)
def _style_of(
    consumer: str | ReadStyle | None,
    structure: Structure | str | None,
    index_dtype: torch.dtype | None,
    pad: int | None,
    prefix_only: bool,
    keys: tuple[Key, ...],
    page_size: int,
) -> tuple[ReadStyle, tuple[ReadFormat, ...]]:
    assert consumer is not None
    style = read_style(consumer, structure, index_dtype, pad)
    structures = [(style.full if window is None else style.window, window) for _, window in keys]
    return style, tuple(ReadFormat(*each, page_size, style.pad, prefix_only) for each in structures)


def _check_values(known: dict[str, Ints], complete: bool, num_rows: int, max_len: int, max_query_len: int) -> None:
    """Raise `ValueError` for what is known to be wrong; `complete` if all lengths are known."""
    for name, values in known.items():
        require(values >= 0, name, "at least 0", values)
    if (rows := known.get("req_rows")) is not None:
        require(rows < num_rows, "req_rows", f"a row of req_to_token, below {num_rows}", rows)
    queries = known.get("query_lens")
    if complete:
        end, extra = known["seq_lens"], known.get("extra_lens")
        if extra is None:
            require(end <= max_len, "seq_lens", f"at most {max_len} tokens", end)
        else:
            good = (end <= max_len) & (extra <= max_len)
            end = end + extra  # where this wraps around, a summand is past the end
            require(good & (end <= max_len), "seq_lens + extra_lens", f"at most {max_len} tokens", end)
        if queries is not None:
            require(queries <= end, "query_lens", "at most the sequence's tokens", queries)
    if queries is not None:
        require(queries <= max_query_len, "query_lens", f"at most max_query_len, {max_query_len}", queries)


def _bound(size: int, max_len: int, max_query_len: int, column_multiple: int, formats: Sequence[ReadFormat]) -> Shapes:
    """As `measure_read`, for any `size` sequences of `max_len` tokens at most, `max_query_len` of them queries."""
    shapes: Shapes = []
    for fmt in formats:
        page, reach = fmt.page_size, max_len if fmt.window is None else fmt.window - 1
        span = min(max_len, reach + (0 if fmt.prefix_only else max_query_len))
        if fmt.structure is RAGGED:
            shapes.append((size * span,))
        elif fmt.structure is PAGES:
            # A span that does not begin with a page touches one page more.
            shapes.append((size, min(-(-max_len // page), (span + 2 * (page - 1)) // page)))
        elif fmt.structure is ROWS:
            shapes.append((size, span))
        else:
            columns = min(max_len, reach + 1)
            shapes.append((size * max_query_len, -(-columns // column_multiple) * column_multiple))
    return shapes


def _check_room(out: ReadPlan, size: int, shapes: Sequence[tuple[int, ...]], exact: bool) -> None:
    """Raise `ValueError` if `out` cannot hold `size` sequences, or what their lengths come to if that is known."""
    for read, shape in zip(out.structures, shapes, strict=True):
        rows, room = read.lens.shape[0], tuple(read.indices.shape)
        if read.structure is not QUERY_ROWS and size > rows:
            raise ValueError(f"out: expected room for {size} requests, got {rows}")
        if exact and any(n > most for n, most in zip(shape, room, strict=True)):
            what = f"{read.structure.value} of window {read.window}"
            raise ValueError(f"out: expected room for {what} of shape {shape}, got {room}")
