"""What bad input gets: an error with argument, expected and got, and not one byte or counter changed."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from portakv import (
    DeviceUnavailable,
    GraphWriteLoc,
    HybridKVPool,
    KVWriteLoc,
    LayerSpec,
    MissingSwaLoc,
    NoKernel,
    OutOfMemory,
    OutOfSlots,
    PortaKVError,
    ReadPlan,
    Rope,
    SlotFault,
    SlotOwnership,
    StaleWriteLoc,
    Structure,
    dispatch,
    resolve_write_loc,
    warmup,
)
from portakv import device as devices
from portakv.formats import SLOT_OPS, KVFormat, Layout
from portakv.parallel import zigzag_split
from portakv.transfer import HostCopy

PAGE, SIZE, SWA = 4, 32, 24
ROWS = SIZE + PAGE
H, D, DV, T = 2, 16, 24, 4
OPS = (*SLOT_OPS, *KVFormat(H, D, DV, torch.float8_e4m3fn).ops)
LAYERS = [LayerSpec(None, H, D, DV), LayerSpec(8, H, D, DV), LayerSpec(8, H, D, DV, alias_of=1)]

Bad = tuple[str, Callable[["World"], Any], type[Exception] | tuple[type[Exception], ...], str]


@dataclasses.dataclass
class World:
    """A pool in use, and good arguments for each of its calls."""

    pool: HybridKVPool
    held: torch.Tensor  # 16 slots handed out, the first 4 without an SWA peer
    freed: torch.Tensor  # 4 slots that went back
    write_loc: KVWriteLoc
    graph: GraphWriteLoc
    reads: ReadPlan  # at fixed addresses: 2 requests of 16 tokens, 4 queries each
    k: torch.Tensor
    v: torch.Tensor

    def store(self, layer: Any = 1, write_loc: Any = None, k: Any = None, v: Any = None, rope: Any = None) -> None:
        given = (self.write_loc if write_loc is None else write_loc, self.k if k is None else k)
        self.pool.set_kv_buffer(layer, *given, self.v if v is None else v, rope)

    def slots(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    def read(self, table: Any = None, rows: Any = (0, 1), seq: Any = (16, 9), query: Any = None, **options: Any) -> Any:
        """plan_read of two requests in a table of two rows and 16 positions; tuples are tensors of slots."""
        table = self.held.expand(2, 16).to(self.pool.device) if table is None else table
        rows, seq, query = (self.slots(*x) if isinstance(x, tuple) else x for x in (rows, seq, query))
        return self.pool.plan_read(table, rows, seq, query, **options)

    def at(self, *values: int) -> KVWriteLoc:
        loc = self.slots(*values).to(self.pool.device)
        return KVWriteLoc(loc, loc)


def without_memory(x: torch.Tensor) -> torch.Tensor:
    """As a tensor is whose storage was freed under it."""
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    return freed


def shrunk(x: torch.Tensor) -> torch.Tensor:
    """As a tensor is whose storage lost its last byte."""
    x = x.clone()
    x.untyped_storage().resize_(x.nbytes - 1)
    return x


def in_vmap(x: torch.Tensor) -> torch.Tensor:
    """As torch.func.vmap hands out, and leaves behind where a function keeps it."""
    kept = []
    torch.func.vmap(lambda row: kept.append(row) or row.sum())(torch.stack((x, x)))
    return kept[0]


def rows_here() -> list[str]:
    """The rows of the CPU column that can serve on this machine."""
    chosen = dispatch.select("store_kv", dispatch.facts("cpu"))
    return [chosen.row.name, *(row.name for row, why in chosen.rejected if why.endswith("comes first"))]


def make_world(device: torch.device, kernels: dict[str, str] | None, check: bool) -> World:
    options = {
        "size": SIZE,
        "swa_size": SWA,
        "page_size": PAGE,
        "device": device,
        "kernels": kernels,
        "check": check,
    }
    pool = HybridKVPool(LAYERS, dtype=torch.float8_e4m3fn, **options)  # fp8: scales count, and bytes need care
    freed, held = pool.allocator.alloc(T), pool.allocator.alloc(16)
    k, v = (torch.randn(T, H, dim, device=pool.device) for dim in (D, DV))
    write_loc, graph = pool.plan_write(held[8:12]), pool.graph_write_loc(8, int32_twin=True)
    graph.fill(held[8:12])
    reads = pool.graph_read_plan(2, 16, max_query_len=4, consumer="flashinfer")
    pool.plan_read(held[None].to(pool.device), torch.tensor([0]), torch.tensor([7]), out=reads)
    for layer in (0, 1):
        pool.set_scales(layer, 0.5, torch.tensor([2.0, 3.0]))
        pool.set_kv_buffer(layer, write_loc, k, v)
    pool.allocator.free(freed)
    pool.allocator.free_swa(held[:4])
    return World(pool, held, freed, write_loc, graph, reads, k, v)


@pytest.fixture(params=rows_here())
def kernels(request: pytest.FixtureRequest, device: torch.device) -> dict[str, str] | None:
    return dict.fromkeys(OPS, request.param) if device.type == "cpu" else None


@pytest.fixture
def world(device: torch.device, kernels: dict[str, str] | None) -> World:
    return make_world(device, kernels, check=False)


@pytest.fixture
def checked(device: torch.device, kernels: dict[str, str] | None) -> World:
    return make_world(device, kernels, check=True)


def snapshot(world: World) -> dict[str, Any]:
    """Every byte and counter of the pool, and of the arguments that a call may not touch either."""
    pool, pages = world.pool, world.pool.allocator._pages
    tensors = {"faults": pool._faults, "full_to_swa": pool.full_to_swa, "k": world.k, "v": world.v}
    for i, group in enumerate(pool.groups):
        tensors |= {
            f"k_caches {i}": group.k_caches,
            f"v_caches {i}": group.v_caches,
            f"scales {i}": group.scales,
        }
    locations = {"write_loc": world.write_loc, "graph": world.graph, "int32": world.graph.int32}
    for name, at in locations.items():
        tensors |= {f"{name}.loc": at.loc, f"{name}.swa_loc": at.swa_loc}
    for i, read in enumerate(world.reads.structures):
        tensors |= {f"{name} {i}": getattr(read, name) for name in ("indices", "indptr", "lens", "starts")}
    arrays = {"mapping": pool.allocator.mapping, "fill": pages.fill}
    arrays |= {"full.stack": pages.full.stack, "swa.stack": pages.swa.stack}
    return {
        **{name: (x.data_ptr(), x.cpu().view(torch.uint8).numpy().tobytes()) for name, x in tensors.items()},
        **{name: (x.ctypes.data, x.tobytes()) for name, x in arrays.items()},
        "tops": (pages.full.top, pages.swa.top),
        "queue": pages.queue,
        "check": pool.check,
    }


def assert_refused(world: World, call: Callable[[World], Any], error: Any, fragment: str) -> None:
    before = snapshot(world)
    with pytest.raises(error, match=fragment):
        call(world)
    after = snapshot(world)
    assert [name for name in before if before[name] != after[name]] == []
    world.pool.check_integrity()


STORES: list[Bad] = [
    ("k is a list", lambda w: w.store(k=[1.0]), TypeError, "k: expected a tensor, got list"),
    (
        "v is None",
        lambda w: w.pool.set_kv_buffer(1, w.write_loc, w.k, None),
        TypeError,
        "v: expected a tensor, got None",
    ),
    (
        "k of float64",
        lambda w: w.store(k=w.k.double()),
        TypeError,
        "k: expected a dtype of .*got torch.float64",
    ),
    (
        "k and v of int32",
        lambda w: w.store(k=w.k.int(), v=w.v.int()),
        TypeError,
        "k: expected a dtype of .*got torch.int32",
    ),
    (
        "k and v of uint8",
        lambda w: w.store(k=w.k.byte(), v=w.v.byte()),
        TypeError,
        "k: expected a dtype of .*got torch.uint8",
    ),
    (
        "k of another dialect",
        lambda w: w.store(k=w.k.to(torch.float8_e5m2)),
        TypeError,
        "k: .*got torch.float8_e5m2",
    ),
    (
        "too few rows",
        lambda w: w.store(k=w.k[:3]),
        ValueError,
        r"k: expected shape \(4, 2, 16\), got \(3, 2, 16\)",
    ),
    (
        "too many rows",
        lambda w: w.store(v=torch.cat((w.v, w.v))),
        ValueError,
        r"v: expected shape \(4, 2, 24\), got \(8, 2, 24\)",
    ),
    (
        "other head count",
        lambda w: w.store(k=w.k[:, :1]),
        ValueError,
        r"k: expected shape \(4, 2, 16\), got \(4, 1, 16\)",
    ),
    (
        "other head dim",
        lambda w: w.store(k=w.k[..., :8]),
        ValueError,
        r"k: expected shape \(4, 2, 16\), got \(4, 2, 8\)",
    ),
    (
        "k and v swapped",
        lambda w: w.store(k=w.v, v=w.k),
        ValueError,
        r"k: expected shape \(4, 2, 16\), got \(4, 2, 24\)",
    ),
    (
        "flattened rows",
        lambda w: w.store(k=w.k.flatten(1)),
        ValueError,
        r"k: expected shape \(4, 2, 16\), got \(4, 32\)",
    ),
    (
        "a batch axis",
        lambda w: w.store(k=w.k[None]),
        ValueError,
        r"k: expected shape \(4, 2, 16\), got \(1, 4, 2, 16\)",
    ),
    ("a scalar", lambda w: w.store(k=w.k[0, 0, 0]), ValueError, r"k: expected shape \(4, 2, 16\), got \(\)"),
    ("k on meta", lambda w: w.store(k=w.k.to("meta")), ValueError, "k: expected a tensor on .*, got meta"),
    ("v on meta", lambda w: w.store(v=w.v.to("meta")), ValueError, "v: expected a tensor on .*, got meta"),
    (
        "sparse k",
        lambda w: w.store(k=w.k.repeat_interleave(2, 2)[..., ::2]),
        ValueError,
        "k: expected a dense last axis, got strides",
    ),
    (
        "expanded v",
        lambda w: w.store(v=w.v[..., :1].expand(T, H, DV)),
        ValueError,
        "v: expected a dense last axis, got strides",
    ),
    (
        "slots on meta",
        lambda w: w.store(write_loc=KVWriteLoc(*[w.write_loc.loc.to("meta")] * 2)),
        ValueError,
        "write_loc: expected slots on .*, got meta",
    ),
    (
        "a tensor of slots",
        lambda w: w.store(write_loc=w.write_loc.loc),
        TypeError,
        "write_loc: expected a KVWriteLoc or GraphWriteLoc, got Tensor",
    ),
    (
        "no locations",
        lambda w: w.pool.set_kv_buffer(1, None, w.k, w.v),
        TypeError,
        "write_loc: expected a KVWriteLoc or GraphWriteLoc, got None",
    ),
    (
        "no swa_loc",
        lambda w: w.store(write_loc=KVWriteLoc(w.write_loc.loc)),
        MissingSwaLoc,
        "layer 1 has a sliding window and needs swa_loc, got None",
    ),
    (
        "a plan of fewer tokens",
        lambda w: w.store(write_loc=w.write_loc[:2]),
        ValueError,
        r"k: expected shape \(2, 2, 16\), got \(4, 2, 16\)",
    ),
    (
        "a captured plan of more",
        lambda w: w.store(write_loc=w.graph),
        ValueError,
        r"k: expected shape \(8, 2, 16\), got \(4, 2, 16\)",
    ),
]

LAYER_IDS: list[Any] = [-1, 3, 10**9, "1", 1.5, None, True, (1,), [1], torch.tensor(True), torch.tensor([1])]
LAYER_IDS += [np.int64(3), np.float32(1)]
NO_BOOLS: list[Any] = [None, 1, 0.0, "no", np.bool_(True), np.ones(2), torch.ones(2), torch.tensor(True)]
NO_DTYPES: list[Any] = ["int32", 4, [torch.int32], np.int32, np.ones(2), np.zeros(2, [("a", int)]), torch.ones(2)]
NO_INTS: list[Any] = [None, True, 1.0, "1", [1], np.ones(2, int), np.array(1.0), np.array([1]), np.bool_(True)]
NO_INTS += [torch.tensor(1.0), torch.tensor(True), torch.tensor([1]), torch.ones(2).long()]
NO_INTS += [torch.tensor(1, device="meta"), torch.ones(2, dtype=torch.int64).to_sparse()]


def kind(value: object) -> str:
    """The start of a test's id."""
    is_tensor = isinstance(value, torch.Tensor)
    return f"{type(value).__name__} {(value.dtype, value.layout, value.device, value.shape) if is_tensor else value!r}"


