"""The conformance suite: every row of a device's table against the reference, and captured graphs replayed.

for outcome in check.check_device(torch.device("cuda")):
    print(outcome.op, outcome.row, outcome.result, outcome.detail)
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from portakv import device as devices
from portakv import dispatch, testing
from portakv.buffers import Mismatch
from portakv.device import Device
from portakv.errors import NoKernel
from portakv.formats import INDEX_DTYPES, PAD, SLOT_OPS, KVFormat, ReadFormat, Structure
from portakv.kernels.reference import rows as reference
from portakv.layers import LayerSpec
from portakv.pool import HybridKVPool
from portakv.testing import Case

Tensor = torch.Tensor
Result = Literal["passed", "failed", "unavailable", "definition", "not run"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one row: `cases` of `total` ran, up to the first difference, which `detail` names.

    `detail` is the reason where the row is "unavailable"; "definition" is the reference where its own results are
    the expected ones.
    """

    op: str
    row: str
    result: Result
    detail: str = ""
    cases: int = 0
    total: int = 0


GRAPH_FILLS = {"graph, filled before replay": False, "graph, filled inside": True}


On = Device | torch.device
"""What is checked: the rows of a device on its own tensors, or those of a torch device."""


def _placed(on: On) -> tuple[Device, torch.device]:
    return dispatch.resolve(on) if isinstance(on, Device) else (dispatch.device_of(on), on)


def rows(device: On) -> list[tuple[str, str]]:
    """Every (op, row) of the device and of the host, then every (graph, row) for captured graphs."""
    of, _ = _placed(device)
    ops = [(op, row.name) for op in (*dispatch.OPS, *dispatch.HOST_OPS) for row in dispatch.rows(op, of)]
    return ops + [(graph, row.name) for graph in GRAPH_FILLS for row in dispatch.rows("store_kv", of)]


def check_device(device: On) -> Iterator[Outcome]:
    """The outcome of each of `rows(device)`, in that order. Never raises for what a kernel does."""
    for op, row in rows(device):
        if op in GRAPH_FILLS:
            yield check_graphs(op, row, device)
        else:
            yield check_measure(row) if op == "measure_read" else check_row(op, row, device)


def check_row(op: str, row: str, device: On, cases: Sequence[Case] | None = None, until: float = math.inf) -> Outcome:
    """Run a row on `cases` (default: all of its op), none of which starts after `until` on the monotonic clock."""
    of, at = _placed(device)
    if row == "reference" and devices.shares_host_memory(at):
        return Outcome(op, row, "definition")
    cases = list(testing.cases(op)) if cases is None else cases
    check = partial(testing.check, last_wins=True) if row == "reference" else testing.check
    done = 0
    try:
        found = of.facts(at)
        kernel = dispatch.load(op, dispatch.select(op, found, dispatch.Request(wanted=row)))
        # Formats that the table keeps from the row are skipped.
        cases = [case for case in cases if _serves(op, row, found, case)]
        for case in cases:
            if time.monotonic() > until:
                break
            check(op, kernel, case, at)
            done += 1
    except Exception as e:  # whatever a kernel does is a finding about its row, and the other rows still run
        return _complaint(e, op, row, done, len(cases))
    if cases and done == 0:
        return Outcome(op, row, "not run", "no time was left", 0, len(cases))
    return Outcome(op, row, "passed", "", done, len(cases))


def _serves(op: str, row: str, found: devices.DeviceFacts, case: Case) -> bool:
    try:
        dispatch.select(op, found, dispatch.Request(case.variant.fmt, row))
    except NoKernel:
        return False
    return True


def check_measure(row: str) -> Outcome:
    """Run a row of `measure_read` on `batches()`."""
    op, every, done = "measure_read", list(batches()), 0
    if row == "reference":
        return Outcome(op, row, "definition")
    try:
        found = dispatch.facts("cpu")
        measure: Callable[..., Any] = dispatch.load(op, dispatch.select(op, found, dispatch.Request(wanted=row)))
        for batch in every:
            want, got = reference.measure_read(*batch), measure(*batch)
            if want != got:
                raise Mismatch(f"{batch}: expected {want}, got {got}")
            done += 1
    except Exception as e:
        return _complaint(e, op, row, done, len(every))
    return Outcome(op, row, "passed", "", done, len(every))


