"""Read plans: attention in float64 over exactly what a plan names equals attention over the plain sequence."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from portakv import CONSUMERS, HybridKVPool, LayerSpec, ReadIndices, ReadPlan, Structure, dispatch
from portakv import device as devices

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


def rows_here() -> list[str]:
    """The rows of the CPU column that can serve on this machine."""
    chosen = dispatch.select("store_kv", devices.facts(torch.device("cpu")))
    return [chosen.row.name, *(row.name for row, why in chosen.rejected if why.endswith("comes first"))]


@pytest.fixture(params=rows_here())
def kernels(request: pytest.FixtureRequest, device: torch.device) -> dict[str, str] | None:
    return dict.fromkeys(dispatch.TABLE, request.param) if device.type == "cpu" else None


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