def copied(w: World, **changes: Any) -> HostCopy:
    """A good host copy of four tokens, with other fields."""
    return dataclasses.replace(w.pool.copy_to_host(w.held[4:8]), **changes)


def first(w: World, field: str, change: Callable[[Any], Any]) -> HostCopy:
    """A host copy whose first tensor of `field` is another."""
    tensors = getattr(copied(w), field)
    return copied(w, **{field: (change(tensors[0]), *tensors[1:])})


LOCATIONS: list[Bad] = [
    (
        "plan of a list",
        lambda w: w.pool.plan_write([1, 2]),
        TypeError,
        "loc: expected an int32 or int64 tensor, got list",
    ),
    (
        "plan of floats",
        lambda w: w.pool.plan_write(torch.ones(2)),
        TypeError,
        "loc: expected an int32 or int64 tensor, got torch.float32",
    ),
    ("plan of int16", lambda w: w.pool.plan_write(w.held.short()), TypeError, "loc: .*got torch.int16"),
    ("plan of bool", lambda w: w.pool.plan_write(w.held.bool()), TypeError, "loc: .*got torch.bool"),
    (
        "plan of 2-D slots",
        lambda w: w.pool.plan_write(w.held.reshape(4, 4)),
        ValueError,
        r"loc: expected 1-D slots, got shape \(4, 4\)",
    ),
    (
        "plan of a 0-d slot",
        lambda w: w.pool.plan_write(w.held[0]),
        ValueError,
        r"loc: expected 1-D slots, got shape \(\)",
    ),
    (
        "plan on meta",
        lambda w: w.pool.plan_write(w.held.to("meta")),
        ValueError,
        "loc: expected .*, got meta",
    ),
    (
        "plan as int16",
        lambda w: w.pool.plan_write(w.held, torch.int16),
        TypeError,
        "index_dtype: expected torch.int32 or torch.int64, got torch.int16",
    ),
    (
        "plan as 'int32'",
        lambda w: w.pool.plan_write(w.held, "int32"),
        TypeError,
        "index_dtype: expected .*, got 'int32'",
    ),
    (
        "fill with floats",
        lambda w: w.graph.fill(torch.ones(2)),
        TypeError,
        "loc: expected an int32 or int64 tensor",
    ),
    (
        "fill with too many",
        lambda w: w.graph.fill(w.held),
        ValueError,
        "loc: expected at most 8 slots, got 16",
    ),
    (
        "fill with 2-D slots",
        lambda w: w.graph.fill(w.held[:4].reshape(2, 2)),
        ValueError,
        "loc: expected 1-D slots",
    ),
    (
        "fill from meta",
        lambda w: w.graph.fill(w.held[:4].to("meta")),
        ValueError,
        "loc: expected .*, got meta",
    ),
    (
        "0 captured tokens",
        lambda w: w.pool.graph_write_loc(0),
        ValueError,
        "max_tokens: expected at least 1, got 0",
    ),
    (
        "-1 captured tokens",
        lambda w: w.pool.graph_write_loc(-1),
        ValueError,
        "max_tokens: expected at least 1, got -1",
    ),
    (
        "True captured tokens",
        lambda w: w.pool.graph_write_loc(True),
        TypeError,
        "max_tokens: expected an int, got bool",
    ),
    (
        "locations of floats",
        lambda w: KVWriteLoc(torch.ones(2)),
        TypeError,
        "loc: expected an int32 or int64 tensor",
    ),
    (
        "locations of 2-D slots",
        lambda w: KVWriteLoc(w.held.reshape(4, 4)),
        ValueError,
        "loc: expected 1-D slots",
    ),
    (
        "swa_loc of floats",
        lambda w: KVWriteLoc(w.held, torch.ones(16)),
        TypeError,
        "swa_loc: expected an int32 or int64 tensor",
    ),
    (
        "swa_loc too short",
        lambda w: KVWriteLoc(w.held, w.held[:15]),
        ValueError,
        "swa_loc: expected at least 16 slots, got 15",
    ),
    (
        "swa_loc elsewhere",
        lambda w: KVWriteLoc(w.held, w.held.to("meta")),
        ValueError,
        "swa_loc: expected a tensor on cpu, got meta",
    ),
    ("one location", lambda w: w.write_loc[0], TypeError, "tokens: expected a slice, got 0"),
    *(
        (f"tokens {part} {kind(x)}", lambda w, at=at, x=x: w.graph[slice(*at(x))], TypeError, "tokens: expected an int")
        for part, at in (("up to", lambda x: (None, x)), ("from", lambda x: (x, None)), ("by", lambda x: (0, 4, x)))
        for x in NO_INTS
        if x is not None and x is not True  # which slices take
    ),
    *(
        (f"{name} {kind(x)}", lambda w, call=call, x=x: call(w, x), TypeError, f"{name}: expected True or False, got")
        for name, call in (
            ("int32_twin", lambda w, x: w.pool.graph_write_loc(4, x)),
            ("idle", lambda w, x: resolve_write_loc(w.pool, w.held, idle=x)),
            ("clear", lambda w, x: w.pool.faults(x)),
        )
        for x in NO_BOOLS
    ),
    *(
        (f"{what} {kind(x)}", lambda w, call=call, x=x: call(w, x), TypeError, "dtype: expected .*, got")
        for what, call in (
            ("plan as", lambda w, x: w.pool.plan_write(w.held, x)),
            ("resolve as", lambda w, x: resolve_write_loc(w.pool, w.held, index_dtype=x)),
            ("read as", lambda w, x: w.read(index_dtype=x)),
            ("gather as", lambda w, x: w.pool.gather_kv(1, w.write_loc, dtype=x)),
            ("buffer as", lambda w, x: w.pool.get_kv_buffer(1, x)),
        )
        for x in NO_DTYPES
    ),
    ("resolve of no pool", lambda w: resolve_write_loc(3, w.held), TypeError, "pool: expected a HybridKVPool, got 3"),
    ("warm up of no pool", lambda w: warmup([w.pool]), TypeError, "pool: expected a HybridKVPool, got list"),
    ("tokens backwards", lambda w: w.write_loc[::-1], ValueError, "tokens: expected a step of at least 1, got -1"),
    (
        "a cast of slots elsewhere",
        lambda w: w.pool.cast_write_loc(KVWriteLoc(w.held.to("meta"))),
        ValueError,
        "write_loc: expected slots on .*, got meta",
    ),
    (
        "a cast of a tensor",
        lambda w: w.pool.cast_write_loc(w.held),
        TypeError,
        "write_loc: expected a KVWriteLoc or GraphWriteLoc, got Tensor",
    ),
]