def batches() -> Iterator[tuple[Any, ...]]:
    """Arguments of `measure_read`, each for every structure and for windows of all kinds; a third of them out of order
    in one place."""
    rng = random.Random(0)
    formats = tuple(
        ReadFormat(structure, window, page_size, prefix_only=prefix_only)
        for structure in Structure
        for window in (None, 1, 5, 16, 2**63 - 1)
        for page_size in ((1, 4, 48) if structure is Structure.PAGES else (4,))
        for prefix_only in (False, True)
    )
    for i in range(400):
        size, num_rows, max_len = i % 9, rng.randint(1, 3), rng.choice((1, 5, 17, 96, 500))
        tokens = [min(rng.choice((0, 1, 4, 5, 16, 47, 48, rng.randint(0, 500))), max_len) for _ in range(size)]
        extra = [min(rng.choice((0, 1, 5)), max_len - n) for n in tokens]
        with_extra, with_queries = rng.random() < 0.5, rng.random() < 0.6
        ends = [n + more * with_extra for n, more in zip(tokens, extra, strict=True)]
        queries = [rng.choice((0, 1, n, rng.randint(0, n))) if n else 0 for n in ends]
        most = rng.choice((max(queries, default=0), max_len))
        columns = [[rng.randrange(num_rows) for _ in range(size)], tokens, extra, queries]
        dtype = rng.choice(INDEX_DTYPES)
        if size and rng.random() < 0.35:
            column, at, info = rng.choice(columns), rng.randrange(size), torch.iinfo(dtype)
            beyond = num_rows, most + 1, ends[at] + 1, max_len + 1
            column[at] = rng.choice((-1, column[at] + 1, *beyond, info.min, info.max))
        given = [torch.tensor(x, dtype=dtype, device="cpu") for x in columns]
        if rng.random() < 0.1:  # of another dtype, length or rank
            wrong = rng.randrange(4)
            x = given[wrong]
            given[wrong] = rng.choice((x.short(), x.to(INDEX_DTYPES[dtype is INDEX_DTYPES[0]]), x[1:], x[None]))
        elif rng.random() < 0.5:
            given = [x.repeat_interleave(2)[::2] for x in given]
        rows, seq_lens, extra_lens, query_lens = given
        optional = (extra_lens if with_extra else None, query_lens if with_queries else None)
        yield rows, seq_lens, *optional, num_rows, max_len, most, rng.choice((1, 3, 64)), formats


def check_graphs(graph: str, row: str, device: On) -> Outcome:
    """Replay the stores of pools that run on `row` wherever it has an op: page sizes 1 and 4, copied and quantised."""
    done, total = 0, len(GRAPH_POOLS) * GraphStores.REPLAYS
    try:
        for page_size, dtype in GRAPH_POOLS:
            for _ in GraphStores(device, row, GRAPH_FILLS[graph], page_size, dtype).replays():
                done += 1
    except Exception as e:
        return _complaint(e, graph, row, done, total)
    return Outcome(graph, row, "passed", "", done, total)


def _complaint(e: Exception, op: str, row: str, done: int, total: int) -> Outcome:
    reasons = dict(e.rejected) if isinstance(e, NoKernel) else {}
    if row in reasons:
        return Outcome(op, row, "unavailable", reasons[row], 0, total)
    detail = str(e) if isinstance(e, Mismatch) else f"{type(e).__name__}: {e}"
    return Outcome(op, row, "failed", detail, done, total)


def has_graphs(device: On) -> bool:
    """Whether torch can capture graphs on `device`."""
    return _graph_class(*_placed(device)) is not None


def _graph_class(of: Device, at: torch.device) -> Any:
    return None if of.graph is None else getattr(torch.get_device_module(at), of.graph, None)


def capture(step: Callable[[], object], device: On) -> Callable[[], object]:
    """`step` as a captured graph to replay; on a device without graphs `step` itself, over the same buffers.

    It runs once before it is captured: a kernel cannot be compiled during a capture.
    """
    step()
    of, at = _placed(device)
    graph_class = _graph_class(of, at)
    if graph_class is None:
        return step
    module, graph = torch.get_device_module(at), graph_class()
    # A stream of this device: the default one belongs to the first device that ever captured.
    with module.device(at), module.graph(graph, stream=module.Stream(at)):
        step()
    replay: Callable[[], object] = graph.replay
    return replay


