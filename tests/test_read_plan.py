"""Read plans: attention in float64 over exactly what a plan names equals attention over the plain sequence."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from portakv import CONSUMERS, HybridKVPool, LayerSpec, ReadIndices, ReadPlan, ReadStyle, Structure, dispatch
from portakv import device as devices
from portakv.check import capture
from portakv.device import Device
from portakv.errors import SlotOwnership
from portakv.formats import SLOT_OPS, KVFormat

Tensor = torch.Tensor

H, D, DV = 2, 8, 4
LAYERS = [
    LayerSpec(None, H, D, DV),
    LayerSpec(5, H, D, DV),
    LayerSpec(8, H, D, DV),
    LayerSpec(5, H, D, DV),
    LayerSpec(3, H, D, DV, alias_of=2),  # the rows of layer 2 under a window of its own
]
WINDOWS = [5, 8]
PAGES = [1, 4, 16]
TOLERANCE = 1e-12
OPS = (*SLOT_OPS, *KVFormat(H, D, DV, torch.float32).ops)


def rows_here() -> list[str]:
    """The rows of the CPU column that can serve on this machine."""
    chosen = dispatch.select("store_kv", dispatch.facts("cpu"))
    return [chosen.row.name, *(row.name for row, why in chosen.rejected if why.endswith("comes first"))]


@pytest.fixture(params=rows_here())
def kernels(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str] | None:
    monkeypatch.setenv("PORTAKV_KERNELS", f"measure_read={request.param}")
    return dict.fromkeys(OPS, request.param) if device.type == "cpu" else None


def edges(page: int) -> list[int]:
    """Lengths at every edge of the windows and of the page, and well past both."""
    near = {w + d for w in (*WINDOWS, page, 2 * page) for d in (-1, 0, 1)}
    return sorted({0, 1, 2, 41, *near})


class World:
    """A pool with a sequence of each length in it, and its K and V once more, plain."""

    def __init__(self, lengths: list[int], page: int, device: torch.device, kernels: Any, **options: Any) -> None:
        self.lengths, self.page = lengths, page
        options = {"size": 1024, "swa_size": 512, "dtype": torch.float32, **options}
        self.pool = HybridKVPool(LAYERS, page_size=page, device=device, kernels=kernels, **options)
        generator = torch.Generator().manual_seed(page)
        # Full slots lie above every SWA row, and a row of the table is not where the batch says it is.
        self.pool.allocator.alloc(600 // page * page, swa_tail=0)
        order = torch.randperm(len(lengths) + 3, generator=generator)
        self.rows = order[: len(lengths)]
        self.host_table = torch.full((len(order), max(lengths) + 7), -1, dtype=torch.int64)
        self.plain: list[dict[int, tuple[Tensor, Tensor]]] = []
        for row, n in zip(self.rows.tolist(), lengths, strict=True):
            loc = self.pool.allocator.alloc(n)
            self.host_table[row, :n] = loc
            write_loc, of_layer = self.pool.plan_write(loc), {}
            for layer, spec in enumerate(LAYERS):
                k, v = (torch.randn(n, H, dim, generator=generator) for dim in (D, DV))
                if spec.alias_of is None:
                    self.pool.set_kv_buffer(layer, write_loc, k.to(device), v.to(device))
                    of_layer[layer] = (k.double(), v.double())
                else:
                    of_layer[layer] = of_layer[spec.alias_of]
            self.plain.append(of_layer)
        self.queries = torch.randn(len(lengths), max(lengths, default=0) + 1, H, D, generator=generator).double()

    @property
    def table(self) -> Tensor:
        return self.host_table.to(self.pool.device)

    def evict(self, first: list[int]) -> None:
        """Let go of what no query from position `first[b]` on sees."""
        if self.pool.has_swa:
            self.pool.allocator.evict_swa(self.host_table, self.rows, [0] * len(first), first)


@dataclasses.dataclass
class Mode:
    """A kind of forward: how many of each sequence's tokens are queries, and how a plan is asked for it."""

    queries: Callable[[int, int], int]  # (sequence, its length) -> queries
    arguments: Callable[[Tensor, Tensor], dict[str, Any]]  # (lengths, queries) -> of plan_read
    prefix_only: bool = False


def varied(b: int, n: int) -> int:
    return min(n, (1, 2, 4, 7, 0, 12)[b % 6])


