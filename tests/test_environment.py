"""What a process has set for torch changes nothing: default device and dtype, inference and grad mode, autocast.

Each basic of a pool runs plainly and under each setting; what comes out is compared byte for byte.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from portakv import HybridKVPool, LayerSpec, Rope, check, dispatch, resolve_write_loc, testing
from portakv.buffers import Buffer
from portakv.kernels.cpu_amx import kernels as cpu_amx

LAYOUTS: dict[str, tuple[list[LayerSpec], dict[str, Any]]] = {
    "rows": ([LayerSpec(None, 2, 16, 8), LayerSpec(6, 2, 16)], {}),
    "fp8 rows": ([LayerSpec(None, 2, 16, 8), LayerSpec(6, 2, 16)], {"dtype": "fp8"}),
    "mla": ([LayerSpec(None, 1, 32, 16, mla=True), LayerSpec(6, 1, 32, 16, mla=True)], {}),
    "flashmla": ([LayerSpec(None, 1, 448, 64, mla=True)], {"dtype": "fp8", "layout": "flashmla"}),
    "flashmla_v32": ([LayerSpec(6, 1, 512, 64, mla=True)], {"dtype": "fp8", "layout": "flashmla_v32", "page_size": 1}),
    "cpu_amx": ([LayerSpec(None, 2, 32, 32), LayerSpec(6, 2, 32, 32)], {"layout": "cpu_amx", "page_size": 32}),
    "cpu_vec": ([LayerSpec(None, 2, 32, 32), LayerSpec(6, 2, 32, 32)], {"layout": "cpu_vec", "page_size": 32}),
}
ROWS = {"native": None, "reference": "reference"}


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    before = torch.get_default_device()
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Such a process fills what `empty` gives with NaN, and refuses some ops."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "default device meta": lambda: default_device("meta"),
    "device meta": lambda: torch.device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": deterministic,
}


class Session:
    """A pool's life in steps, which share nothing but what is kept here; `seen` is what came out."""

    def __init__(self, layout: str, row: str, requires_grad: bool = False) -> None:
        self.layers, self.options = LAYOUTS[layout]
        self.kernels, self.seen = ROWS[row], {}
        page = self.options.get("page_size", 4)
        self.page, self.tokens = page, 5 * page + 2
        rng = np.random.default_rng(0)
        self.rows = [
            [
                torch.from_numpy(rng.standard_normal((self.tokens, s.num_kv_heads, n))).to(torch.float32)
                for n in (s.head_dim, s.v_dim)
            ]
            for s in self.layers
        ]
        for k, v in self.rows:
            k.requires_grad_(requires_grad)
            v.requires_grad_(requires_grad)
        self.angles = torch.from_numpy(rng.standard_normal((64, 8))).to(torch.float32)
        self.positions = torch.from_numpy(np.arange(self.tokens))

    def see(self, name: str, value: Any) -> None:
        self.seen[name] = listed(value)

    def build(self) -> None:
        options = {"size": 32 * self.page, "swa_size": 24 * self.page, "page_size": self.page, "device": "cpu"}
        if self.kernels:
            os.environ["PORTAKV_KERNELS"] = ",".join(f"{op}={self.kernels}" for op in dispatch.OPS)
        try:
            self.pool = HybridKVPool(self.layers, check=True, **(options | self.options))
            self.draft = HybridKVPool(self.layers, slots_of=self.pool, **(options | self.options))
        finally:
            os.environ.pop("PORTAKV_KERNELS", None)
        self.graph = self.pool.graph_write_loc(self.tokens + 3, int32_twin=True)
        self.graph_plan = self.pool.graph_read_plan(3, 8 * self.page)
        self.see("state", (self.pool.full_to_swa, self.pool._faults, *(g.scales for g in self.pool.groups)))

    def scale(self) -> None:
        for layer, spec in enumerate(self.layers):
            heads = spec.num_kv_heads
            self.pool.set_scales(layer, 0.37, torch.from_numpy(np.linspace(1, 2, heads)))
            self.pool.set_scales(layer, None if layer else 3, [0.7, torch.from_numpy(np.ones(1, "f4"))][layer % 2])
        self.see("scales", [g.scales for g in self.pool.groups])

    def alloc(self) -> None:
        allocator = self.pool.allocator
        prompt = allocator.alloc(self.tokens - 2)
        more = allocator.alloc_extend([len(prompt)], [self.tokens - 1], [int(prompt[-1])])
        last = allocator.alloc_decode([self.tokens], [int(more[-1])])
        self.loc = torch.cat((prompt, more, last))
        self.see("loc", self.loc)

    def plan(self) -> None:
        self.write_loc = self.pool.plan_write(self.loc)
        narrow = self.pool.plan_write(self.loc, torch.int32)
        self.graph.fill(self.loc)
        cast = self.pool.cast_write_loc(self.write_loc)
        again = resolve_write_loc(self.pool, self.loc, narrow, index_dtype=torch.int64)
        nothing = resolve_write_loc(self.pool, None)
        self.see("plans", [(x.loc, x.swa_loc) for x in (self.write_loc, narrow, cast, again, nothing, self.graph)])
        self.see("twins", (self.graph.int32.loc, self.graph.int32.swa_loc))

    def store(self) -> None:
        for pool in (self.pool, self.draft):
            for layer, (k, v) in enumerate(self.rows):
                pool.set_kv_buffer(layer, self.write_loc, k, v)
        self.see("stored", [g.buffers for g in self.pool.groups])
        if pool.layout.packed:
            return
        for layer, (k, v) in enumerate(self.rows):
            rope = Rope(self.angles, self.positions)
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                self.draft.set_kv_buffer(layer, self.graph[: self.tokens], k.to(dtype), v.to(dtype), rope)
                self.see(f"rotated {layer} {dtype}", [g.buffers for g in self.draft.groups])

    def gather(self) -> None:
        self.outs = []
        for layer in range(len(self.layers)):
            self.outs.append(self.pool.gather_kv(layer, self.write_loc))
            self.see(f"gathered {layer}", self.outs[-1])
            self.see(f"gathered {layer} as float32", self.pool.gather_kv(layer, self.write_loc, dtype=torch.float32))
            self.see(f"cache {layer}", self.pool.get_kv_buffer(layer))

    def read(self) -> None:
        table = self.loc[None].repeat(3, 1)
        host = torch.from_numpy(np.full(3, self.tokens))
        rows, self.plans = torch.from_numpy(np.arange(3)), {}
        for structure in ("ragged", "pages", "rows", "query_rows"):
            for lens, more in (
                (host, {}),
                (host.int(), {"query_lens": 2, "extra_lens": None}),
                (host - 2, {"extra_lens": 2, "prefix_only": True}),
                (host - 2, {"extra_lens": rows.int() // 2}),
            ):
                plan = self.pool.plan_read(table, rows, lens, structure=structure, **more)
                self.see(f"plan {structure} {lens.dtype} {sorted(more)}", parts(plan))
            self.plans[structure] = self.pool.plan_read(table, rows, host, structure=structure)
        self.see("graph plan", parts(self.pool.plan_read(table, rows, host, out=self.graph_plan)))

    def read_again(self) -> None:
        """Into plans that another step made."""
        table, rows = self.loc[None].repeat(3, 1), torch.from_numpy(np.arange(3))
        for structure, plan in self.plans.items():
            self.pool.plan_read(table, rows, torch.from_numpy(np.array([5, 0, 3])), structure=structure, out=plan)
            self.see(f"plan {structure} again", parts(plan))
        for layer, outs in enumerate(self.outs):
            self.see(f"gathered {layer} again", self.pool.gather_kv(layer, self.write_loc, *outs))

    def move(self) -> None:
        target = self.pool.allocator.alloc(self.tokens)
        self.pool.move_kv_cache(target, self.loc)
        self.see("moved", [g.buffers for g in self.pool.groups])
        self.pool.allocator.free(target)

    def copy(self) -> None:
        self.copied = self.pool.copy_to_host(self.loc)
        self.see("copy", (*self.copied.keys, *self.copied.values, *self.copied.scales, self.copied.live))

    def evict(self) -> None:
        allocator = self.pool.allocator
        cursors = allocator.evict_swa(self.loc[None], [0], [0], [self.tokens]) if self.pool.window else None
        self.see("evicted", (cursors, allocator.is_live(self.loc), allocator.reusable_prefix(self.loc)))
        self.see("restored", allocator.restore_swa(self.loc))

    def free(self) -> None:
        self.pool.allocator.rewind(self.loc[-1:])
        self.pool.allocator.free(self.loc[:-1])
        self.see("faults", list(self.pool.faults(clear=True).values()))
        self.pool.check_integrity()

    def load(self) -> None:
        self.loc = self.pool.load_from_host(self.copied)
        self.see("loaded", (self.loc, *(b for g in self.pool.groups for b in g.buffers)))

    STEPS = (
        "build",
        "scale",
        "alloc",
        "plan",
        "store",
        "gather",
        "read",
        "read_again",
        "move",
        "copy",
        "evict",
        "free",
        "load",
        "free",
    )


def parts(plan: Any) -> list[Any]:
    return [[getattr(read, f.name) for f in fields(read)] for read in plan.structures]


def listed(value: Any) -> Any:
    """`value` as bytes, shapes and dtypes, to be compared outside of any setting."""
    if isinstance(value, torch.Tensor):
        assert value.device.type == "cpu"
        assert not value.requires_grad
        raw = value.detach().contiguous().view(torch.uint8) if value.numel() else value
        return str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return [listed(x) for x in value] if isinstance(value, (list, tuple)) else value


def live(setting: str | None, layout: str, row: str, steps: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
    """What a session sees whose steps run under a setting where `steps` says so."""
    session = Session(layout, row, requires_grad=setting == "grad")
    for i, step in enumerate(Session.STEPS):
        under = SETTINGS[setting]() if setting is not None and steps(i) else contextlib.nullcontext()
        with under:
            getattr(session, step)()
    return session.seen


@pytest.fixture(scope="module")
def plain() -> Callable[[str, str], dict[str, Any]]:
    seen: dict[tuple[str, str], dict[str, Any]] = {}

    def of(layout: str, row: str) -> dict[str, Any]:
        if (layout, row) not in seen:
            seen[layout, row] = live(None, layout, row)
        return seen[layout, row]

    return of


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_basics_are_the_same_under(setting: str, layout: str, row: str, plain: Any) -> None:
    assert live(setting, layout, row) == plain(layout, row)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("setting", ["inference mode", "default device meta"])
def test_the_basics_are_the_same_in_and_out_of(setting: str, layout: str, row: str, odd: int, plain: Any) -> None:
    """What was made inside is used outside, and the other way round."""
    assert live(setting, layout, row, lambda i: i % 2 == odd) == plain(layout, row)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_kit_is_the_same_under(setting: str) -> None:
    """Its inputs are the same bytes, kernels pass on them, and so do captured graphs."""
    for op in dispatch.OPS:
        cases = list(itertools.islice(testing.cases(op), 3, None, 40))
        plain = [[listed(x.storage) for x in testing.build(case) if isinstance(x, Buffer)] for case in cases]
        kernel = getattr(cpu_amx, op)
        with SETTINGS[setting]():
            built = [[x.storage for x in testing.build(case) if isinstance(x, Buffer)] for case in cases]
            for case in cases:
                testing.check(op, kernel, case, torch.device("cpu"))
        assert listed(built) == plain
    with SETTINGS[setting]():
        for graph in check.GRAPH_FILLS:
            assert check.check_graphs(graph, "native", torch.device("cpu")).result == "passed"
            assert check.check_graphs(graph, "reference", torch.device("cpu")).result == "passed"
        assert check.check_measure("native").result == "passed"