READS: list[Bad] = [
    (
        "gather into a list",
        lambda w: w.pool.gather_kv(1, w.write_loc, [1]),
        TypeError,
        "k_out: expected a tensor, got list",
    ),
    (
        "gather into int8",
        lambda w: w.pool.gather_kv(1, w.write_loc, w.k.char(), w.v.char()),
        TypeError,
        "k_out: expected a dtype of .*got torch.int8",
    ),
    (
        "gather as float64",
        lambda w: w.pool.gather_kv(1, w.write_loc, dtype=torch.float64),
        TypeError,
        "dtype: expected one of .*got torch.float64",
    ),
    (
        "gather as another dtype than the output's",
        lambda w: w.pool.gather_kv(1, w.write_loc, w.k, w.v, dtype=torch.float16),
        TypeError,
        "k_out: expected a dtype of .*float16.*got torch.float32",
    ),
    (
        "gather into fewer rows",
        lambda w: w.pool.gather_kv(1, w.write_loc, w.k[:2], w.v),
        ValueError,
        r"k_out: expected shape \(4, 2, 16\), got \(2, 2, 16\)",
    ),
    (
        "gather to meta",
        lambda w: w.pool.gather_kv(1, w.write_loc, w.k.to("meta"), w.v),
        ValueError,
        "k_out: expected a tensor on .*, got meta",
    ),
    (
        "gather without swa_loc",
        lambda w: w.pool.gather_kv(2, KVWriteLoc(w.write_loc.loc)),
        MissingSwaLoc,
        "layer 2 has a sliding window",
    ),
    (
        "gather at a tensor",
        lambda w: w.pool.gather_kv(1, w.write_loc.loc),
        TypeError,
        "locations: expected a KVWriteLoc or GraphWriteLoc, got Tensor",
    ),
    (
        "a view of another dtype",
        lambda w: w.pool.get_kv_buffer(0, torch.float8_e4m3fnuz),
        TypeError,
        "dtype: expected the pool's torch.float8_e4m3fn, got torch.float8_e4m3fnuz",
    ),
    (
        "move of unlike lengths",
        lambda w: w.pool.move_kv_cache(w.held[:4], w.held[:3]),
        ValueError,
        "src: expected 4 slots as in tgt, got 3",
    ),
    (
        "move of foreign slots and unlike lengths",
        lambda w: w.pool.move_kv_cache(w.slots(ROWS, ROWS), w.slots(4)),
        ValueError,
        "src: expected 2 slots as in tgt, got 1",
    ),
    (
        "move of a list",
        lambda w: w.pool.move_kv_cache([4], [5]),
        TypeError,
        "tgt: expected an int32 or int64 tensor, got list",
    ),
    (
        "move from 2-D slots",
        lambda w: w.pool.move_kv_cache(w.held[:4], w.held[:4].reshape(2, 2)),
        ValueError,
        "src: expected 1-D slots",
    ),
    (
        "host copy of freed slots",
        lambda w: w.pool.copy_to_host(w.freed),
        SlotOwnership,
        "slots: expected handed-out slots, got 4: its page is free",
    ),
    (
        "load into too few slots",
        lambda w: w.pool.load_from_host(w.pool.copy_to_host(w.held[4:8]), slots=w.held[4:7]),
        ValueError,
        "slots: expected 4, one per token of the copy, got 3",
    ),
    (
        "load into freed slots",
        lambda w: w.pool.load_from_host(w.pool.copy_to_host(w.held[4:8]), slots=w.freed),
        SlotOwnership,
        "slots: expected handed-out slots, got 4: its page is free",
    ),
    (
        "load of nothing",
        lambda w: w.pool.load_from_host(None),
        TypeError,
        "copy: expected a HostCopy, got None",
    ),
    *(
        (
            f"load {field} {kind(x)}",
            lambda w, field=field, x=x: w.pool.load_from_host(copied(w, **{field: x})),
            TypeError,
            f"copy.{field}: expected a tuple",
        )
        for field in ("tags", "keys", "values", "scales")
        for x in (None, 3, "full", [], {}, np.ones(2), torch.tensor(1.0))
    ),
    *(
        (
            f"load {field} with {what}",
            lambda w, field=field, change=change: w.pool.load_from_host(first(w, field, change)),
            (TypeError, ValueError),
            rf"copy.{field}\[0\]: expected a",
        )
        for field in ("keys", "values", "scales")
        for what, change in (
            ("None", lambda x: None),
            ("a list", lambda x: x.float().tolist()),
            ("an array", lambda x: x.view(torch.uint8).numpy()),
            ("a tensor on meta", lambda x: x.to("meta")),
            ("a tensor without memory", without_memory),
            ("a shrunk tensor", shrunk),
            ("a functional tensor", torch._to_functional_tensor),
        )
    ),
    (
        "load into a list",
        lambda w: w.pool.load_from_host(copied(w), slots=[4, 5, 6, 7]),
        TypeError,
        "slots: expected an int32 or int64 tensor, got list",
    ),
    (
        "load into one slot",
        lambda w: w.pool.load_from_host(copied(w), slots=w.held[0]),
        ValueError,
        r"slots: expected 1-D slots, got shape \(\)",
    ),
    (
        "gather into expanded rows",
        lambda w: w.pool.gather_kv(1, w.write_loc, w.k, w.v[:1].expand(T, H, DV)),
        ValueError,
        "v_out: expected rows with memory of their own, got strides",
    ),
    (
        "gather beside an array",
        lambda w: w.pool.gather_kv(1, w.write_loc, w.k.cpu().numpy()),
        TypeError,
        "k_out: expected a tensor, got ndarray",
    ),
]

SCALES: list[Bad] = (
    [
        (
            f"{which} of {scale}",
            lambda w, which=which, scale=scale: w.pool.set_scales(1, **{which: scale}),
            ValueError,
            f"{which}: expected finite positive scales .*got",
        )
        for which in ("k_scale", "v_scale")
        for scale in (
            0,
            0.0,
            -0.5,
            float("nan"),
            float("inf"),
            float("-inf"),
            1e-42,
            1e39,
            2**128,
            10**400,
            torch.tensor([1.0, 0.0]),
        )
    ]
    + [
        (
            f"scale of {got}",
            lambda w, scale=scale: w.pool.set_scales(1, scale),
            TypeError,
            f"k_scale: expected a number or a tensor of floats, got {got}",
        )
        for scale, got in (
            (True, "bool"),
            ("1", "str"),
            (torch.tensor([1]), "torch.int64 on cpu"),
            (torch.ones(1, device="meta"), "torch.float32 on meta"),
        )
    ]
    + [
        (
            "three scales for two heads",
            lambda w: w.pool.set_scales(1, torch.ones(3)),
            ValueError,
            "k_scale: expected 1 value or 2, one per KV head, got 3",
        ),
        (
            "good K and bad V",
            lambda w: w.pool.set_scales(1, 7.0, 0.0),
            ValueError,
            "v_scale: expected finite positive scales",
        ),
        (
            "scales of an alias",
            lambda w: w.pool.set_scales(2, 1.0),
            ValueError,
            "layer_id: .*got 2, which reads layer 1's",
        ),
    ]
)

