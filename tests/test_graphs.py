"""Captured graphs of stores: replayed where the device has graphs, called again over the same buffers elsewhere.

The scenarios and their comparer are `portakv.check.GraphStores`; here they run on every row, and wrong pools must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from portakv import HybridKVPool, LayerSpec, PortaKVError, SlotFault, check, checks, dispatch, groups
from portakv import device as devices
from portakv.check import GraphStores, Mismatch, capture
from portakv.write_loc import GraphWriteLoc

CPU = torch.device("cpu")


@pytest.mark.parametrize("graph", check.GRAPH_FILLS)
def test_replays(graph: str, device: torch.device) -> None:
    for op, row in check.rows(device):
        if op == graph:
            outcome = check.check_graphs(graph, row, device)
            if outcome.result != "unavailable":
                assert outcome.result == "passed", outcome
                assert outcome.cases == outcome.total > 0


def test_a_graph_is_captured_where_the_device_has_them(device: torch.device) -> None:
    """So that on a GPU the replays are not the same calls once more."""
    calls = []
    x = torch.zeros(1, device=device)
    replay = capture(lambda: (calls.append(None), x.add_(1)), device)
    assert len(calls) == (2 if check.has_graphs(device) else 1)
    before = len(calls)
    replay()
    replay()
    assert x.item() == 3
    assert len(calls) == (before if check.has_graphs(device) else before + 2)
    assert check.has_graphs(device) == (dispatch.device_of(device) is not dispatch.CPU)


def test_capture_warms_up_before_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextmanager
    def graph(captured: object, stream: object):
        log.append("begin")
        yield
        log.append("end")

    captured = SimpleNamespace(replay=lambda: log.append("replay"))
    module = SimpleNamespace(CUDAGraph=lambda: captured, graph=graph, device=lambda _: nullcontext(), Stream=str)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    replay = capture(lambda: log.append("step"), torch.device("cuda"))
    replay()
    assert log == ["step", "begin", "step", "end", "replay"]


def test_checked_mode_reads_nothing_back_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to validate is all it can do there; a slot out of range is skipped and counted."""
    pool = HybridKVPool([LayerSpec(None, 2, 16), LayerSpec(6, 2, 16)], size=16, swa_size=16, device=CPU, check=True)
    write_loc = pool.graph_write_loc(2)
    rows = torch.ones(2, 2, 16, dtype=torch.bfloat16)

    def step() -> None:
        write_loc.fill(torch.tensor([17, 17]))
        for layer in range(2):
            pool.set_kv_buffer(layer, write_loc, rows, rows)

    with pytest.raises(SlotFault):
        step()
    module = SimpleNamespace(is_current_stream_capturing=lambda: True, device=lambda _: nullcontext())
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(checks, "read_back", lambda _: pytest.fail("read slots back"))
    step()
    assert pool.faults() == dict.fromkeys(pool.faults(), 0) | {"translate_loc": 2, "store_kv": 2}


def test_it_is_the_devices_own_capture_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are asked for the current device, whichever it is: here device 1 records a graph, and 0 is current."""
    current = [0]

    @contextmanager
    def guard(device: torch.device):
        current.append(device.index)
        yield
        current.pop()

    module = SimpleNamespace(is_current_stream_capturing=lambda: current[-1] == 1, device=guard)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert devices.is_capturing(torch.device("cuda", 1))
    assert not devices.is_capturing(torch.device("cuda", 0))


def test_the_mapping_is_not_edited_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would edit it once more; refused, the allocator is as it was."""
    launched = []
    allocator, _ = groups.allocate_slots(
        *(8, 8, 1, None, dispatch.OTHER, torch.device("meta")),
        ({"patch_map": lambda *args: launched.append("patch_map")},) * 2,
    )
    capturing = True
    monkeypatch.setattr(devices, "is_capturing", lambda _: capturing)
    with pytest.raises(PortaKVError, match="full_to_swa: expected no edit while meta captures a graph, got 3 slots"):
        allocator.alloc(3)
    assert launched == []
    assert allocator.available("full") == allocator.available("swa") == 8
    assert not allocator.mapping[:-1].any()
    capturing = False
    allocator.alloc(3)
    assert launched == ["patch_map"]


def keeps_tail(self: GraphWriteLoc, loc: torch.Tensor) -> None:
    """A fill that leaves the slots of the batch before behind the live ones."""
    twin = self.int32
    outs = [out[: len(loc)] for out in (self.swa_loc, self.loc, twin.swa_loc, twin.loc)]
    self._translate(loc, *outs)