FULL, SWA = LayerSpec(None, 2, 16, 8), LayerSpec(6, 2, 16, 8)
GRAPH_POOLS = ((1, torch.bfloat16), (4, torch.float8_e5m2))
"""Page size and storage dtype of each."""


class GraphStores:
    """`set_kv_buffer` of full and SWA layers, captured for two batch sizes over one GraphWriteLoc, then replayed.

    Layers 0 and 1 store at its int64 locations, 2 and 3 at the int32 twins, layer 3 in two columns. With `inside` the
    graph begins with `fill` over a PAD-padded input; otherwise `fill` comes before each replay. The rows of padded
    tokens are NaN. Whole buffers are compared with what the allocator's host mapping says should be there.
    """

    OPS = (*SLOT_OPS, *KVFormat(2, 16, 8, torch.bfloat16).ops)
    SIZES = (4, 12)
    REPLAYS = 9

    def __init__(self, device: On, row: str, inside: bool, page_size: int, dtype: torch.dtype) -> None:
        self.inside = inside
        self.pool = HybridKVPool(
            [FULL, SWA, FULL, SWA],
            size=64,
            swa_size=32,
            page_size=page_size,
            dtype=dtype,
            device=device,
            kernels={op: row for op, name in rows(device) if name == row and op in self.OPS},
            # A replayed graph validates nothing, so checked mode must neither read back nor object.
            check=inside and has_graphs(device),
        )
        self.device = at = self.pool.device
        self._set_scales(2.0, 0.25)
        longest = max(self.SIZES)
        self.write_loc = self.pool.graph_write_loc(longest, int32_twin=True)
        self.slots = torch.zeros(longest, dtype=torch.int64, device=at)
        shapes = ((longest, 2, 16), (longest, 2, 8))
        self.rows = [[torch.zeros(s, dtype=torch.bfloat16, device=at) for s in shapes] for _ in range(4)]
        self.generator = torch.Generator().manual_seed(page_size)
        self.graphs = {n: capture(partial(self._step, n), device) for n in self.SIZES}
        self.addresses = [t.data_ptr() for t in self._locations()]
        self.faults = self.pool.faults()

    def replays(self) -> Iterator[str]:
        """The name of each replay, once it did what it should. Raises `Mismatch` for the first that did not."""
        allocator, page, longest = self.pool.allocator, self.pool.page_size, max(self.SIZES)
        allocator.alloc(page, swa_tail=0)  # so that no slot equals its peer
        batch = allocator.alloc(longest)
        yield self.replay("a full batch", batch)
        yield self.replay("fewer tokens", batch[: longest - 3])
        yield self.replay("the smaller graph", batch[: min(self.SIZES) - 1])
        yield self.replay("no tokens", batch[:0])
        peers = self.pool.allocator.mapping[batch.numpy()]
        allocator.free_swa(batch[:page])
        yield self.replay("a page without a peer", batch)
        taken = allocator.alloc(page)
        allocator.restore_swa(batch[:page])
        assert (self.pool.allocator.mapping[batch[:page].numpy()] != peers[:page]).all()
        yield self.replay("a remapped page", batch)
        allocator.free(batch)
        allocator.free(taken)
        batch = allocator.alloc(longest).flip(0)
        yield self.replay("another batch", batch)
        odd = batch.clone()
        odd[1:5] = torch.tensor([-1, self.pool.full_to_swa.shape[0] - 1, 2**40, page - 1], device="cpu")
        yield self.replay("slots out of range", odd)
        self._set_scales(0.5, 4.0)
        yield self.replay("other scales", batch)
        self.pool.check_integrity()

    def replay(self, name: str, loc: Tensor) -> str:
        """Replay the smallest graph that holds `loc [n]`, full slots on the host, and compare every byte."""
        live = len(loc)
        size = min(n for n in self.SIZES if n >= live)
        for pair in self.rows:
            for x in pair:
                x.copy_(torch.randn(x.shape, generator=self.generator, dtype=torch.float32, device="cpu"))
                x[live:] = math.nan
        twin = torch.where(loc == loc.int(), loc, -1)
        swa = torch.from_numpy(self.pool.allocator.mapping)[torch.where(self._in_range(loc), loc, -1)]
        expected = [self._expected(layer, (twin if layer >= 2 else loc, swa)[layer % 2]) for layer in range(4)]
        if self.inside:
            self.slots.fill_(PAD)
            self.slots[:live] = loc.to(self.device)
        else:
            self.write_loc.fill(loc)
        allocated = _allocations(self.device)
        self.graphs[size]()
        if _allocations(self.device) != allocated:
            raise Mismatch(f"{name}: the replay allocated device memory")
        self._compare_locations(name, (loc, swa, twin, swa))
        for layer, caches in enumerate(expected):
            for what, want, got in zip("KV", caches, self.pool.get_kv_buffer(layer), strict=True):
                _compare_rows(f"{name}: layer {layer} {what}", want, got)
        self._compare_faults(name, loc, twin)
        return name

    def _set_scales(self, k_scale: float, v_scale: float) -> None:
        self.scales = (k_scale, v_scale)
        for layer in range(4):
            self.pool.set_scales(layer, k_scale, v_scale)

    def _step(self, size: int) -> None:
        if self.inside:
            self.write_loc.fill(self.slots[:size])
        twin = self.write_loc.int32
        assert twin is not None
        for layer, (k, v) in enumerate(self.rows):
            locations = twin[:size] if layer >= 2 else self.write_loc[:size]
            # Layer 3 as the steps of a draft do: each its own column.
            columns = (slice(0, size, 2), slice(1, size, 2)) if layer == 3 else (slice(0, size),)
            for column in columns:
                self.pool.set_kv_buffer(layer, locations[column], k[column], v[column])

    def _in_range(self, loc: Tensor) -> Tensor:
        return (loc >= 0) & (loc < self.pool.full_to_swa.shape[0] - 1)

    def _expected(self, layer: int, slots: Tensor) -> tuple[Tensor, ...]:
        """The layer's K and V on the host as they should be once `slots` are stored; elsewhere as they are now."""
        caches = tuple(cache.to("cpu", copy=True) for cache in self.pool.get_kv_buffer(layer))
        writable = (slots >= self.pool.page_size) & (slots < len(caches[0]))
        for cache, x, scale in zip(caches, self.rows[layer], self.scales, strict=True):
            fmt = KVFormat(2, 16, 8, cache.dtype, self.pool.page_size)
            values = reference.convert(
                x[: len(slots)].cpu(), fmt, torch.full((2,), 1 / scale, dtype=torch.float32, device="cpu")
            )
            cache.view(torch.uint8)[slots[writable]] = values.view(torch.uint8)[writable]
        return caches

    def _locations(self) -> tuple[Tensor, ...]:
        """loc, swa_loc and the twins of both."""
        twin = self.write_loc.int32
        assert twin is not None
        assert twin.swa_loc is not None
        return self.write_loc.loc, self.write_loc.swa_loc, twin.loc, twin.swa_loc

    def _compare_locations(self, name: str, expected: Sequence[Tensor]) -> None:
        locations = self._locations()
        if [t.data_ptr() for t in locations] != self.addresses:
            raise Mismatch(f"{name}: a location buffer moved")
        for what, want, got in zip(("loc", "swa_loc", "int32.loc", "int32.swa_loc"), expected, locations, strict=True):
            padded = torch.full((len(got),), PAD, device="cpu")
            padded[: len(want)] = want
            if not torch.equal(padded, got.cpu().long()):
                raise Mismatch(f"{name}: {what}: expected {padded.tolist()}, got {got.tolist()}")

    def _compare_faults(self, name: str, loc: Tensor, twin: Tensor) -> None:
        over = [int((slots >= self.pool.full_to_swa.shape[0] - 1).sum()) for slots in (loc, twin)]
        self.faults["translate_loc"] += over[0]
        self.faults["cast_loc"] += int((loc != twin).sum())
        self.faults["store_kv"] += sum(over)
        if self.pool.faults() != self.faults:
            raise Mismatch(f"{name}: expected faults {self.faults}, got {self.pool.faults()}")


def _compare_rows(what: str, want: Tensor, got: Tensor) -> None:
    a, b = want.view(torch.uint8).flatten(1), got.cpu().view(torch.uint8).flatten(1)
    wrong = (a != b).any(1).nonzero().flatten().tolist()
    if wrong:
        raise Mismatch(f"{what}: row {wrong[0]} differs, {len(wrong)} of {len(a)} in all")


def _allocations(device: torch.device) -> int:
    """Device allocations made so far; 0 on a device that does not count them."""
    stats = getattr(torch.get_device_module(device), "memory_stats", None)
    return int(stats(device).get("allocation.all.allocated", 0)) if stats else 0