SLOTS: list[Bad] = [
    ("alloc of -1", lambda w: w.pool.allocator.alloc(-1), ValueError, "n: expected at least 0, got -1"),
    ("alloc of 1.5", lambda w: w.pool.allocator.alloc(1.5), TypeError, "n: expected an int, got float"),
    *(
        (f"alloc of {kind(x)}", lambda w, x=x: w.pool.allocator.alloc(x), TypeError, "n: expected an int, got")
        for x in NO_INTS
    ),
    *(
        (f"available {kind(x)}", lambda w, x=x: w.pool.allocator.available(x), ValueError, "side: expected .*, got")
        for x in ("", "FULL", None, True, 0, ["full"], np.array(["full", "swa"]), np.ones(2), torch.ones(2))
    ),
    (
        "extend with a tail of 2**70",
        lambda w: w.pool.allocator.alloc_extend([0, 0], [8, 8], [-1, -1], 2**70),
        OutOfSlots,
        "swa side: need 16 slots, 12 free",
    ),
    (
        "alloc with a tail of -1",
        lambda w: w.pool.allocator.alloc(4, swa_tail=-1),
        ValueError,
        "swa_tail: expected at least 0, got -1",
    ),
    (
        "alloc past the full side",
        lambda w: w.pool.allocator.alloc(17, swa_tail=0),
        OutOfSlots,
        r"full side: need 20 slots, 16 free \(4 short\)",
    ),
    (
        "alloc past the SWA side",
        lambda w: w.pool.allocator.alloc(16),
        OutOfSlots,
        r"swa side: need 16 slots, 12 free \(4 short\)",
    ),
    (
        "extend past the SWA side",
        lambda w: w.pool.allocator.alloc_extend([0, 0], [8, 8], [-1, -1]),
        OutOfSlots,
        "swa side: need 16 slots, 12 free",
    ),
    (
        "extend to fewer tokens",
        lambda w: w.pool.allocator.alloc_extend([4], [3], w.held[3:4]),
        ValueError,
        r"seq_lens\[0\]: expected at least the prefix, got 3",
    ),
    (
        "extend by unlike batches",
        lambda w: w.pool.allocator.alloc_extend([0], [3, 4], [-1]),
        ValueError,
        "prefix_lens, seq_lens, last_loc: expected equal lengths, got 1, 2, 1",
    ),
    (
        "extend a freed slot",
        lambda w: w.pool.allocator.alloc_extend([4], [5], w.freed[-1:]),
        SlotOwnership,
        r"last_loc\[0\]: expected the last slot handed out to 4 tokens, got 7",
    ),
    (
        "extend from the middle",
        lambda w: w.pool.allocator.alloc_extend([3], [4], w.held[2:3]),
        SlotOwnership,
        r"last_loc\[0\]",
    ),
    (
        "decode to 0 tokens",
        lambda w: w.pool.allocator.alloc_decode([0], [-1]),
        ValueError,
        r"seq_lens\[0\]: expected lengths of at least 1, got 0",
    ),
    (
        "decode of floats",
        lambda w: w.pool.allocator.alloc_decode([1.0], [-1]),
        TypeError,
        "seq_lens: expected integers, got float64",
    ),
    (
        "free twice",
        lambda w: w.pool.allocator.free(w.freed),
        SlotOwnership,
        "got 4: its page is free: freed already, or never handed out",
    ),
    (
        "free what was never handed out",
        lambda w: w.pool.allocator.free(w.slots(24, 25, 26, 27)),
        SlotOwnership,
        "got 24: its page is free",
    ),
    (
        "free good and bad",
        lambda w: w.pool.allocator.free(torch.cat((w.held, w.freed))),
        SlotOwnership,
        "got 4: its page is free",
    ),
    ("free PAD", lambda w: w.pool.allocator.free(w.slots(0)), SlotOwnership, "got 0: reserved"),
    ("free a reserved slot", lambda w: w.pool.allocator.free(w.slots(3)), SlotOwnership, "got 3: reserved"),
    (
        "free a negative slot",
        lambda w: w.pool.allocator.free(w.slots(-1)),
        SlotOwnership,
        "got -1: out of range",
    ),
    (
        "free past the last row",
        lambda w: w.pool.allocator.free(w.slots(ROWS)),
        SlotOwnership,
        "got 36: out of range, the pool has 36 rows",
    ),
    ("free far out of range", lambda w: w.pool.allocator.free(w.slots(2**62)), SlotOwnership, "out of range"),
    (
        "free part of a page",
        lambda w: w.pool.allocator.free(w.held[4:6]),
        SlotOwnership,
        "got part of a page at slot 12: 2 of 4 slots",
    ),
    (
        "free floats",
        lambda w: w.pool.allocator.free(torch.ones(4)),
        TypeError,
        "slots: expected integers, got float32",
    ),
    *(
        (f"free {what}", lambda w, slots=slots: w.pool.allocator.free(slots(w)), TypeError, "slots: expected a plain")
        for what, slots in (
            ("slots on meta", lambda w: w.held.to("meta")),
            ("sparse slots", lambda w: w.held.to_sparse()),
            ("floats with a gradient", lambda w: torch.ones(4, requires_grad=True)),
            ("rows of several lengths", lambda w: [[8], [9, 10]]),
        )
    ),
    (
        "free 2-D slots",
        lambda w: w.pool.allocator.free(w.held.reshape(4, 4)),
        ValueError,
        r"slots: expected 1 dimensions, got shape \(4, 4\)",
    ),
    (
        "free SWA peers twice over",
        lambda w: w.pool.allocator.free_swa(w.freed),
        SlotOwnership,
        "got 4: its page is free",
    ),
    (
        "free SWA peers of part of a page",
        lambda w: w.pool.allocator.free_swa(w.held[:1]),
        SlotOwnership,
        "part of a page at slot 8: 1 of 4",
    ),
    (
        "free unaligned segments",
        lambda w: w.pool.allocator.free_segments([9], [4]),
        ValueError,
        r"starts\[0\]: expected multiples of 4, got 9",
    ),
    (
        "free segments of part of a page",
        lambda w: w.pool.allocator.free_segments([8], [3]),
        ValueError,
        r"lengths\[0\]: expected multiples of 4 from 0 to 32, got 3",
    ),
    (
        "free a segment of free pages",
        lambda w: w.pool.allocator.free_segments([8], [20]),
        SlotOwnership,
        "got 24: its page is free",
    ),
    (
        "free an endless segment",
        lambda w: w.pool.allocator.free_segments([8], [2**40]),
        ValueError,
        r"lengths\[0\]: expected multiples of 4 from 0 to 32",
    ),
    (
        "rewind from the middle",
        lambda w: w.pool.allocator.rewind(w.held[5:7]),
        SlotOwnership,
        "the last slots handed out of each page",
    ),
    (
        "rewind freed slots",
        lambda w: w.pool.allocator.rewind(w.freed),
        SlotOwnership,
        "got 4: its page is free",
    ),
    (
        "restore freed slots",
        lambda w: w.pool.allocator.restore_swa(w.freed),
        SlotOwnership,
        "got 4: its page is free",
    ),
    (
        "evict beyond the table",
        lambda w: w.pool.allocator.evict_swa(w.held[None], [0], [0], [17]),
        ValueError,
        r"next_query\[0\]: expected 0 to 16, got 17",
    ),
    (
        "evict of another row",
        lambda w: w.pool.allocator.evict_swa(w.held[None], [1], [0], [16]),
        ValueError,
        r"rows\[0\]: expected 0 to 0, got 1",
    ),
    (
        "evict from a negative cursor",
        lambda w: w.pool.allocator.evict_swa(w.held[None], [0], [-4], [16]),
        ValueError,
        r"evicted\[0\]",
    ),
    (
        "evict of freed slots",
        lambda w: w.pool.allocator.evict_swa(w.freed.repeat(4)[None], [0], [0], [16]),
        SlotOwnership,
        "got 4: its page is free",
    ),
    (
        "room on a third side",
        lambda w: w.pool.allocator.available("both"),
        ValueError,
        'side: expected "full" or "swa", got \'both\'',
    ),
    (
        "reuse in a window of 0",
        lambda w: w.pool.allocator.reusable_prefix(w.held, window=0),
        ValueError,
        "window: expected at least 1, got 0",
    ),
]


