"""Write locations in every mode of a forward: who makes them, when, and where each layer's bytes land.

Every test stores through a real pool and compares all of its bytes with what the allocator's host mapping and the
reference conversion say. Launches are counted at the kernels: one translation per forward, one store per layer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from portakv import HybridKVPool, KVWriteLoc, LayerSpec, check, dispatch, resolve_write_loc
from portakv.formats import PAD, SLOT_OPS, KVFormat
from portakv.kernels.reference import rows as reference
from portakv.write_loc import WriteLoc

pytestmark = pytest.mark.filterwarnings("error")

LAYERS = [LayerSpec(None, 2, 16, 8), LayerSpec(6, 2, 16, 8), LayerSpec(None, 1, 24), LayerSpec(4, 1, 24)]
DRAFT_LAYERS = [LayerSpec(None, 1, 16), LayerSpec(6, 1, 16)]
OPS = (*SLOT_OPS, *KVFormat(2, 16, 8, torch.bfloat16).ops)
JUNK = float("nan")


class Kernels:
    """Counts the launches of pools made while it is installed, and can keep a tape of them.

    A tape is what a captured graph is: the kernels and the tensors they were launched with, and no line of the engine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.stored: list[tuple[torch.Tensor, ...]] = []
        self._tape: list[Callable[[], None]] | None = None
        load = dispatch.load

        def watched(op: str, selection: dispatch.Selection) -> Callable[..., None]:
            run = load(op, selection)

            def launch(*args: Any) -> None:
                self.counts[op] += 1
                if op == "store_kv":
                    self.stored.append(args[:2])
                run(*args)

            def call(*args: Any) -> None:
                if self._tape is not None:
                    self._tape.append(lambda: launch(*args))
                launch(*args)

            return call

        monkeypatch.setattr(dispatch, "load", watched)

    def capture(self, step: Callable[[], None], device: torch.device) -> Callable[[], object]:
        """`step` as a graph to replay: the device's own where it has graphs, else a tape."""
        if check.has_graphs(device):
            return check.capture(step, device)
        self._tape = tape = []
        step()
        self._tape = None
        return lambda: [launch() for launch in tape]

    def take(self) -> Counter[str]:
        """The launches since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts


class Engine:
    """A pool, K and V rows at fixed addresses, and what every byte of the pool should be."""

    def __init__(self, pool: HybridKVPool, max_tokens: int = 16) -> None:
        self.pool = pool
        self.layers = range(len(pool.layers))
        self.generator = torch.Generator().manual_seed(0)
        dims = [[(s.num_kv_heads, dim) for dim in (s.head_dim, s.v_dim)] for s in pool.layers]
        self.rows = [
            [torch.zeros(max_tokens, *dim, dtype=torch.bfloat16, device=pool.device) for dim in pair] for pair in dims
        ]
        for layer in self.layers:
            pool.set_scales(layer, 0.5, 2.0)
        self.expected = [[x.to("cpu", copy=True) for x in pool.get_kv_buffer(layer)] for layer in self.layers]

    def fill_rows(self, live: int) -> None:
        """New K and V for the first `live` tokens; padded rows are NaN."""
        for pair in self.rows:
            for x in pair:
                x.copy_(torch.randn(x.shape, generator=self.generator) * 3)
                x[live:] = JUNK

    def store(self, write_loc: WriteLoc, tokens: slice = slice(None), layers: Sequence[int] | None = None) -> None:
        """What a forward's layers do with `tokens` of the rows."""
        for layer in self.layers if layers is None else layers:
            k, v = self.rows[layer]
            self.pool.set_kv_buffer(layer, write_loc, k[tokens], v[tokens])

    def expect(self, loc: torch.Tensor, tokens: slice = slice(None), layers: Sequence[int] | None = None) -> None:
        """Rows `tokens` are to be found at the full slots `loc`, and at what the host maps them to now."""
        for layer in self.layers if layers is None else layers:
            on_swa = self.pool.has_swa and self.pool.layers[layer].window is not None
            slots = torch.from_numpy(self.pool.allocator.mapping)[loc] if on_swa else loc
            spec = self.pool.layers[layer]
            fmt = KVFormat(spec.num_kv_heads, spec.head_dim, spec.v_dim, self.pool.dtype, self.pool.page_size)
            for cache, x, scale in zip(self.expected[layer], self.rows[layer], (0.5, 2.0), strict=True):
                rows = x[tokens][: len(loc)].cpu()
                inv = torch.full((spec.num_kv_heads,), 1 / scale)
                values = reference.convert(rows, fmt, inv).contiguous().view(torch.uint8)
                cache.view(torch.uint8)[slots[slots >= fmt.page_size]] = values[slots >= fmt.page_size]

    def compare(self) -> None:
        for layer in self.layers:
            for what, want, got in zip("KV", self.expected[layer], self.pool.get_kv_buffer(layer), strict=True):
                a, b = want.view(torch.uint8).flatten(1), got.cpu().view(torch.uint8).flatten(1)
                assert torch.equal(a, b), f"layer {layer} {what}: rows {(a != b).any(1).nonzero().flatten().tolist()}"
        assert not any(self.pool.faults().values())
        self.pool.check_integrity()

    def forward(self, loc: torch.Tensor, write_loc: WriteLoc) -> None:
        """An eager forward over `loc`, compared."""
        self.fill_rows(len(loc))
        self.store(write_loc, slice(0, len(loc)))
        self.expect(loc)
        self.compare()