def makes_new_buffers(self: GraphWriteLoc, loc: torch.Tensor) -> None:
    self.loc, self.swa_loc = self.loc.clone(), self.swa_loc.clone()
    fill(self, loc)


def forgets_twin(self: GraphWriteLoc, loc: torch.Tensor) -> None:
    self._translate(loc, self.swa_loc, self.loc, None, None)


fill = GraphWriteLoc.fill


@pytest.mark.parametrize("inside", [False, True], ids=["filled before replay", "filled inside"])
@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        (keeps_tail, "(fewer tokens|the smaller graph): loc: expected"),
        (makes_new_buffers, "a full batch: a location buffer moved"),
        (forgets_twin, "a full batch: int32.loc"),
    ],
)
def test_a_wrong_fill_is_seen(wrong: Callable, seen: str, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = GraphStores(CPU, "reference", inside, 1, torch.bfloat16)
    monkeypatch.setattr(GraphWriteLoc, "fill", wrong)
    with pytest.raises(Mismatch, match=seen):
        list(stores.replays())


def writes_padding(pool: HybridKVPool, layer: int, locations, k: torch.Tensor, v: torch.Tensor) -> None:
    store(pool, layer, locations, k, v)
    loc = pool._layers[layer].on_swa and locations.swa_loc
    if layer == 1:
        pool.get_kv_buffer(1)[0].view(torch.uint8)[loc[loc == 0]] = k.view(torch.uint8)[loc == 0][..., :16]


def swaps_sides(pool: HybridKVPool, layer: int, locations, k: torch.Tensor, v: torch.Tensor) -> None:
    """SWA layers written at full slots, as an engine without a translation does."""
    stale = locations if layer != 3 else type(locations)(locations.loc % 36, locations.loc % 36)
    store(pool, layer, stale, k, v)


def remembers_first_batch(pool: HybridKVPool, layer: int, locations, k: torch.Tensor, v: torch.Tensor) -> None:
    """A translation kept on the pool: right until the mapping changes."""
    if layer == 1 and len(locations) == 12:
        if not hasattr(pool, "kept") and locations.swa_loc.any():
            pool.kept = locations.swa_loc.clone()
        if hasattr(pool, "kept"):
            locations = type(locations)(locations.loc, torch.where(locations.loc > 0, pool.kept, 0))
    store(pool, layer, locations, k, v)


store = HybridKVPool.set_kv_buffer


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        (writes_padding, "fewer tokens: layer 1 K: row 0 differs"),
        (swaps_sides, "a full batch: layer 3 K: row"),
        (remembers_first_batch, "a page without a peer: layer 1 K: row"),
    ],
)
def test_a_wrong_store_is_seen(wrong: Callable, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridKVPool, "set_kv_buffer", wrong)
    stores = GraphStores(CPU, "reference", True, 4, torch.float8_e5m2)
    with pytest.raises(Mismatch, match=seen):
        list(stores.replays())


def test_checked_fill_refuses_before_it_writes(device: torch.device) -> None:
    """Outside of a capture checked mode does validate, and a fill that raises leaves every buffer as it was."""
    pool = HybridKVPool([LayerSpec(None, 2, 16), LayerSpec(6, 2, 16)], size=16, swa_size=16, device=device, check=True)
    write_loc = pool.graph_write_loc(4, int32_twin=True)
    write_loc.fill(pool.allocator.alloc(3))
    buffers = (write_loc.loc, write_loc.swa_loc, write_loc.int32.loc, write_loc.int32.swa_loc)
    before = [t.clone() for t in buffers]
    with pytest.raises(SlotFault, match=r"loc\[1\]"):
        write_loc.fill(torch.tensor([1, 17]))
    with pytest.raises(ValueError, match="loc: expected at most 4 slots, got 5"):
        write_loc.fill(torch.arange(5))
    assert all(torch.equal(a, b) for a, b in zip(before, buffers, strict=True))
    assert not any(pool.faults().values())


def test_scales_that_a_graph_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales kept as new tensors leave a captured graph with the old ones; here the comparer has the old ones."""
    monkeypatch.setattr(GraphStores, "_set_scales", lambda self, k, v: setattr(self, "scales", (k, v)))
    stores = GraphStores(CPU, "reference", False, 4, torch.float8_e5m2)
    with pytest.raises(Mismatch, match="a full batch: layer 0 K"):
        list(stores.replays())