def other_plan(w: World) -> ReadPlan:
    return make_world(w.pool.device, None, check=False).reads


READ_PLANS: list[Bad] = [
    (
        "table as lists",
        lambda w: w.read([[1]]),
        TypeError,
        "req_to_token: expected an int32 or int64 tensor, got list",
    ),
    ("table of floats", lambda w: w.read(torch.ones(2, 16)), TypeError, "req_to_token: .*got torch.float32"),
    ("table of one row", lambda w: w.read(w.held), ValueError, "req_to_token: expected .requests, positions."),
    (
        "table by columns",
        lambda w: w.read(w.held.expand(2, 16).T.contiguous().T),
        ValueError,
        "req_to_token: .*dense last axis",
    ),
    (
        "table elsewhere",
        lambda w: w.read(torch.empty(2, 16, dtype=torch.int64, device="meta")),
        ValueError,
        "req_to_token: expected a tensor on .*, got meta",
    ),
    (
        "rows is a list",
        lambda w: w.read(rows=[0, 1]),
        TypeError,
        "req_rows: expected an int32 or int64 tensor, got list",
    ),
    ("rows is an int", lambda w: w.read(rows=0), TypeError, "req_rows: expected .*got int"),
    ("rows of int16", lambda w: w.read(rows=torch.ones(2).short()), TypeError, "req_rows: .*got torch.int16"),
    ("rows in two dims", lambda w: w.read(rows=torch.zeros(1, 2).long()), ValueError, "req_rows: .*got .1, 2."),
    ("row past the table", lambda w: w.read(rows=(0, 2)), ValueError, r"req_rows.1.: .*below 2, got 2"),
    ("negative row", lambda w: w.read(rows=(-1, 0)), ValueError, r"req_rows.0.: expected at least 0, got -1"),
    ("seq_lens is None", lambda w: w.read(seq=None), TypeError, "seq_lens: expected .*got NoneType"),
    ("seq_lens is an int", lambda w: w.read(seq=16), TypeError, "seq_lens: expected .*got int"),
    ("too few lengths", lambda w: w.read(seq=(16,)), ValueError, r"seq_lens: expected shape .2., got .1,."),
    (
        "lengths elsewhere",
        lambda w: w.read(seq=torch.ones(2, dtype=torch.int64, device="meta")),
        ValueError,
        "seq_lens: expected a tensor on the host or on .*, got meta",
    ),
    ("past the table", lambda w: w.read(seq=(17, 9)), ValueError, r"seq_lens.0.: expected at most 16 tokens, got 17"),
    (
        "past the table, whatever max_len",
        lambda w: w.read(seq=(17, 9), max_len=99),
        ValueError,
        r"seq_lens.0.: .*got 17",
    ),
    ("past max_len", lambda w: w.read(max_len=8), ValueError, r"seq_lens.0.: expected at most 8 tokens, got 16"),
    ("negative length", lambda w: w.read(seq=(3, -1)), ValueError, r"seq_lens.1.: expected at least 0, got -1"),
    (
        "a verify past the table",
        lambda w: w.read(extra_lens=w.slots(1, 1)),
        ValueError,
        r"seq_lens \+ extra_lens.0.: expected at most 16 tokens, got 17",
    ),
    (
        "a verify past the table by an int",
        lambda w: w.read(extra_lens=1),
        ValueError,
        r"seq_lens \+ extra_lens.0.: expected at most 16 tokens, got 17",
    ),
    (
        "lengths that wrap around",
        lambda w: w.read(seq=(2**62, 1), extra_lens=w.slots(2**62, 2**62)),
        ValueError,
        r"seq_lens \+ extra_lens.0.: expected at most 16 tokens",
    ),
    ("more queries than tokens", lambda w: w.read(query=(1, 10)), ValueError, r"query_lens.1.: .*got 10"),
    (
        "more queries than was said",
        lambda w: w.read(query=(3, 4), max_query_len=3),
        ValueError,
        r"query_lens.1.: expected at most max_query_len, 3, got 4",
    ),
    (
        "drafts past max_query_len",
        lambda w: w.read(seq=(3, 3), extra_lens=3, max_query_len=2),
        ValueError,
        r"query_lens.0.: expected at most max_query_len, 2, got 3",
    ),
    ("negative queries", lambda w: w.read(query=-1), ValueError, r"query_lens.0.: expected at least 0, got -1"),
    ("queries of bool", lambda w: w.read(query=True), TypeError, "query_lens: expected .*got bool"),
    ("extra_lens of float", lambda w: w.read(extra_lens=1.0), TypeError, "extra_lens: expected .*got float"),
    ("prefix_only of int", lambda w: w.read(prefix_only=1), TypeError, "prefix_only: expected True or False, got 1"),
    ("max_len of float", lambda w: w.read(max_len=16.0), TypeError, "max_len: expected an int, got float"),
    ("max_query_len below 0", lambda w: w.read(max_query_len=-1), ValueError, "max_query_len: expected at least 0"),
    (
        "unknown consumer",
        lambda w: w.read(consumer="fa3"),
        ValueError,
        r"consumer: expected one of \['triton', 'flashinfer', .*, got 'fa3'",
    ),
    ("consumer of int", lambda w: w.read(consumer=3), TypeError, "consumer: expected a name or a ReadStyle, got 3"),
    (
        "unknown structure",
        lambda w: w.read(structure="table"),
        ValueError,
        r"structure: expected one of \['ragged', 'pages', 'rows', 'query_rows'\], got 'table'",
    ),
    ("index_dtype", lambda w: w.read(index_dtype=torch.int16), TypeError, "index_dtype: expected torch.int32 or"),
    ("pad", lambda w: w.read(pad=1), ValueError, "pad: expected 0 or -1, got 1"),
    ("pad of bool", lambda w: w.read(pad=False), ValueError, "pad: expected 0 or -1, got False"),
    ("pads", lambda w: w.read(pad=w.slots(0, -1)), ValueError, "pad: expected 0 or -1, got Tensor"),
    (
        "more indices than int32 counts",
        lambda w: w.pool.graph_read_plan(2**27, 16, consumer="flashinfer"),
        ValueError,
        "index_dtype: expected torch.int64 for 2147483648 indices, got torch.int32",
    ),
    ("out is a write plan", lambda w: w.read(out=w.write_loc), TypeError, "out: expected a ReadPlan, got KVWriteLoc"),
    (
        "plan of another pool",
        lambda w: w.read(seq=(4, 4), out=other_plan(w)),
        ValueError,
        "out: expected a plan of this pool, got one of another pool",
    ),
    (
        "plan of another style",
        lambda w: w.read(seq=(4, 4), consumer="triton", out=w.reads),
        ValueError,
        "out: expected",
    ),
    ("plan of another pad", lambda w: w.read(seq=(4, 4), pad=-1, out=w.reads), ValueError, "out: expected a plan of"),
    (
        "a batch past the buffer",
        lambda w: w.read(rows=(0, 1, 0), seq=(1, 1, 1), out=w.reads),
        ValueError,
        "out: expected room for 3 requests, got 2",
    ),
    (
        "queries past the buffer",
        lambda w: w.read(query=(9, 9), out=w.reads),
        ValueError,
        r"out: expected room for ragged of window 8 of shape \(25,\), got \(22,\)",
    ),
    (
        "graph of no requests",
        lambda w: w.pool.graph_read_plan(0, 16),
        ValueError,
        "max_reqs: expected at least 1, got 0",
    ),
    ("graph of no tokens", lambda w: w.pool.graph_read_plan(1, 0), ValueError, "max_len: expected at least 1, got 0"),
    *(
        (
            f"graph of {size} {name}",
            lambda w, size=size, name=name: w.pool.graph_read_plan(**{"max_reqs": 1, "max_len": 16, name: size}),
            ValueError,
            f"{name}: expected at most {2**63 - 1}, got {size}",
        )
        for name in ("max_reqs", "max_len", "max_query_len")
        for size in (2**63, 2**64 + 1, 2**200)
    ),
    *(
        (
            f"graph of {reqs} x {length} for {consumer}",
            lambda w, reqs=reqs, length=length, of=consumer: w.pool.graph_read_plan(reqs, length, consumer=of),
            OutOfMemory,
            r"asked for \d+ bytes, \d+ available",
        )
        for consumer in ("flashattention", "triton", "flashmla")
        for reqs, length in ((1, 2**63 - 1), (2**62, 8), (2**40, 2**40))
    ),
    *(
        (f"graph of {kind(x)}", lambda w, x=x: w.pool.graph_read_plan(x, 1), TypeError, "max_reqs: expected an int")
        for x in NO_INTS
    ),
    (
        "columns past 64 bits",
        lambda w: dataclasses.replace(w.reads.style, column_multiple=2**63),
        ValueError,
        f"column_multiple: expected at most {2**63 - 1}, got {2**63}",
    ),
    ("structures", lambda w: w.read(structure=np.ones(2)), ValueError, "structure: expected one of .*, got ndarray"),
    ("layer", lambda w: w.reads.for_layer(3), ValueError, "layer_id: expected 0 to 2, got 3"),
    ("layer of bool", lambda w: w.reads.for_layer(True), ValueError, "layer_id: expected 0 to 2, got True"),
]