@pytest.fixture(autouse=True)
def no_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No path here is one that an engine's log should hear of."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


@pytest.fixture(params=["automatic", "reference"])
def make_pool(request: pytest.FixtureRequest, kernels: Kernels, device: torch.device) -> Callable[..., HybridKVPool]:
    """Pools whose launches `kernels` counts: on the rows the device gets by itself, and on the reference."""
    chosen = None if request.param == "automatic" else dict.fromkeys(OPS, "reference")

    def make(layers: Sequence[LayerSpec] = LAYERS, **options: Any) -> HybridKVPool:
        sizes = {"size": 96, "swa_size": 64} | options
        pool = HybridKVPool(layers, device=device, kernels=chosen, **sizes)
        if "slots_of" not in options:
            pool.allocator.alloc(pool.page_size, swa_tail=0)  # so that no slot equals its peer
        kernels.take()
        return pool

    return make


@pytest.fixture(params=[(torch.bfloat16, 1), (torch.float8_e5m2, 4)], ids=["bf16", "fp8, pages"])
def engine(request: pytest.FixtureRequest, make_pool: Callable[..., HybridKVPool]) -> Engine:
    dtype, page_size = request.param
    return Engine(make_pool(dtype=dtype, page_size=page_size))


def stores(engine: Engine, forwards: int = 1, translations: int = 1) -> Counter[str]:
    """The launches of some forwards."""
    return Counter(translate_loc=translations, store_kv=forwards * len(engine.layers))


# Eager.


def test_eager_forwards_translate_once_each(engine: Engine, kernels: Kernels) -> None:
    allocator = engine.pool.allocator
    loc = allocator.alloc_extend([0, 0], [9, 4], [-1, -1])
    engine.forward(loc, engine.pool.plan_write(loc))
    last, lens = loc[[8, 12]], torch.tensor([9, 4])
    for _ in range(6):
        lens = lens + 1
        last = allocator.alloc_decode(lens, last)
        engine.forward(last, engine.pool.plan_write(last))
    assert kernels.take() == stores(engine, forwards=7, translations=7)


# Graphs.


@pytest.mark.parametrize("inside", [False, True], ids=["filled before replay", "filled inside"])
def test_full_graphs(inside: bool, engine: Engine, kernels: Kernels) -> None:
    """Two captured sizes over one GraphWriteLoc, replayed for batches that shrink, grow and are empty."""
    pool, device = engine.pool, engine.pool.device
    write_loc, slots = pool.graph_write_loc(12), torch.zeros(12, dtype=torch.int64, device=device)

    def step(size: int) -> None:
        if inside:
            write_loc.fill(slots[:size])
        engine.store(write_loc[:size], slice(0, size))

    graphs = {size: kernels.capture(lambda size=size: step(size), device) for size in (4, 12)}
    kernels.take()
    for live in (12, 7, 3, 0, 1, 12, 4):
        loc = pool.allocator.alloc(live).flip(0)
        engine.fill_rows(live)
        if inside:
            slots.fill_(PAD)[:live] = loc.to(device)
        else:
            write_loc.fill(loc)
        graphs[4 if live <= 4 else 12]()
        engine.expect(loc)
        engine.compare()
        if not check.has_graphs(device):
            assert kernels.take() == stores(engine)
        pool.allocator.free(loc)