MODES = {
    "decode": Mode(lambda b, n: 1, lambda n, q: {"seq_lens": n}),
    "extend": Mode(varied, lambda n, q: {"seq_lens": n, "query_lens": q}),
    "verify": Mode(varied, lambda n, q: {"seq_lens": n - q, "extra_lens": q}),
    "chunk": Mode(varied, lambda n, q: {"seq_lens": n - q // 2, "extra_lens": q // 2, "query_lens": q}),
    "decode's prefix": Mode(lambda b, n: 1, lambda n, q: {"seq_lens": n, "prefix_only": True}, prefix_only=True),
    "prefix": Mode(varied, lambda n, q: {"seq_lens": n, "query_lens": q, "prefix_only": True}, prefix_only=True),
}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`q [H, D]` over `k [n, H, D]` and `v [n, H, Dv]`, without a mask."""
    weights = torch.softmax(torch.einsum("hd,nhd->hn", q, k) * D**-0.5, dim=-1)
    return torch.einsum("hn,nhd->hd", weights, v)


def visible(positions: Tensor, p: int, window: int | None) -> Tensor:
    return (positions <= p) & (True if window is None else positions > p - window)


def named(read: ReadIndices, row: int, page: int) -> tuple[Tensor, Tensor]:
    """The slots that a row of a structure names, and their positions."""
    n, start = int(read.lens[row]), int(read.starts[row])
    if read.structure is Structure.RAGGED:
        begin, end = read.indptr[row : row + 2].tolist()
        assert end - begin == n
        slots = read.indices[begin:end]
    elif read.structure is Structure.PAGES:
        column = torch.arange(n)
        slots = read.indices[row].cpu()[column // page] * page + column % page
        assert start % page == 0
    else:
        slots = read.indices[row, :n]
    return slots.cpu().long(), start + torch.arange(n)


def compare(world: World, plan: ReadPlan, counts: list[int], prefix_only: bool = False) -> float:
    """The largest difference, over layers, sequences and their last `counts[b]` tokens as queries."""
    worst = 0.0
    for layer, spec in enumerate(LAYERS):
        read = plan.for_layer(layer)
        assert read.window == spec.window
        assert read.side == ("full" if spec.window is None or not world.pool.has_swa else "swa")
        k_cache, v_cache = (cache.cpu().double() for cache in world.pool.get_kv_buffer(layer))
        query_row = 0
        for b, (n, count) in enumerate(zip(world.lengths, counts, strict=True)):
            k_plain, v_plain = (x[:n] for x in world.plain[b][layer])
            if n == 0:
                assert read.structure is not Structure.QUERY_ROWS or not read.lens[query_row : query_row + count].any()
                query_row += count
                continue
            for i in range(count):
                p, q = n - count + i, world.queries[b, i]
                by_query = read.structure is Structure.QUERY_ROWS
                slots, positions = named(read, query_row if by_query else b, world.page)
                k, v = k_cache[slots], v_cache[slots]
                if prefix_only:
                    k, v = torch.cat((k, k_plain[n - count :])), torch.cat((v, v_plain[n - count :]))
                    positions = torch.cat((positions, torch.arange(n - count, n)))
                seen = visible(positions, p, spec.window)
                exact = by_query or (count == 1 and read.structure is not Structure.PAGES)
                exact = exact and not prefix_only
                assert not exact or seen.all(), "named a key that no query sees"
                of_plain = visible(torch.arange(n), p, spec.window)
                want = attend(q, k_plain[of_plain], v_plain[of_plain])
                got = attend(q, k[seen], v[seen]) if seen.any() else torch.full_like(want, torch.inf)
                worst = max(worst, float((got - want).abs().max()))
                query_row += 1
    return worst


def choices() -> Iterator[Any]:
    for structure, index_dtype, pad in itertools.product(Structure, (torch.int32, torch.int64), (0, -1)):
        name = f"{structure.value}-{str(index_dtype)[6:]}-{pad}"
        yield pytest.param({"structure": structure, "index_dtype": index_dtype, "pad": pad}, id=name)


def ask(world: World, mode: str, given: torch.dtype = torch.int64, **options: Any) -> tuple[ReadPlan, list[int]]:
    """A plan for a forward of `mode` over every sequence, with its lengths in `given`, after an eviction for it."""
    counts = [MODES[mode].queries(b, n) for b, n in enumerate(world.lengths)]
    world.evict([max(n - count, 0) for n, count in zip(world.lengths, counts, strict=True)])
    lengths = (torch.tensor(x, dtype=given) for x in (world.lengths, counts))
    arguments = MODES[mode].arguments(*lengths)
    plan = world.pool.plan_read(world.table, world.rows.to(given), **arguments, **options)
    return plan, counts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", list(choices()))
@pytest.mark.parametrize("page", PAGES)
def test_every_structure_names_what_attention_needs(device, kernels, page, options, mode):
    world = World(edges(page), page, device, kernels)
    plan, counts = ask(world, mode, **options)
    for read in plan.structures:
        tensors = [x for x in (read.indices, read.indptr, read.lens, read.starts) if x is not None]
        assert {x.dtype for x in tensors} == {options["index_dtype"]}
        assert {x.device for x in tensors} == {world.pool.device}
    assert compare(world, plan, counts, MODES[mode].prefix_only) <= TOLERANCE
    assert not any(world.pool.faults().values())


@pytest.mark.parametrize("mode", ["decode", "verify"])
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_every_consumer(device, kernels, consumer, mode):
    world = World(edges(16), 16, device, kernels)
    plan, counts = ask(world, mode, consumer=consumer)
    assert plan.style is CONSUMERS[consumer]
    assert compare(world, plan, counts) <= TOLERANCE


@pytest.mark.parametrize("structure", Structure)
def test_without_an_swa_side_windows_are_clipped_and_not_translated(device, kernels, structure):
    world = World(edges(4), 4, device, kernels, swa_size=None)
    plan, counts = ask(world, "verify", structure=structure)
    assert {read.side for read in plan.structures} == {"full"}
    assert compare(world, plan, counts) <= TOLERANCE


def test_the_table_of_consumers():
    """What each consumer takes, row by row: `../shared/FACTS.md` of SGLang 0.5.23, in this API's words."""
    ragged, pages, rows, query_rows = Structure
    i32, i64 = torch.int32, torch.int64
    # full, window, indices, write locations, pad, offset bits, keys that SGLang's own plan is short in decode
    assert {name: (*dataclasses.astuple(style)[:6], style.decode_keys_short) for name, style in CONSUMERS.items()} == {
        "triton": (ragged, ragged, i64, i64, 0, 64, 1),
        "flashinfer": (ragged, ragged, i32, i64, 0, 64, 0),
        "flashattention": (pages, pages, i32, i64, 0, 64, 0),
        "trtllm_mha": (pages, pages, i32, i64, 0, 64, 0),
        "aiter": (pages, ragged, i32, i64, 0, 32, 0),
        "intel_xpu": (pages, pages, i32, i64, 0, 64, 0),
        "intel_amx": (rows, rows, i64, i64, 0, 64, 0),
        "torch_native": (rows, rows, i64, i64, 0, 64, 0),
        "musa": (pages, pages, i32, i64, 0, 64, 0),
        "ascend": (pages, pages, i32, i32, 0, 64, 0),
        "flashmla": (pages, query_rows, i32, i32, -1, 64, 0),
        "deepseek_v4": (pages, query_rows, i32, i32, -1, 64, 0),
    }
    assert {name for name, style in CONSUMERS.items() if style.page_divides} == {"trtllm_mha"}
    assert {name for name, style in CONSUMERS.items() if style.column_multiple > 1} == {"flashmla", "deepseek_v4"}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_decode_shows_the_whole_window_to_every_consumer(device, kernels, consumer):
    """Also where the consumer's own engine shows a key fewer."""
    world = World([1, 4, 5, 6, 20], 1, device, kernels)
    plan, _ = ask(world, "decode", consumer=consumer)
    assert plan.for_layer(1).lens.tolist()[:5] == [1, 4, 5, 5, 5]


def test_buffers_fit_lengths_on_the_host(kernels):
    """A sequence without queries takes no room among the query rows, however long it is."""
    world = World([40, 3, 9], 4, torch.device("cpu"), kernels)
    shapes = {Structure.RAGGED: (13,), Structure.PAGES: (3, 3), Structure.ROWS: (3, 9), Structure.QUERY_ROWS: (3, 9)}
    for structure, shape in shapes.items():
        lengths = torch.tensor(world.lengths if structure is Structure.QUERY_ROWS else [1, 3, 9])
        plan = world.pool.plan_read(world.table, world.rows, lengths, torch.tensor([0, 1, 2]), structure=structure)
        assert plan.structures[0].indices.shape == shape


@pytest.mark.parametrize("structure", Structure)
@pytest.mark.parametrize("page", PAGES)
def test_every_row_sizes_its_buffers_alike(structure, page, monkeypatch):
    random.seed(page)
    layers, pools = [LayerSpec(window, 1, 8) for window in (None, 1, 5, 16)], []
    for row in rows_here():
        monkeypatch.setenv("PORTAKV_KERNELS", f"measure_read={row}")
        kernels = dict.fromkeys(SLOT_OPS, row)
        pools.append(HybridKVPool(layers, size=64, swa_size=48, page_size=page, device="cpu", kernels=kernels))
    assert len({pool._planner._measure for pool in pools}) == len(pools)
    style = ReadStyle(structure, structure, torch.int64, pad=-1, column_multiple=3)
    table = torch.arange(3 * 40).view(3, 40) % 60
    for size in (0, 1, 1, 2, 3, 7) * 8:
        extra = [random.choice((0, 1, 5)) for _ in range(size)]
        seq = [random.choice((0, 1, 4, 5, 16, 17, 35)) for _ in range(size)]
        queries = [random.randint(0, n) for n in seq]
        lengths = [torch.tensor(x, dtype=torch.int32).repeat_interleave(2)[::2] for x in (seq, queries, extra)]
        rows = torch.tensor([random.randint(0, 2) for _ in range(size)], dtype=torch.int32)
        for given in ((0,), (0, 1), (0, 2), (0, 1, 2)):
            names = [("seq_lens", "query_lens", "extra_lens")[i] for i in given]
            options = {"consumer": style, "prefix_only": random.random() < 0.3}
            options |= {name: lengths[i] for i, name in zip(given, names, strict=True)}
            got, *others = [pool.plan_read(table, rows, **options) for pool in pools]
            for other in others:
                shapes = [[read.indices.shape for read in plan.structures] for plan in (got, other)]
                assert shapes[0] == shapes[1]
                assert contents(got) == contents(other)
    # The slots are nobody's: every window key that is not padding is a fault, on each row as often.
    counts = [pool.faults() for pool in pools]
    assert counts[0]["build_read"] > 0
    assert all(count == counts[0] for count in counts)


@pytest.mark.parametrize("consumer", ["flashmla", "deepseek_v4"])
def test_columns_of_query_rows_are_a_multiple(device, kernels, consumer):
    world = World([3, 41, 70], 16, device, kernels)
    for mode in MODES:
        plan, _ = ask(world, mode, consumer=consumer, structure="query_rows")
        assert [read.indices.shape[1] for read in plan.structures] == [128, 64, 64, 64]
        for read in plan.structures:
            unused = torch.arange(read.indices.shape[1], device=device) >= read.lens[:, None]
            assert (read.indices[unused] == -1).all()


def drop_oldest(read: ReadIndices, page: int) -> ReadIndices:
    """The oldest key, or page, of each row is forgotten."""
    step = page if read.structure is Structure.PAGES else 1
    some = read.lens > step
    lens, starts = (torch.where(some, x + d, x) for x, d in ((read.lens, -step), (read.starts, step)))
    if read.structure is not Structure.RAGGED:
        return dataclasses.replace(read, lens=lens, starts=starts, indices=read.indices.roll(-1, 1))
    rows = zip(read.indptr.tolist(), read.lens.tolist(), some.tolist(), strict=False)
    kept = [read.indices[at + cut : at + n] for at, n, cut in rows]
    indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(lens.dtype)
    return dataclasses.replace(read, lens=lens, starts=starts, indptr=indptr, indices=torch.cat(kept))


def shift_by_one(read: ReadIndices, page: int) -> ReadIndices:
    """Every key is that of the token before, the first of a sequence another's."""
    return dataclasses.replace(read, indices=read.indices.roll(1))


def untranslated(read: ReadIndices, page: int) -> ReadIndices:
    """Another slot than the mapping's."""
    return dataclasses.replace(read, indices=torch.where(read.indices > 1, read.indices - 1, read.indices))


@pytest.mark.parametrize("wrong", [drop_oldest, shift_by_one, untranslated])
@pytest.mark.parametrize("structure", Structure)
@pytest.mark.parametrize("at", [0, 1, 2], ids=["full", "window 5", "window 8"])
def test_a_wrong_plan_is_seen(structure, wrong, at):
    world = World([6, 9, 23, 41], 4, torch.device("cpu"), None)
    plan, counts = ask(world, "extend", structure=structure)
    assert compare(world, plan, counts) <= TOLERANCE
    structures = list(plan.structures)
    structures[at] = wrong(structures[at], world.page)
    assert compare(world, dataclasses.replace(plan, structures=tuple(structures)), counts) > 1e-3


@pytest.mark.parametrize("page", [1, 3, 4, 48])
def test_a_page_size_that_the_consumer_cannot_have(device, kernels, page):
    pool = HybridKVPool(LAYERS[:1], size=96, page_size=page, device=device, kernels=kernels)
    table, rows, lens = torch.full((1, 4), page, device=device), torch.tensor([0]), torch.tensor([3])
    calls = [
        lambda: pool.plan_read(table, rows, lens, consumer="trtllm_mha"),
        lambda: pool.graph_read_plan(1, 4, consumer="trtllm_mha"),
    ]
    for call in calls:
        if 4096 % page == 0:
            assert call().for_layer(0).structure is Structure.PAGES
        else:
            with pytest.raises(ValueError, match=f"a page size that divides 4096, the pool's is {page}"):
                call()


@pytest.mark.parametrize(
    ("options", "error", "fragment"),
    [
        ({"full": "pages"}, TypeError, "full: expected a Structure, got 'pages'"),
        ({"index_dtype": torch.int16}, TypeError, "index_dtype: expected torch.int32 or torch.int64, got torch.int16"),
        ({"write_dtype": None}, TypeError, "write_dtype: expected torch.int32 or torch.int64, got None"),
        ({"pad": 2}, ValueError, "pad: expected 0 or -1, got 2"),
        ({"pad": -1.0}, ValueError, "pad: expected 0 or -1, got -1.0"),
        ({"column_multiple": None}, TypeError, "column_multiple: expected an int, got NoneType"),
        ({"decode_keys_short": "1"}, TypeError, "decode_keys_short: expected an int, got str"),
        ({"offset_bits": 48}, ValueError, "offset_bits: expected 32 or 64, got 48"),
        ({"column_multiple": 0}, ValueError, "column_multiple: expected at least 1, got 0"),
        ({"page_divides": 0}, ValueError, "page_divides: expected at least 1, got 0"),
    ],
)
def test_styles_that_are_none(options, error, fragment):
    with pytest.raises(error, match=fragment):
        ReadStyle(**{"full": Structure.PAGES, "window": Structure.PAGES, **options})


def test_a_pad_that_equals_one_of_before_is_refused_all_the_same():
    world = World([3, 9], 4, torch.device("cpu"), None)
    for pad, wrong in ((0, False), (-1, -1.0)):
        ask(world, "decode", pad=pad)
        with pytest.raises(ValueError, match=f"pad: expected 0 or -1, got {wrong}"):
            ask(world, "decode", pad=wrong)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("structure", [Structure.RAGGED, Structure.PAGES, Structure.ROWS])
def test_buffers_fit_what_is_named(structure, page):
    """A window of 1 that leaves out the query's own key names nothing, wherever in a page it ends."""
    for window, mode in itertools.product((None, 1, 5), MODES):
        pool = HybridKVPool([LayerSpec(window, H, D)], size=64, page_size=page, device="cpu")
        for lengths in ([41], [5, 6], [17, 3, 1], [0]):
            n = torch.tensor(lengths)
            q = torch.tensor([MODES[mode].queries(b, x) for b, x in enumerate(lengths)])
            table, rows = torch.ones((1, 48), dtype=torch.int64), torch.zeros_like(n)
            read = pool.plan_read(
                table, rows, **MODES[mode].arguments(n, q.minimum(n)), structure=structure
            ).structures[0]
            named = int(read.lens.sum() if structure is Structure.RAGGED else read.lens.max())
            assert read.indices.shape[-1] == (-(-named // page) if structure is Structure.PAGES else named)
        assert not any(pool.faults().values())


# Consumers from torch itself.


@pytest.mark.parametrize("mode", ["decode", "verify"])
@pytest.mark.parametrize("structure", [Structure.ROWS, Structure.QUERY_ROWS])
def test_sdpa_reads_a_plan(device, kernels, structure, mode):
    """Rows of slots, gathered and masked by position alone."""
    world = World(edges(4), 4, device, kernels)
    plan, counts = ask(world, mode, structure=structure)
    for layer, spec in enumerate(LAYERS):
        read = plan.for_layer(layer)
        row, p, q, want = queries_of(world, counts, layer)
        if structure is Structure.QUERY_ROWS:
            row = torch.tensor([i for i, n in enumerate(per_query(world, counts)) if n])
        cache = [x.double()[read.indices[row.to(device)].clamp(min=0)] for x in world.pool.get_kv_buffer(layer)]
        k, v = (x.movedim(2, 1) for x in cache)  # [queries, H, columns, …]
        column = torch.arange(read.indices.shape[1], device=device)
        positions = read.starts[row.to(device), None] + column
        mask = visible(positions, p.to(device)[:, None], spec.window) & (column < read.lens[row.to(device), None])
        got = torch.nn.functional.scaled_dot_product_attention(q.to(device)[:, :, None], k, v, mask[:, None, None])
        assert (got[:, :, 0].cpu() - want).abs().max() <= TOLERANCE


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mode", ["decode", "extend"])
@pytest.mark.parametrize("page", [4, 16])
def test_flex_attention_reads_a_plan(device, kernels, page, mode):
    """The whole flat cache under a block mask that knows physical pages by the plan's table alone."""
    world = World([0, 1, 4, 8, 9, 23, 41], page, device, kernels)
    plan, counts = ask(world, mode)
    for layer, spec in enumerate(LAYERS):
        read = plan.for_layer(layer)
        row, p, q, want = (x.to(device) for x in queries_of(world, counts, layer))
        k_cache, v_cache = (x.double().movedim(1, 0)[None] for x in world.pool.get_kv_buffer(layer))
        # Where in the sequence each physical page lies, if it is the sequence's; -1 elsewhere.
        logical = torch.full((len(world.lengths), k_cache.shape[2] // page), -1, device=device)
        for b, n in enumerate(read.lens.tolist()):
            pages = read.indices[b, : -(-n // page)].long()
            logical[b, pages] = read.starts[b] + page * torch.arange(len(pages), device=device)

        def mask(b, h, q_idx, slot, logical=logical, row=row, p=p, window=spec.window):
            first = logical[row[q_idx], slot // page]
            return (first >= 0) & visible(first + slot % page, p[q_idx], window)

        blocks = create_block_mask(mask, None, None, len(q), k_cache.shape[2], device=str(device))
        got = flex_attention(
            q.movedim(0, 1)[None].contiguous(), k_cache.contiguous(), v_cache.contiguous(), None, blocks
        )
        assert (got[0].movedim(0, 1) - want).abs().max() <= TOLERANCE


def per_query(world: World, counts: list[int]) -> list[int]:
    """For each query row of a plan, whether it is one of a sequence with tokens."""
    return [n for n, count in zip(world.lengths, counts, strict=True) for _ in range(count)]


def queries_of(world: World, counts: list[int], layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every query: its sequence, its position, itself `[H, D]`, and its attention over the plain sequence."""
    out: list[tuple[int, int, Tensor, Tensor]] = []
    for b, (n, count) in enumerate(zip(world.lengths, counts, strict=True)):
        k, v = world.plain[b][layer]
        for i in range(count if n else 0):
            p, q = n - count + i, world.queries[b, i]
            seen = visible(torch.arange(n), p, LAYERS[layer].window)
            out.append((b, p, q, attend(q, k[seen], v[seen])))
    row, p, q, want = zip(*out, strict=True)
    return torch.tensor(row), torch.tensor(p), torch.stack(q), torch.stack(want)


# Captured graphs.


def contents(plan: ReadPlan) -> list[list[Any]]:
    names = ("indices", "indptr", "lens", "starts")
    return [
        [getattr(read, name).tolist() for name in names if getattr(read, name) is not None] for read in plan.structures
    ]


@pytest.mark.parametrize("consumer", ["triton", "flashattention", "torch_native", "deepseek_v4"])
def test_a_graphs_plan_keeps_its_addresses_and_resets_every_tail(device, kernels, consumer):
    lengths = edges(4)
    world = World(lengths, 4, device, kernels)
    table = world.table
    plan = world.pool.graph_read_plan(len(lengths) + 2, max(lengths), max_query_len=12, consumer=consumer)
    before, empty = [read.indices.data_ptr() for read in plan.structures], contents(plan)
    fresh, counts = ask(world, "extend", consumer=consumer)
    arguments = (torch.tensor(lengths), torch.tensor(counts))
    assert world.pool.plan_read(table, world.rows, *arguments, out=plan) is plan
    assert compare(world, plan, counts) <= TOLERANCE
    for got, want in zip(plan.structures, fresh.structures, strict=True):
        n = want.lens.shape[0]
        assert torch.equal(got.lens[:n], want.lens)
        assert not got.lens[n:].any()
        assert not got.starts[n:].any()
        if want.structure is Structure.RAGGED:
            total = want.indices.shape[0]
            assert torch.equal(got.indices[:total], want.indices)
            assert (got.indices[total:] == plan.style.pad).all()
            assert (got.indptr[n:] == total).all()
        else:
            assert torch.equal(got.indices[:n, : want.indices.shape[1]], want.indices)
            assert (got.indices[n:] == plan.style.pad).all()
            assert (got.indices[:, want.indices.shape[1] :] == plan.style.pad).all()
    # One sequence where there were many, and none: nothing of the batch before is left.
    world.pool.plan_read(table, world.rows[-1:], arguments[0][-1:], arguments[1][-1:], out=plan)
    smaller = contents(plan)
    other = world.pool.graph_read_plan(len(lengths) + 2, max(lengths), max_query_len=12, consumer=consumer)
    world.pool.plan_read(table, world.rows[-1:], arguments[0][-1:], arguments[1][-1:], out=other)
    assert contents(other) == smaller != empty
    world.pool.plan_read(table, world.rows[:0], arguments[0][:0], out=plan)
    assert contents(plan) == empty
    assert [read.indices.data_ptr() for read in plan.structures] == before


@pytest.mark.parametrize("consumer", ["triton", "flashattention", "torch_native", "deepseek_v4"])
def test_a_captured_fill_follows_its_inputs(device, kernels, consumer):
    """Lengths on the device: a replay reads what they are by then, and nothing waits for them."""
    world = World([1, 4, 5, 9, 23, 41], 4, device, kernels)
    table, size = world.table, len(world.lengths)
    plan = world.pool.graph_read_plan(size, 41, max_query_len=3, consumer=consumer)
    rows, seq_lens, query_lens = torch.zeros((3, size), dtype=torch.int64, device=device)
    replay = capture(lambda: world.pool.plan_read(table, rows, seq_lens, query_lens, out=plan), device)
    for counts in ([1] * size, [1, 3, 0, 2, 3, 1], [0] * size):
        rows.copy_(world.rows)
        seq_lens.copy_(torch.tensor(world.lengths))
        query_lens.copy_(torch.tensor(counts))
        replay()
        assert compare(world, plan, counts) <= TOLERANCE
    assert not any(world.pool.faults().values())


def test_buffers_made_in_inference_mode_are_filled_outside(device, kernels):
    world = World([3, 9], 4, device, kernels)
    with torch.inference_mode():
        plan, write_loc = world.pool.graph_read_plan(2, 16), world.pool.graph_write_loc(4, int32_twin=True)
    world.pool.plan_read(world.table, world.rows, torch.tensor(world.lengths), out=plan)
    assert compare(world, plan, [1, 1]) <= TOLERANCE
    write_loc.fill(world.host_table[world.rows[0], :3])
    want = world.pool.plan_write(world.host_table[world.rows[0], :3])
    for got in (write_loc, write_loc.int32):
        assert (got.loc.tolist(), got.swa_loc.tolist()) == ([*want.loc.tolist(), 0], [*want.swa_loc.tolist(), 0])


def test_the_bounds_of_a_graph_hold_every_batch_within_them():
    random.seed(0)
    for page, structure in itertools.product(PAGES, Structure):
        pool = HybridKVPool(LAYERS, size=64, swa_size=48, page_size=page, device="cpu")
        table = torch.zeros((1, 60), dtype=torch.int64)
        for _ in range(40):
            size, max_len, max_queries = random.randint(1, 4), random.randint(1, 60), random.randint(1, 20)
            plan = pool.graph_read_plan(size, max_len, max_query_len=max_queries, structure=structure)
            lengths = torch.tensor([random.choice((max_len, random.randint(0, max_len))) for _ in range(size)])
            queries = torch.tensor([random.randint(0, min(max_queries, n)) for n in lengths.tolist()])
            pool.plan_read(table, torch.zeros_like(lengths), lengths, queries, out=plan)
        assert not any(pool.faults().values())


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Lengths count as a device's, and what would wait for one fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "shares_host_memory", lambda device: False)
        for name in ("cpu", "numpy", "item", "tolist", "__bool__", "__int__", "__index__"):
            patch.setattr(Tensor, name, lambda *_, name=name: pytest.fail(f"a tensor was read back: {name}"))
        yield


BOUNDS = [{}, {"max_len": 41}, {"max_query_len": 12}, {"max_len": 41, "max_query_len": 12}]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("structure", Structure)
@pytest.mark.parametrize("mode", MODES)
def test_lengths_on_the_device_are_not_read_back(kernels, mode, structure, bounds):
    """Buffers are as large as the bounds say, and hold what exact ones do."""
    world = World(edges(4), 4, torch.device("cpu"), kernels)
    exact, counts = ask(world, mode, structure=structure)
    arguments = MODES[mode].arguments(torch.tensor(world.lengths), torch.tensor(counts))
    table = world.table
    with as_on_a_device():
        plan = world.pool.plan_read(table, world.rows, **arguments, **bounds, structure=structure)
    assert compare(world, plan, counts, MODES[mode].prefix_only) <= TOLERANCE
    for got, want in zip(plan.structures, exact.structures, strict=True):
        assert all(n >= least for n, least in zip(got.indices.shape, want.indices.shape, strict=True))
    assert not any(world.pool.faults().values())


@pytest.mark.parametrize("structure", Structure)
def test_what_goes_past_the_bounds_is_cut_and_counted(kernels, structure):
    world = World([41, 30], 4, torch.device("cpu"), kernels)
    with as_on_a_device():
        plan = world.pool.plan_read(world.table, world.rows, torch.tensor([41, 30]), structure=structure, max_len=16)
    full = plan.structures[0]
    assert full.lens.tolist() == ([32, 0] if structure is Structure.RAGGED else [16, 16])
    assert world.pool.faults()["build_read"] == 2
    with as_on_a_device(), pytest.raises(TypeError, match="req_rows: expected one dtype of all tensors on cpu"):
        world.pool.plan_read(world.table, world.rows, torch.tensor([41, 30], dtype=torch.int32), structure=structure)


def test_checked_mode_reads_lengths_back(kernels):
    world = World([41, 30], 4, torch.device("cpu"), kernels, check=True)
    lengths, width = torch.tensor([41, 30]), world.host_table.shape[1]
    with as_on_a_device(), pytest.raises(pytest.fail.Exception, match="a tensor was read back: cpu"):
        world.pool.plan_read(world.table, world.rows, lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "shares_host_memory", lambda device: False)
        for extra, most in ((0, 16), (width, width)):
            with pytest.raises(ValueError, match=f"expected at most {most} tokens, got {41 + extra}"):
                world.pool.plan_read(world.table, world.rows, lengths + extra, max_len=most)
    assert not any(world.pool.faults().values())


# A forward of 48 layers.


@pytest.mark.parametrize("windows", [(64, 64), (64, 128)], ids=["one window", "two windows"])
@pytest.mark.parametrize("graph", [False, True])
def test_launches_of_a_forward(device, kernels, graph, windows):
    layers = [LayerSpec(None if i % 6 == 5 else windows[i % 2], 1, 8) for i in range(48)]
    pool = HybridKVPool(layers, size=256, swa_size=192, device=device, kernels=kernels)
    launches: Counter[str] = Counter()
    for op in pool._slot_kernels:
        counted(pool._slot_kernels, op, launches)
    loc = pool.allocator.alloc(5)
    table = loc[None].to(pool.device)
    rows, lens = torch.zeros(1, dtype=torch.int64), torch.tensor([5])
    write_loc = pool.graph_write_loc(8)
    plan = pool.graph_read_plan(4, 8, consumer="triton") if graph else None
    launches.clear()
    if graph:
        write_loc.fill(loc)
        pool.plan_read(table, rows, lens, out=plan)
    else:
        write_loc, plan = pool.plan_write(loc), pool.plan_read(table, rows, lens, consumer="triton")
    x = torch.zeros(5, 1, 8, device=pool.device)
    for layer in range(48):
        pool.set_kv_buffer(layer, write_loc[:5], x, x)
        assert plan.for_layer(layer).window == layers[layer].window
    assert launches == {"translate_loc": 1, "build_read": 1 + len(set(windows))}


def test_plans_alone_see_the_mapping(device, kernels):
    """Nor does a layer translate by an indexed read of its own, which no kernel would count."""
    pool = HybridKVPool(LAYERS, size=64, swa_size=48, device=device, kernels=kernels)
    mapping, seen = pool.full_to_swa.data_ptr(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(isinstance(x, Tensor) and x.data_ptr() == mapping for x in args):
                seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    loc = pool.allocator.alloc(3)
    table, rows, lens = loc[None].to(pool.device), torch.zeros(1, dtype=torch.int64), torch.tensor([3])
    k, v = (torch.zeros(3, H, dim, device=pool.device, dtype=pool.dtype) for dim in (D, DV))
    with Watch():
        write_loc, plan = pool.plan_write(loc), pool.plan_read(table, rows, lens)
        for layer, spec in enumerate(LAYERS):
            if spec.alias_of is None:
                pool.set_kv_buffer(layer, write_loc, k, v)
            pool.gather_kv(layer, write_loc)
            plan.for_layer(layer)
    assert seen == ["translate_loc", *["build_read"] * 3]


def counted(kernels: dict[str, Any], name: str, launches: Counter[str]) -> None:
    kernel = kernels[name]

    def call(*args: Any) -> None:
        launches[name] += 1
        kernel(*args)

    kernels[name] = call


@pytest.mark.parametrize("structure", Structure)
def test_an_idle_rank_launches_nothing(device, kernels, structure):
    pool = HybridKVPool(LAYERS, size=64, swa_size=48, device=device, kernels=kernels)
    launches: Counter[str] = Counter()
    counted(pool._slot_kernels, "build_read", launches)
    none = torch.zeros(0, dtype=torch.int64)
    for queries in (None, 3, none):
        plan = pool.plan_read(
            torch.zeros((0, 0), dtype=torch.int32, device=device), none, none, queries, structure=structure
        )
        for read in plan.structures:
            assert read.indices.numel() == read.lens.numel() == read.starts.numel() == 0
            assert read.indptr is None or read.indptr.tolist() == [0]
    assert not launches


# Where a plan's arguments come from.


@pytest.mark.parametrize("extra", [3, torch.tensor([3, 3, 3])], ids=["int", "tensor"])
def test_an_int_stands_for_one_length_of_all(device, kernels, extra):
    world = World([3, 9, 23], 4, device, kernels)
    committed = torch.tensor([0, 6, 20])
    plan = world.pool.plan_read(world.table, world.rows, committed, extra_lens=extra)
    assert compare(world, plan, [3, 3, 3]) <= TOLERANCE
    plan = world.pool.plan_read(world.table, world.rows, committed + 3, 2)
    assert compare(world, plan, [2, 2, 2]) <= TOLERANCE


@pytest.mark.parametrize("name", ["query_lens", "extra_lens"])
@pytest.mark.parametrize("value", [2**63, 2**64, 2**70, -(2**63) - 1, -(2**70)])
def test_an_int_of_more_than_64_bits_is_refused(device, kernels, name, value):
    world = World([3, 9], 4, device, kernels)
    for size in (0, 2):
        rows, lengths = world.rows[:size], torch.tensor(world.lengths)[:size]
        with pytest.raises(ValueError, match=f"^{name}: expected at (most|least) -?\\d+, got {value}$"):
            world.pool.plan_read(world.table, rows, lengths, **{name: value})


@pytest.mark.parametrize("dtypes", list(itertools.product((torch.int32, torch.int64), repeat=4)), ids=str)
def test_integers_on_the_host_may_be_of_either_width(device, kernels, dtypes):
    world = World([3, 9, 23], 4, device, kernels)
    lengths, queries = torch.tensor(world.lengths), torch.tensor([1, 3, 2])
    columns = (world.rows, lengths - queries, queries, queries)
    rows, seq, query, extra = (x.to(dtype) for x, dtype in zip(columns, dtypes, strict=True))
    plan = world.pool.plan_read(world.table.to(dtypes[0]), rows, seq, query, extra_lens=extra, consumer="flashinfer")
    assert compare(world, plan, queries.tolist()) <= TOLERANCE


def test_lengths_of_the_host_do_not_wrap_around_beside_narrow_ones(monkeypatch):
    """2**32 + 3 is past any table, and is cut and counted there; it is not 3."""
    pool, sent = HybridKVPool([LayerSpec(None, 1, 8)], size=16, device="meta"), []
    upload = Device.upload
    monkeypatch.setattr(Device, "upload", lambda self, host, at: sent.append(host) or upload(self, host, at))
    table, rows = (
        torch.zeros((2, 8), dtype=torch.int64, device="meta"),
        torch.zeros(2, dtype=torch.int32, device="meta"),
    )
    pool.plan_read(table, rows, torch.tensor([2**32 + 3, 5]), query_lens=rows)
    assert [x.tolist() for x in sent] == [[[2**31 - 1, 5]]]


def test_lengths_on_the_host_are_real_whatever_traces(device, kernels):
    """Outside of the graph that torch.compile makes of the rest, and under fake tensors."""
    world = World([3, 9, 23], 4, device, kernels)
    table, lengths = world.table, torch.tensor(world.lengths)

    def step(x: Tensor) -> Tensor:
        plan = world.pool.plan_read(table, world.rows, lengths, structure="rows")
        return x + sum(read.indices.sum() * read.indices.shape[1] for read in plan.structures)

    x = torch.ones(1, device=device)
    want = step(x)
    assert torch.equal(torch.compile(step, backend="eager")(x), want)
    if device.type == "cpu":
        with FakeTensorMode(allow_non_fake_inputs=True):
            plan = world.pool.plan_read(table, world.rows, lengths, structure="rows")
        assert [read.indices.shape for read in plan.structures] == [(3, n) for n in (23, 5, 8, 3)]


def test_strided_arguments(device, kernels):
    """Columns of a wider table, and lengths that are every second of an array."""
    world = World([3, 9, 23], 4, device, kernels)
    wide = torch.full((2 * len(world.host_table), world.host_table.shape[1] + 5), 2**40)
    wide[::2, 3:-2] = world.host_table
    rows, lengths = (x.repeat_interleave(2)[::2] for x in (world.rows, torch.tensor(world.lengths)))
    plan = world.pool.plan_read(wide.to(device)[::2, 3:-2], rows, lengths, 2)
    assert compare(world, plan, [2, 2, 2]) <= TOLERANCE


def test_the_last_slot_is_one_and_the_next_is_a_fault(device, kernels):
    pool = HybridKVPool([LayerSpec(None, 1, 8)], size=16, page_size=4, device=device, kernels=kernels)
    table, row, lens = torch.tensor([[19, 20, -1]], device=device), torch.tensor([0]), torch.tensor([3])
    plan = pool.plan_read(table, row, lens, consumer="triton", pad=-1)
    assert plan.for_layer(0).indices.tolist() == [19, -1, -1]
    assert pool.faults() == dict.fromkeys(pool.faults(), 0) | {"build_read": 1}


def test_a_plan_is_a_snapshot(device, kernels):
    world = World([3, 9, 23], 1, device, kernels)
    plan, counts = ask(world, "decode", consumer="triton")
    before = contents(plan)
    world.evict([3, 9, 23])
    assert contents(plan) == before
    assert compare(world, plan, counts) <= TOLERANCE


def test_a_draft_on_shared_slots_reads_like_its_target(device, kernels):
    """One allocator and one mapping: an all-full draft reads full slots, a hybrid one the target's SWA slots."""
    world = World([3, 9, 23], 4, device, kernels)
    options = {"page_size": 4, "dtype": torch.float32, "device": device, "kernels": kernels, "slots_of": world.pool}
    arguments = (world.table, world.rows, torch.tensor(world.lengths))
    of_target = world.pool.plan_read(*arguments).for_layer(1)
    hybrid = HybridKVPool([LayerSpec(5, 1, 8)], size=1024, swa_size=512, **options).plan_read(*arguments).for_layer(0)
    plain = HybridKVPool([LayerSpec(5, 1, 8)], size=1024, **options).plan_read(*arguments).for_layer(0)
    assert (of_target.side, hybrid.side, plain.side) == ("swa", "swa", "full")
    assert torch.equal(of_target.indices, hybrid.indices)
    for b, (row, n) in enumerate(zip(world.rows.tolist(), world.lengths, strict=True)):
        first = max(n - 5, 0) // 4 * 4
        assert plain.indices[b, : -(-(n - first) // 4)].tolist() == (world.host_table[row, first:n:4] // 4).tolist()


# What nobody holds is not read in silence


class Sharers:
    """Two requests that share a prefix of two pages; each has two pages more."""

    def __init__(self, device: torch.device, kernels: Any, check: bool, page: int = 4) -> None:
        layers = [LayerSpec(None, 1, 8), LayerSpec(6, 1, 8)]
        options = {"size": 64, "swa_size": 64, "page_size": page, "device": device, "kernels": kernels, "check": check}
        self.pool = HybridKVPool(layers, **options)
        self.prefix = self.pool.allocator.alloc(2 * page)
        own = [self.pool.allocator.alloc(2 * page) for _ in range(2)]
        self.host = torch.stack([torch.cat((self.prefix, x)) for x in own])
        self.rows = torch.arange(2, device=device)

    def plan(self, lens: list[int], **options: Any) -> ReadPlan:
        return self.pool.plan_read(self.host.to(self.pool.device), self.rows, torch.tensor(lens), **options)

    def faults(self) -> int:
        return self.pool.faults(clear=True)["build_read"]


@pytest.mark.parametrize("structure", Structure)
def test_a_window_key_that_another_sharer_let_go_is_a_fault(device, kernels, structure):
    for check in (False, True):
        w = Sharers(device, kernels, check)
        w.plan([16, 10], structure=structure)
        w.pool.allocator.evict_swa(w.host, [0], [0], [16])  # the faster one's query
        w.plan([16, 16], structure=structure)
        assert w.faults() == 0
        if check:
            place = (
                r"req_to_token\[1, 4\] .request 1, swa side.: expected a slot with live SWA bytes inside a window of 6"
            )
            with pytest.raises(SlotOwnership, match=place):
                w.plan([16, 10], structure=structure)
        else:
            w.plan([16, 10], structure=structure)  # keys 4 to 7 of the slower one, or their page
            assert w.faults() == (1 if structure is Structure.PAGES else 4)
        w.plan([16, 14], structure=structure)
        assert w.faults() == 0


@pytest.mark.parametrize("structure", Structure)
def test_a_plan_over_a_freed_sequence_is_refused(device, kernels, structure):
    w = Sharers(device, kernels, check=True)
    w.pool.allocator.free(w.host[1, 8:])
    for lens, place in (([16, 9], "1, 8"), ([16, 16], "1, 8")):
        with pytest.raises(
            SlotOwnership, match=rf"req_to_token\[{place}\] .request 1, full side.: expected a slot that is"
        ):
            w.plan(lens, structure=structure)
    w.plan([16, 8], structure=structure)
    w.plan([16, 9], structure=structure, prefix_only=True)
    w.host[1, 8:] = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1])  # padding is nobody's
    w.plan([16, 16], structure=structure)
    assert w.faults() == 0
    unchecked = Sharers(device, kernels, check=False)
    unchecked.pool.allocator.free(unchecked.host[1, 8:])
    unchecked.plan([16, 16], structure=structure)
    assert unchecked.faults() >= (2 if structure is Structure.PAGES else 6)


def test_a_window_key_whose_peer_waits_for_bytes_is_refused(device, kernels):
    w = Sharers(device, kernels, check=True)
    w.pool.allocator.free_swa(w.host[0, 8:12])
    w.pool.allocator.restore_swa(w.host[0, 8:12])
    with pytest.raises(SlotOwnership, match=r"req_to_token\[0, 10\] .request 0, swa side"):
        w.plan([16, 16])
    w.pool.allocator.mark_written(w.host[0, 8:12])
    w.plan([16, 16])


def test_page_tables_of_slots_out_of_step_with_positions(device, kernels):
    for check in (False, True):
        w = Sharers(device, kernels, check)
        copy = w.pool.copy_to_host(w.host[0, 6:])
        w.host[0, 6:] = w.pool.load_from_host(copy)  # pages begin at position 6
        for structure in (Structure.RAGGED, Structure.ROWS, Structure.QUERY_ROWS):
            w.plan([16, 16], structure=structure)
        assert w.faults() == 0
        if check:
            with pytest.raises(
                ValueError, match=r"req_to_token\[0, 6\] .request 0, full side.: expected slots that lie"
            ):
                w.plan([16, 16], structure=Structure.PAGES)
        else:
            plan = w.plan([16, 16], structure=Structure.PAGES, pad=-1)
            assert plan.for_layer(0).indices[0].tolist()[2:] == [-1, -1]
            assert w.faults() == 2 + 2  # of either side