CHECKED: list[Bad] = [
    (
        "a slot past the last row that attention would read",
        lambda w: w.read(torch.where(torch.arange(16) == 8, ROWS, w.held).expand(2, 16).to(w.pool.device)),
        SlotFault,
        r"req_to_token\[0, 8\] \(request 0, full side\): expected a slot below 36, got 36",
    ),
    (
        "a slot past the last row",
        lambda w: w.store(0, w.at(8, 9, 10, ROWS)),
        SlotFault,
        r"loc\[3\]: expected a slot below 36, got 36",
    ),
    (
        "an SWA slot past the last row",
        lambda w: w.store(1, KVWriteLoc(w.write_loc.loc, w.at(4, 5, 6, SWA + PAGE).loc)),
        SlotFault,
        r"swa_loc\[3\]: expected a slot below 28, got 28",
    ),
    (
        "a slot twice",
        lambda w: w.store(0, w.at(8, 9, 8, -1)),
        SlotFault,
        "loc: expected each slot once, got slot 8 twice",
    ),
    (
        "an SWA slot twice",
        lambda w: w.store(1, KVWriteLoc(w.write_loc.loc, w.at(8, 9, 8, 10).loc)),
        SlotFault,
        "swa_loc: expected each slot once, got slot 8 twice",
    ),
    (
        "a stale location",
        lambda w: w.store(1, KVWriteLoc(w.write_loc.loc, w.write_loc.swa_loc.flip(0))),
        StaleWriteLoc,
        r"write_loc\[0\]: slot 16 was translated to",
    ),
    (
        "a freed slot",
        lambda w: w.store(0, w.at(0, int(w.held[1]), -1, int(w.freed[1]))),
        SlotOwnership,
        r"loc\[3\]: expected a handed-out slot, got 5: freed already, or never handed out",
    ),
    (
        "a slot that was never handed out",
        lambda w: w.store(0, w.at(ROWS - 1, 0, -1, int(w.held[1]))),
        SlotOwnership,
        r"loc\[0\]: expected a handed-out slot, got 35: freed already, or never handed out",
    ),
    (
        "a plan past the last row",
        lambda w: w.pool.plan_write(w.slots(8, ROWS)),
        SlotFault,
        r"loc\[1\]: expected a slot below 36, got 36",
    ),
    (
        "a fill past the last row",
        lambda w: w.graph.fill(w.slots(8, 2**40)),
        SlotFault,
        r"loc\[1\]: expected a slot below 36, got 1099511627776",
    ),
    (
        "a gather past the last row",
        lambda w: w.pool.gather_kv(0, w.at(8, 9, 10, ROWS), w.k, w.v),
        SlotFault,
        r"\[3\]: expected a slot below 36, got 36",
    ),
    (
        "a move to one slot twice",
        lambda w: w.pool.move_kv_cache(w.slots(8, 8), w.slots(9, 10)),
        SlotFault,
        "tgt: expected each slot once, got slot 8 twice",
    ),
    (
        "a move past the last row",
        lambda w: w.pool.move_kv_cache(w.slots(8, 9), w.slots(10, ROWS)),
        SlotFault,
        r"\[1\]: expected a slot below 36, got 36",
    ),
]


def table(rows: list[Bad]) -> Any:
    assert len({row[0] for row in rows}) == len(rows)
    return pytest.mark.parametrize(("call", "error", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in rows])


@table(STORES)
def test_stores(world, call, error, fragment):
    assert_refused(world, call, error, fragment)


@table(LOCATIONS)
def test_locations(world, call, error, fragment):
    assert_refused(world, call, error, fragment)


@table(READS)
def test_reads_and_moves(world, call, error, fragment):
    assert_refused(world, call, error, fragment)


@table(READ_PLANS)
def test_read_plans(world, call, error, fragment):
    assert_refused(world, call, error, fragment)


@table(SCALES)
def test_scales(world, call, error, fragment):
    assert_refused(world, call, error, fragment)


@table(SLOTS)
def test_slots(world, call, error, fragment):
    assert_refused(world, call, error, fragment)


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "functional": torch._to_functional_tensor,
    "never written": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "without memory": without_memory,
    "shrunk": shrunk,
    "in vmap": in_vmap,
    "negated": torch._neg_view,
    "imaginary": lambda x: torch.complex(x, x).conj().imag if x.is_floating_point() else torch._neg_view(x),
}
"""Tensors whose numbers do not stand in memory as shape and strides say."""

TENSORS: dict[str, Callable[[World, Any], Any]] = {
    "k": lambda w, odd: w.store(k=odd(w.k)),
    "v": lambda w, odd: w.store(v=odd(w.v)),
    "write_loc": lambda w, odd: w.store(write_loc=KVWriteLoc(*[odd(w.write_loc.loc)] * 2)),
    "cos_sin_cache": lambda w, odd: w.store(rope=Rope(odd(w.k[:, 0]), w.slots(0, 1, 2, 3))),
    "positions": lambda w, odd: w.store(rope=Rope(w.k[:, 0], odd(w.slots(0, 1, 2, 3)))),
    "k_out": lambda w, odd: w.pool.gather_kv(1, w.write_loc, odd(w.k), w.v),
    "v_out": lambda w, odd: w.pool.gather_kv(1, w.write_loc, w.k, odd(w.v)),
    "locations": lambda w, odd: w.pool.gather_kv(0, KVWriteLoc(odd(w.write_loc.loc)), w.k, w.v),
    "loc": lambda w, odd: w.pool.plan_write(odd(w.held)),
    "loc, cast": lambda w, odd: w.pool.plan_write(odd(w.held), torch.int32),
    "loc, filled": lambda w, odd: w.graph.fill(odd(w.held[:4])),
    "loc of a cast": lambda w, odd: w.pool.cast_write_loc(KVWriteLoc(odd(w.held))),
    "tgt": lambda w, odd: w.pool.move_kv_cache(odd(w.held[:4]), w.held[4:8]),
    "src": lambda w, odd: w.pool.move_kv_cache(w.held[:4], odd(w.held[4:8])),
    "req_to_token": lambda w, odd: w.read(odd(w.held.expand(2, 16).contiguous())),
    "req_rows": lambda w, odd: w.read(rows=odd(w.slots(0, 1))),
    "seq_lens": lambda w, odd: w.read(seq=odd(w.slots(16, 9))),
    "query_lens": lambda w, odd: w.read(query=odd(w.slots(2, 1)), out=w.reads),
    "slots": lambda w, odd: w.pool.load_from_host(copied(w), slots=odd(w.held[4:8])),
    "k_scale": lambda w, odd: w.pool.set_scales(0, odd(torch.ones(H)), 3.0),
    "extra_lens": lambda w, odd: w.read(seq=(9, 9), extra_lens=odd(w.slots(2, 1))),
    "slots of a host copy": lambda w, odd: w.pool.copy_to_host(odd(w.held[4:8])),
    "freed slots": lambda w, odd: w.pool.allocator.free(odd(w.held)),
    "one freed slot": lambda w, odd: w.pool.allocator.free(odd(w.held[:1])),
    "rewound slots": lambda w, odd: w.pool.allocator.rewind(odd(w.held[-2:])),
    "SWA slots": lambda w, odd: w.pool.allocator.free_swa(odd(w.held[4:])),
    "restored slots": lambda w, odd: w.pool.allocator.restore_swa(odd(w.held[:4])),
    "written slots": lambda w, odd: w.pool.allocator.mark_written(odd(w.held[:4])),
    "starts": lambda w, odd: w.pool.allocator.free_segments(odd(w.held[:1]), [4]),
    "last_loc": lambda w, odd: w.pool.allocator.alloc_decode([17], odd(w.held[-1:])),
    "table": lambda w, odd: w.pool.allocator.evict_swa(odd(w.held[None]), [0], [0], [16]),
    "owned": lambda w, odd: w.pool.allocator.is_owned(odd(w.held)),
    "prefix": lambda w, odd: w.pool.allocator.reusable_prefix(odd(w.held)),
    "x": lambda w, odd: zigzag_split(odd(w.k), 0, 2),
}


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("row", rows_here())
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_without_numbers_of_their_own(name, row, check):
    """Of all that a CPU's kernels read, so that none is read past or half written from."""
    for what, odd in ODD.items():
        if (name, what) == ("x", "meta"):
            continue  # its rows are those of a batch on meta
        world = make_world(torch.device("cpu"), dict.fromkeys(OPS, row), check)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors are a prototype
            words = r"^[\w.\[\]]+: expected [^\n]*, got [^\n]*$"
            assert_refused(world, lambda w, odd=odd: TENSORS[name](w, odd), (TypeError, ValueError), words)