def test_piecewise_graphs_see_fewer_tokens_by_a_slice(engine: Engine, kernels: Kernels) -> None:
    """The plan is made on the padded batch; attention, between the captured pieces, stores the live tokens only."""
    pool, live = engine.pool, 11
    loc = torch.cat((pool.allocator.alloc(live), torch.zeros(5, dtype=torch.int64)))
    engine.fill_rows(live)
    write_loc = pool.plan_write(loc)
    assert len(write_loc) == 16
    engine.store(write_loc[:live], slice(0, live), layers=[0, 1])
    # A piece that was compiled for the padded size stores all of it.
    engine.store(write_loc, layers=[2, 3])
    engine.expect(loc[:live])
    engine.compare()
    assert kernels.take() == stores(engine)


def test_breakable_graphs_share_one_location(engine: Engine, kernels: Kernels) -> None:
    """Layers 0 and 3 are in captured pieces of the padded size; the break between them sees the live tokens."""
    pool, device = engine.pool, engine.pool.device
    write_loc = pool.graph_write_loc(16)
    first = kernels.capture(lambda: engine.store(write_loc, layers=[0]), device)
    last = kernels.capture(lambda: engine.store(write_loc, layers=[3]), device)
    for live in (16, 6, 1):
        loc = pool.allocator.alloc(live)
        engine.fill_rows(live)
        kernels.take()
        write_loc.fill(loc)
        first()
        engine.store(write_loc[:live], slice(0, live), layers=[1, 2])
        last()
        engine.expect(loc)
        engine.compare()
        if not check.has_graphs(device):
            assert kernels.take() == stores(engine)


# Data-parallel padding and idle ranks.


def test_dp_padding_after_the_plan(engine: Engine, kernels: Kernels) -> None:
    """Padded to the longest rank once it was planned: the plan is of another length, and is made again."""
    pool = engine.pool
    loc = pool.allocator.alloc(3)
    plan = pool.plan_write(loc, torch.int32)
    kernels.take()
    padded = torch.cat((loc, torch.full((5,), PAD)))
    write_loc = resolve_write_loc(pool, padded, plan)
    assert len(write_loc) == 8
    engine.fill_rows(3)
    engine.store(write_loc, slice(0, 8))
    engine.expect(loc)
    engine.compare()
    assert kernels.take() == stores(engine)


def test_a_plan_of_more_tokens_is_made_again(engine: Engine, kernels: Kernels) -> None:
    """A batch shrinks from the front as well: whose slots the plan's first ones are, nobody knows."""
    loc = engine.pool.allocator.alloc(2 * engine.pool.page_size)
    plan, rest = engine.pool.plan_write(loc, torch.int32), loc[engine.pool.page_size :]
    kernels.take()
    engine.forward(rest, resolve_write_loc(engine.pool, rest, plan))
    assert kernels.take() == stores(engine)


def test_dp_padding_before_the_plan(engine: Engine, kernels: Kernels) -> None:
    """A plan of the padded batch serves layers that see the batch without padding, cut from either side."""
    pool = engine.pool
    loc = pool.allocator.alloc(3)
    plan = pool.plan_write(torch.cat((loc, torch.full((5,), PAD))))
    engine.fill_rows(3)
    engine.store(plan[:3], slice(0, 3), layers=[0, 1])
    assert plan.swa_loc is not None
    engine.store(KVWriteLoc(plan.loc[:3], plan.swa_loc), slice(0, 3), layers=[2, 3])
    engine.expect(loc)
    engine.compare()
    assert kernels.take() == stores(engine)


@pytest.mark.parametrize("loc", [None, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)])
def test_idle_rank_without_tokens(loc: torch.Tensor | None, engine: Engine, kernels: Kernels) -> None:
    """Nothing is translated, and its layers store nothing."""
    left_over = engine.pool.plan_write(engine.pool.allocator.alloc(2))
    kernels.take()
    for plan in (None, left_over, engine.pool.graph_write_loc(4)):
        write_loc = resolve_write_loc(engine.pool, loc, plan, idle=True)
        assert len(write_loc) == 0
        assert write_loc.swa_loc is not None
        assert {write_loc.loc.dtype, write_loc.swa_loc.dtype} == {torch.int32}
        assert write_loc.loc.device == engine.pool.device
    assert not kernels.take()
    engine.store(write_loc, slice(0, 0))
    engine.compare()


def test_idle_rank_with_padding(engine: Engine, kernels: Kernels) -> None:
    """Its padding may be as long as the last batch, whose plan is still around."""
    pool = engine.pool
    loc = pool.allocator.alloc(2)
    left_over = pool.plan_write(loc, torch.int32)
    engine.forward(loc, left_over)
    padding = torch.zeros(2, dtype=torch.int64)
    assert resolve_write_loc(pool, padding, left_over) is left_over
    kernels.take()
    write_loc = resolve_write_loc(pool, padding, left_over, idle=True)
    engine.fill_rows(0)
    engine.store(write_loc, slice(0, 2))
    engine.compare()
    assert kernels.take() == stores(engine)


# Locations that were ready before the forward.


def test_plans_travel_with_their_batches(engine: Engine, kernels: Kernels) -> None:
    """A scheduler that runs ahead plans several batches before the first one is stored; each keeps its own."""
    pool = engine.pool
    locs = [pool.allocator.alloc(n) for n in (8, 8, 5)]
    plans = [pool.plan_write(loc, torch.int32) for loc in locs]
    assert kernels.take() == {"translate_loc": 3}
    for loc, plan in zip(locs, plans, strict=True):
        write_loc = resolve_write_loc(pool, loc, plan)
        assert write_loc is plan
        engine.forward(loc, write_loc)
    assert kernels.take() == stores(engine, forwards=3, translations=0)


def test_a_ready_plan_is_never_derived_again(engine: Engine, kernels: Kernels) -> None:
    """The mapping moves on behind a plan (its slots evicted and given to others): the batch still writes where its
    scheduler said, in the full side and in the SWA side."""
    pool, page = engine.pool, engine.pool.page_size
    loc = pool.allocator.alloc(2 * page)
    plan = pool.plan_write(loc, torch.int32)
    engine.fill_rows(len(loc))
    engine.expect(loc)
    pool.allocator.free_swa(loc[:page])
    other = pool.allocator.alloc(page)
    kernels.take()
    engine.store(resolve_write_loc(pool, loc, plan), slice(0, len(loc)))
    engine.compare()
    assert kernels.take() == stores(engine, translations=0)
    assert resolve_write_loc(pool, other, plan[:page]) is not plan


# The four resolutions.


def test_resolution_translates_without_a_plan(engine: Engine, kernels: Kernels) -> None:
    loc = engine.pool.allocator.alloc(5)
    write_loc = resolve_write_loc(engine.pool, loc)
    assert {write_loc.loc.dtype, write_loc.swa_loc.dtype} == {torch.int32}
    engine.forward(loc, write_loc)
    assert kernels.take() == stores(engine)


@pytest.mark.parametrize("wanted", [torch.int32, torch.int64])
@pytest.mark.parametrize("made", [torch.int32, torch.int64])
def test_resolution_casts_only_where_the_width_differs(
    made: torch.dtype, wanted: torch.dtype, engine: Engine, kernels: Kernels
) -> None:
    loc = engine.pool.allocator.alloc(5)
    plan = engine.pool.plan_write(loc, made)
    kernels.take()
    write_loc = resolve_write_loc(engine.pool, loc, plan, index_dtype=wanted)
    assert (write_loc is plan) == (made == wanted)
    assert {write_loc.loc.dtype, write_loc.swa_loc.dtype} == {wanted}
    # Once per side, and none of them a translation.
    assert kernels.take() == ({"cast_loc": 2} if (made, wanted) == (torch.int64, torch.int32) else {})
    engine.forward(loc, write_loc)


def test_resolution_takes_a_graphs_locations(engine: Engine) -> None:
    pool = engine.pool
    loc = pool.allocator.alloc(4)
    graph = pool.graph_write_loc(4, int32_twin=True)
    graph.fill(loc)
    assert resolve_write_loc(pool, loc, graph.int32) is graph.int32
    assert resolve_write_loc(pool, loc, graph, index_dtype=torch.int64) is graph
    engine.forward(loc, resolve_write_loc(pool, loc, graph.int32))


def test_resolution_wants_both_sides(engine: Engine, kernels: Kernels) -> None:
    """As from a draft pool without SWA layers: its plan names no SWA slots."""
    loc = engine.pool.allocator.alloc(4)
    bare = KVWriteLoc(loc.to(engine.pool.device))
    engine.forward(loc, resolve_write_loc(engine.pool, loc, bare))
    assert kernels.take() == stores(engine)


def test_resolution_of_a_pool_with_one_side(make_pool: Callable[..., HybridKVPool], kernels: Kernels) -> None:
    engine = Engine(make_pool(swa_size=None))
    loc = engine.pool.allocator.alloc(4)
    plan = engine.pool.plan_write(loc, torch.int32)
    assert resolve_write_loc(engine.pool, loc, plan) is plan
    assert resolve_write_loc(engine.pool, None).swa_loc is None
    engine.forward(loc, plan)