ALIASES: list[Bad] = [
    (
        f"{name} that is the cache of {side}",
        lambda w, call=call, at=at: call(w, w.pool.get_kv_buffer(0)[at][4:8, :, : D if at == 0 else DV]),
        ValueError,
        f"{name}: expected memory apart from the cache, got a part of it",
    )
    for side, at in (("K", 0), ("V", 1))
    for name, call in (
        ("k" if at == 0 else "v", lambda w, x: w.store(0, **{"k" if x.shape[2] == D else "v": x, **_others(w, x)})),
        ("k_out" if at == 0 else "v_out", lambda w, x: w.pool.gather_kv(0, w.write_loc, **_outputs(w, x))),
    )
] + [
    (
        "outputs that are one memory",
        lambda w: w.pool.gather_kv(0, w.write_loc, *_inside(w, 0)),
        ValueError,
        "v_out: expected memory apart from k_out, got a part of it",
    ),
    (
        "heads that are one memory",
        lambda w: w.pool.gather_kv(0, w.write_loc, w.k[:, :1].expand(T, H, D), w.v),
        ValueError,
        "k_out: expected rows with memory of their own, got strides",
    ),
    (
        "rows that overlap",
        lambda w: w.pool.gather_kv(0, w.write_loc, w.k, w.v.as_strided((T, H, DV), (8, DV, 1))),
        ValueError,
        "v_out: expected rows with memory of their own, got strides",
    ),
]