@pytest.mark.parametrize("wide", ["loc", "swa_loc"])
def test_resolution_casts_the_side_that_is_wide(wide: str, engine: Engine) -> None:
    loc = engine.pool.allocator.alloc(5)
    narrow = engine.pool.plan_write(loc, torch.int32)
    sides = {"loc": narrow.loc, "swa_loc": narrow.swa_loc}
    write_loc = resolve_write_loc(engine.pool, loc, KVWriteLoc(**sides | {wide: sides[wide].long()}))
    assert {write_loc.loc.dtype, write_loc.swa_loc.dtype} == {torch.int32}
    engine.forward(loc, write_loc)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("loc", None, torch.int16), TypeError, "index_dtype: expected torch.int32 or torch.int64, got torch.int16"),
        (("loc", "loc", torch.int32), TypeError, "plan: expected a KVWriteLoc or GraphWriteLoc, got Tensor"),
        (
            ("loc", KVWriteLoc(*torch.ones(2, 2, dtype=torch.int64, device="meta")), torch.int32),
            ValueError,
            "plan: expected slots on .*, got meta",
        ),
        (([1], None, torch.int32), TypeError, "loc: expected an int32 or int64 tensor, got list"),
        ((torch.zeros(2, 2).long(), None, torch.int32), ValueError, "loc: expected 1-D slots"),
    ],
)
def test_resolution_refuses(
    arguments: tuple[Any, ...], error: type[Exception], words: str, engine: Engine, kernels: Kernels
) -> None:
    slots = engine.pool.allocator.alloc(2)
    loc, plan, width = (slots if isinstance(x, str) else x for x in arguments)
    with pytest.raises(error, match=words):
        resolve_write_loc(engine.pool, loc, plan, index_dtype=width)
    assert not kernels.take()


# Speculative decoding.


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
@pytest.mark.parametrize("graph", [False, True], ids=["plan", "graph"])
@pytest.mark.parametrize("topk", [1, 3], ids=["chain", "tree"])
def test_draft_steps_take_their_own_columns(
    topk: int, graph: bool, width: torch.dtype, engine: Engine, kernels: Kernels
) -> None:
    """EAGLE: slots `[requests, branches, steps]` translated once; step s writes column s, a slice with a step."""
    pool, requests, steps = engine.pool, 2, 2
    loc = pool.allocator.alloc(requests * topk * steps)
    if graph:
        made = pool.graph_write_loc(16, int32_twin=True)
        made.fill(loc)
        write_loc = (made.int32 if width == torch.int32 else made)[: len(loc)]
    else:
        write_loc = pool.plan_write(loc, width)
    for step in range(steps):
        column = write_loc[step::steps]
        assert column.loc.stride() == (steps,)
        assert column.loc.data_ptr() == write_loc.loc.data_ptr() + step * width.itemsize
        engine.fill_rows(requests * topk)
        engine.store(column, slice(0, requests * topk))
        engine.expect(loc[step::steps])
        engine.compare()
    assert kernels.take() == stores(engine, forwards=steps)


def test_draft_steps_in_captured_graphs(engine: Engine, kernels: Kernels) -> None:
    """All steps in one graph, each over its column of the same fixed locations."""
    pool, device, steps = engine.pool, engine.pool.device, 3
    write_loc = pool.graph_write_loc(12)

    def draft() -> None:
        for step in range(steps):
            engine.store(write_loc[step::steps], slice(step * 4, step * 4 + 4))

    replay = kernels.capture(draft, device)
    for requests in (4, 2):
        loc = pool.allocator.alloc(requests * steps)
        write_loc.fill(loc)
        engine.fill_rows(12)
        kernels.take()
        replay()
        for step in range(steps):
            engine.expect(loc[step::steps], slice(step * 4, step * 4 + requests))
        engine.compare()
        if not check.has_graphs(device):
            assert kernels.take() == {"store_kv": steps * len(engine.layers)}