def _others(w: World, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The other of k and v, of the dtype of `x`."""
    return {"v": w.v.to(x.dtype)} if x.shape[2] == D else {"k": w.k.to(x.dtype)}


def _outputs(w: World, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}_out": other for name, other in _others(w, x).items()} | {
        f"{'k' if x.shape[2] == D else 'v'}_out": x
    }


def _inside(w: World, apart: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V rows in one buffer, V `apart` elements behind the start of K."""
    buffer = torch.zeros(T * H * (D + DV) + apart, device=w.pool.device)
    return buffer[: T * H * D].view(T, H, D), buffer[apart : apart + T * H * DV].view(T, H, DV)


@table(ALIASES)
def test_memory_that_is_not_apart(world, call, error, fragment):
    assert_refused(world, call, error, fragment)


def test_outputs_may_lie_between_each_other(world):
    """As the latent and the rope part of MLA rows do."""
    rows = torch.zeros(T, H, D + DV, device=world.pool.device)
    world.pool.gather_kv(1, world.write_loc, rows[..., :D], rows[..., D:])
    want = world.pool.gather_kv(1, world.write_loc, dtype=torch.float32)
    assert all(torch.equal(x, y) for x, y in zip((rows[..., :D], rows[..., D:]), want, strict=True))


@pytest.mark.parametrize("make", [np.int64, np.uint8, np.array, torch.tensor], ids=lambda make: make.__name__)
def test_an_integer_is_whatever_has_an_index(make):
    pool = HybridKVPool(
        [LayerSpec(None, make(2), make(16)), LayerSpec(make(8), 2, 16)],
        size=make(32),
        swa_size=make(24),
        page_size=make(4),
        swa_window=make(8),
        layout=Layout.ROWS,
        dtype="bfloat16",
        device="cpu",
    )
    assert (pool.size, pool.swa_size, pool.page_size, pool.window) == (32, 24, 4, 8)
    assert pool.layers[1] == LayerSpec(8, 2, 16)
    assert all(type(x) is int for x in (pool.size, pool.swa_size, pool.page_size, pool.layers[1].window))
    loc = pool.allocator.alloc(make(4))
    assert len(pool.graph_write_loc(make(3))) == 3
    rows = torch.ones(4, 2, 16)
    pool.set_kv_buffer(make(0), pool.plan_write(loc), rows, rows)
    assert pool.gather_kv(make(0), pool.plan_write(loc))[0].eq(1).all()
    assert pool.get_kv_buffer(make(0))[0] is pool.get_kv_buffer(0)[0]
    pool.set_scales(make(1), 2.0)
    plan = pool.plan_read(loc[None], torch.tensor([0]), torch.tensor([4]), 2, max_len=make(4), pad=make(0))
    assert plan.for_layer(make(1)).window == 8
    if make is not np.uint8:
        assert HybridKVPool.fit([LayerSpec(None, 2, 16)], make(1 << 14), device="cpu").size > 1


class Watching(TorchDispatchMode):
    """As what counts FLOPs: it looks on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Watching, FakeTensorMode])
def test_a_mode_of_one_thread_is_not_that_of_another(checked, mode):
    entered, done = threading.Event(), threading.Event()

    def hold():
        with mode():
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert entered.wait(60)
        assert_refused(
            checked, lambda w: w.store(0, w.at(*w.freed.tolist())), SlotOwnership, "expected a handed-out slot"
        )
        faked = FakeTensorMode().from_tensor(checked.k)
        assert_refused(checked, lambda w: w.store(k=faked), TypeError, "k: expected a plain t")
    finally:
        done.set()
        thread.join()


@table(STORES + READS + READ_PLANS + CHECKED + ALIASES)
def test_checked_mode(checked, call, error, fragment):
    assert_refused(checked, call, error, fragment)


@pytest.mark.parametrize("layer", LAYER_IDS, ids=repr)
def test_layer_ids(world, layer):
    calls = {
        "store": lambda w: w.store(layer),
        "gather": lambda w: w.pool.gather_kv(layer, w.write_loc),
        "buffer": lambda w: w.pool.get_kv_buffer(layer),
        "scales": lambda w: w.pool.set_scales(layer, 9.0, 9.0),
    }
    for call in calls.values():
        assert_refused(world, call, (ValueError, TypeError), "layer_id: expected 0 to 2, got")


def test_a_store_to_an_alias(world):
    assert_refused(world, lambda w: w.store(2), ValueError, "layer_id: .*got 2, which reads layer 1's")


def test_errors_are_of_the_classes_that_schedulers_catch():
    assert issubclass(SlotOwnership, ValueError)
    assert issubclass(DeviceUnavailable, RuntimeError)
    for kind in (
        OutOfSlots,
        SlotOwnership,
        SlotFault,
        MissingSwaLoc,
        StaleWriteLoc,
        NoKernel,
        DeviceUnavailable,
    ):
        assert issubclass(kind, PortaKVError)


def test_nested_groups_of_frees(world):
    with world.pool.allocator.group_frees():

        def nest(w):
            with w.pool.allocator.group_frees():
                raise AssertionError("entered")

        assert_refused(world, nest, PortaKVError, "group_frees: expected no open group")


def test_short_side_in_numbers(world):
    with pytest.raises(OutOfSlots) as caught:
        world.pool.allocator.alloc(16)
    assert (caught.value.side, caught.value.need, caught.value.free, caught.value.short) == ("swa", 16, 12, 4)


GOOD = {"layers": LAYERS, "size": SIZE, "swa_size": SWA, "page_size": PAGE, "device": "cpu"}

CONSTRUCTION: list[tuple[str, dict[str, Any], Any, str]] = [
    ("no layers", {"layers": []}, ValueError, "layers: expected at least one LayerSpec, got none"),
    (
        "layers of another type",
        {"layers": [LAYERS[0], 3]},
        TypeError,
        r"layers\[1\]: expected a LayerSpec, got 3",
    ),
    ("one layer", {"layers": LAYERS[0]}, TypeError, "layers: expected"),
    *(
        (f"{name} {value!r}", {name: value}, (ValueError, TypeError), f"{name}: expected .*, got")
        for name in ("size", "swa_size", "page_size")
        for value in (0, -1, True, 1.5, "8", torch.tensor(8.5))
    ),
    ("size below a page", {"size": 3}, ValueError, "size: expected at least .*, got 3"),
    ("swa_size below a page", {"swa_size": 3}, ValueError, "swa_size: expected at least .*, got 3"),
    ("swa_size below a request", {"swa_size": 8}, ValueError, "swa_size: expected at least 12 .*got 8"),
    (
        "an integer dtype",
        {"dtype": torch.int8},
        TypeError,
        "dtype: expected 'fp8' or one of .*, got torch.int8",
    ),
    ("float64", {"dtype": torch.float64}, TypeError, "dtype: expected 'fp8' or one of .*, got torch.float64"),
    ("an unknown dtype", {"dtype": "fp9"}, TypeError, "dtype: expected 'fp8' or one of .*, got 'fp9'"),
    ("no dtype", {"dtype": None}, TypeError, "dtype: expected 'fp8' or one of .*, got None"),
    (
        "an unknown device",
        {"device": "warp"},
        ValueError,
        r"device: expected a torch device, a Device or one of \['cuda', 'hip', 'xpu', 'cpu'\], got 'warp'",
    ),
    (
        "a device of no kind",
        {"device": devices.DeviceKind.OTHER},
        ValueError,
        "device: expected a torch device, a Device or one of",
    ),
    ("a device that is missing", {"device": "cuda:99"}, DeviceUnavailable, "cuda:99: .+"),
    (
        "an unknown op",
        {"kernels": {"sort_kv": "native"}},
        ValueError,
        "kernels: expected an op of .*, got 'sort_kv'",
    ),
    (
        "an unknown kernel",
        {"kernels": {"store_kv": "warp"}},
        ValueError,
        "kernels: expected a row of store_kv among .*, got 'warp'",
    ),
    (
        "a kernel of another device",
        {"kernels": {"store_kv": "triton"}},
        NoKernel,
        "no kernel for store_kv on cpu",
    ),
    (
        "a kernel of an op that the pool does not run",
        {"kernels": {"store_kv_packed": "native"}},
        ValueError,
        "kernels: expected ops that this pool runs, .*'store_kv', .*, got 'store_kv_packed'",
    ),
    (
        "an alias of the other kind",
        {"layers": [LAYERS[0], LayerSpec(8, H, D, DV, alias_of=0)]},
        ValueError,
        r"layers\[1\].alias_of: expected one of its kind, .*, got 0",
    ),
    ("kernels as text", {"kernels": "store_kv=native"}, TypeError, "kernels: expected a mapping .*, got"),
    (
        "strict without a kernel",
        {"device": "meta", "strict": True},
        NoKernel,
        "strict: an automatic choice may not end at the reference",
    ),
    ("check of another type", {"check": "yes"}, TypeError, "check: expected .*, got 'yes'"),
    *((f"strict {kind(x)}", {"strict": x}, TypeError, "strict: expected True or False, got") for x in NO_BOOLS),
    *((f"dtype {kind(x)}", {"dtype": x}, TypeError, "dtype: expected 'fp8' or one of .*, got") for x in NO_DTYPES),
    *(
        (f"device {x}", {"device": x}, ValueError, "device: expected a torch device, .*, got")
        for x in (2**63, -(2**70))
    ),
    *(
        (f"kernel {kind(x)}", {"kernels": {"store_kv": x}}, ValueError, "kernels: expected a row of store_kv .*, got")
        for x in (None, 1, ["native"], np.array(["native", "reference"]), torch.ones(2))
    ),
    ("slots of no pool", {"slots_of": 3}, TypeError, "slots_of: expected a HybridKVPool, got 3"),
]


@pytest.mark.parametrize(("options", "error", "fragment"), [pytest.param(*row[1:], id=row[0]) for row in CONSTRUCTION])
def test_construction(options, error, fragment):
    options = GOOD | options
    with pytest.raises(error, match=fragment):
        HybridKVPool(options.pop("layers"), **options)


@pytest.mark.parametrize("name", ["window", "num_kv_heads", "head_dim", "v_head_dim"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"], ids=repr)
def test_layer_specs(name, value):
    sizes = {"window": 8, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16} | {name: value}
    with pytest.raises((ValueError, TypeError), match=f"{name}: expected (an int|at least 1), got"):
        LayerSpec(**sizes)


@pytest.mark.parametrize("value", [2**63, 2**70])
def test_sizes_that_no_kernel_takes(value):
    """The largest that one does stands for no window."""
    for make in (
        lambda: LayerSpec(value, 2, 16),
        lambda: LayerSpec(None, 2, value),
        lambda: HybridKVPool(LAYERS, size=value, device="cpu"),
        lambda: HybridKVPool.fit(LAYERS, value, device="cpu"),
    ):
        with pytest.raises(ValueError, match=f": expected at most {2**63 - 1}, got {value}"):
            make()
    pool = HybridKVPool([LayerSpec(2**63 - 1, H, D), LayerSpec(None, H, D)], size=SIZE, device="cpu")
    table = pool.allocator.alloc(12)[None]
    for structure in Structure:
        plan = pool.plan_read(table, torch.tensor([0]), torch.tensor([12]), 3, structure=structure)
        windowed, full = plan.structures
        assert torch.equal(windowed.indices, full.indices)
        assert torch.equal(windowed.starts, full.starts)


ENVIRONMENT = [
    ("PORTAKV_CHECK", "2", ValueError, "PORTAKV_CHECK: expected 0 or 1, got '2'"),
    ("PORTAKV_CHECK", "true", ValueError, "PORTAKV_CHECK: expected 0 or 1, got 'true'"),
    ("PORTAKV_KERNELS", "store_kv", ValueError, "a row of store_kv among .*, got ''"),
    ("PORTAKV_KERNELS", "sort_kv=native", ValueError, "an op of .*, got 'sort_kv'"),
    ("PORTAKV_KERNELS", "store_kv=warp", ValueError, "a row of store_kv among .*, got 'warp'"),
    ("PORTAKV_KERNELS", "gather_kv=reference,store_kv=triton", NoKernel, "no kernel for store_kv on cpu"),
]


@pytest.mark.parametrize(("name", "value", "error", "fragment"), ENVIRONMENT)
def test_environment(monkeypatch, name, value, error, fragment):
    monkeypatch.setenv(name, value)
    options = dict(GOOD)
    with pytest.raises(error, match=fragment):
        HybridKVPool(options.pop("layers"), **options)


@pytest.mark.parametrize("value", ["gpu", "", "cuda:0", "CPU", "other"])
def test_the_device_variable(value):
    """What the import does with `PORTAKV_DEVICE`; scenario 48 does it in a fresh process."""
    with pytest.raises(ValueError, match=r"PORTAKV_DEVICE: expected one of \['cuda', 'hip', 'xpu', 'cpu'\], got '"):
        dispatch.choose(value)


def test_good_values_of_the_variables(monkeypatch):
    monkeypatch.setenv("PORTAKV_CHECK", "1")
    monkeypatch.setenv("PORTAKV_KERNELS", " store_kv=reference , ")
    options = dict(GOOD)
    pool = HybridKVPool(options.pop("layers"), **options)
    assert pool.check
    assert pool.kernels["store_kv"] == "reference"
    assert not HybridKVPool(LAYERS, **options, check=False).check


@pytest.mark.parametrize(
    "part", ["faults", "full_to_swa", "k_caches 1", "v_caches 0", "scales 1", "full.stack", "fill", "tops"]
)
def test_the_comparison_sees_one_changed_byte(device, part):
    """A refusal that did change something must fail `assert_refused`."""
    world = make_world(device, None, check=False)

    def sabotage(w):
        pool, pages = w.pool, w.pool.allocator._pages
        targets = {"faults": pool._faults, "full_to_swa": pool.full_to_swa, "full.stack": pages.full.stack}
        targets |= {
            "k_caches 1": pool.groups[1].k_caches.view(torch.uint8),
            "v_caches 0": pool.groups[0].v_caches.view(torch.uint8),
        }
        targets |= {"scales 1": pool.groups[1].scales, "fill": pages.fill}
        if part == "tops":
            pages.swa.top -= 1
        else:
            target = targets[part]
            flat = target.reshape(-1) if isinstance(target, np.ndarray) else target.view(-1)
            flat[len(flat) // 2] += 1
        raise ValueError("refused")

    with pytest.raises(AssertionError):
        assert_refused(world, sabotage, ValueError, "refused")