@pytest.mark.parametrize(
    ("layers", "swa_size"),
    [(DRAFT_LAYERS, 64), (DRAFT_LAYERS[:1], None), (DRAFT_LAYERS, None)],
    ids=["hybrid", "full", "windows on the full side"],
)
def test_draft_pool_on_the_targets_slots(
    layers: list[LayerSpec], swa_size: int | None, make_pool: Callable[..., HybridKVPool], kernels: Kernels
) -> None:
    """Prefill, draft, verify and draft-extend with one translation each, which serves both pools."""
    target = Engine(make_pool())
    draft = Engine(make_pool(layers, slots_of=target.pool, swa_size=swa_size))
    both = [draft, target]
    loc = target.pool.allocator.alloc(7)
    plan = target.pool.plan_write(loc)
    for engine in both:
        engine.forward(loc, plan)
    # Three drafts for each of two requests, then all of them verified by the target in one forward.
    drafted = target.pool.allocator.alloc(6)
    plan = target.pool.plan_write(drafted)
    for step in range(3):
        draft.fill_rows(2)
        draft.store(plan[step::3], slice(0, 2))
        draft.expect(drafted[step::3])
        draft.compare()
    target.forward(drafted, plan)
    # Draft-extend writes what the target accepted, two of the first request and one of the second, over the drafts.
    accepted = torch.tensor([0, 1, 3])
    extend = target.pool.plan_write(drafted[accepted])
    draft.forward(drafted[accepted], extend)
    target.compare()
    assert kernels.take() == Counter(translate_loc=3, store_kv=2 * len(target.layers) + 5 * len(draft.layers))


def test_target_verify_keeps_what_was_accepted(engine: Engine, kernels: Kernels) -> None:
    """A tree of drafts is stored, the accepted path moved to the front of its slots, and the rest taken back."""
    pool, page = engine.pool, engine.pool.page_size
    prefix = pool.allocator.alloc(page)
    drafts = pool.allocator.alloc_extend([page], [page + 6], prefix[-1:])
    engine.forward(drafts, pool.plan_write(drafts))
    path = drafts[[0, 2, 5]]
    kept, rejected = drafts[:3], drafts[3:]
    kernels.take()
    pool.move_kv_cache(kept, path)
    for layer in engine.layers:
        for x in engine.rows[layer]:
            x[:3] = x[[0, 2, 5]]
    engine.expect(kept, slice(0, 3))
    pool.allocator.rewind(rejected)
    engine.compare()
    assert kernels.take() == {"translate_loc": 2, "move_kv": len(pool.groups)}


# Consumers that index in 32 bits.


def test_int32_locations_are_one_launch(engine: Engine, kernels: Kernels) -> None:
    loc = engine.pool.allocator.alloc(9)
    write_loc = engine.pool.plan_write(loc, torch.int32)
    assert {write_loc.loc.dtype, write_loc.swa_loc.dtype} == {torch.int32}
    assert kernels.take() == {"translate_loc": 1}
    engine.forward(loc, write_loc)
    assert kernels.take() == stores(engine, translations=0)


# The fused write of trtllm_mha.


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_a_quantised_layer_is_one_launch(
    dtype: torch.dtype, make_pool: Callable[..., HybridKVPool], kernels: Kernels
) -> None:
    """From ready locations, a layer's call is one kernel, handed the model's own K and V: which side, scale, rounding
    and store are all in it."""
    engine = Engine(make_pool(dtype=dtype))
    pool = engine.pool
    loc = pool.allocator.alloc(13)
    ready = pool.plan_write(loc)
    kernels.take()
    engine.fill_rows(13)
    slots = {False: loc, True: torch.from_numpy(pool.allocator.mapping)[loc]}
    for layer, spec in enumerate(pool.layers):
        scales = [torch.linspace(0.25, 3, spec.num_kv_heads) + layer, torch.tensor(0.7)]
        pool.set_scales(layer, *scales)
        # Slices of a fused projection.
        qkv = torch.cat([x[:13] for x in engine.rows[layer]], dim=2)
        k, v = qkv.split([spec.head_dim, spec.v_dim], dim=2)
        kernels.stored.clear()
        pool.set_kv_buffer(layer, ready, k, v)
        assert kernels.take() == {"store_kv": 1}
        ((k_seen, v_seen),) = kernels.stored
        assert k_seen is k and v_seen is v
        fp8 = KVFormat(1, 1, 1, dtype).fp8
        for cache, x, scale in zip(pool.get_kv_buffer(layer), (k, v), scales, strict=True):
            inv = 1 / scale.expand(spec.num_kv_heads)
            want = reference.quantise(x.cpu(), fp8, inv)
            got = cache.cpu().view(torch.uint8)[slots[spec.window is not None]]
            assert torch.equal(got, want.view(torch.uint8))
    assert not any(pool.faults().values())
