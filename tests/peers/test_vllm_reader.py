"""vLLM's CPU attention runs on this pool's pages through its page tables, and AMX tile arithmetic on their bytes.

Prefill in two chunks and decode, full and windowed layers, grouped queries, sequences of different lengths whose old
SWA pages are evicted on the way. Every result must be as close to float64 as a reference in the dtype of the queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from portakv import HybridKVPool, LayerSpec
from portakv.formats import Structure
from portakv.kernels.reference import rows as reference
from portakv.read_plan import ReadIndices

Tensor = torch.Tensor

HEADS, GROUP, DIM = 2, 4, 64
SCALE = DIM**-0.5
LAYERS = [LayerSpec(None, HEADS, DIM), LayerSpec(33, HEADS, DIM), LayerSpec(100, HEADS, DIM)]
FORWARDS = ([50, 33, 1], [130, 1, 64], [1, 1, 1], [1, 1, 1], [40, 1, 3])
"""Query tokens of each sequence in each forward."""


@dataclass
class Read:
    """One layer of one forward: what attention gets, and the keys and values it stands for."""

    layer: int
    caches: tuple[Tensor, Tensor]
    plan: ReadIndices
    queries: list[Tensor]  # per sequence [Q, HEADS * GROUP, DIM]
    keys: list[Tensor]  # per sequence [S, HEADS, DIM], all tokens since its first, as float64
    values: list[Tensor]


def forwards(layout: str, dtype: torch.dtype, page: int, scales: tuple[float, float] = (1.0, 1.0)) -> Iterator[Read]:
    """Serve a batch with a pool, and give every layer of every forward to be read."""
    pool = HybridKVPool(LAYERS, size=32 * page, swa_size=16 * page, page_size=page, dtype=dtype, layout=layout)
    source = torch.bfloat16 if dtype.itemsize == 1 else dtype
    for layer in range(len(LAYERS)):
        pool.set_scales(layer, *scales)
    torch.manual_seed(0)
    batch = len(FORWARDS[0])
    table, lens, evicted = torch.zeros(batch, 512, dtype=torch.int64), [0] * batch, [0] * batch
    history: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(batch * len(LAYERS))]
    for query_lens in FORWARDS:
        total = [n + q for n, q in zip(lens, query_lens, strict=True)]
        last = [int(table[b, n - 1]) if n else -1 for b, n in enumerate(lens)]
        loc = pool.allocator.alloc_extend(lens, total, last)
        for b, new in enumerate(loc.split(query_lens)):
            table[b, lens[b] : total[b]] = new
        write_loc = pool.plan_write(loc)
        rows, seq_lens = torch.arange(batch), torch.tensor(total)
        plan = pool.plan_read(
            table, rows, seq_lens, torch.tensor(query_lens), structure=Structure.PAGES, index_dtype=torch.int32
        )
        for layer in range(len(LAYERS)):
            k, v = torch.randn(2, len(loc), HEADS, DIM).to(source).unbind()
            pool.set_kv_buffer(layer, write_loc, k, v)
            fmt = pool.groups[0].fmt
            ones = torch.ones(HEADS)
            for x, scale, at in ((k, scales[0], 0), (v, scales[1], 1)):
                stored = reference.convert(x, fmt, ones / scale).double() * scale
                for b, new in enumerate(stored.split(query_lens)):
                    history[batch * layer + b][at].append(new)
            queries = torch.randn(len(loc), HEADS * GROUP, DIM).to(source).split(query_lens)
            own = history[batch * layer : batch * (layer + 1)]
            keys, values = ([torch.cat(both[at]) for both in own] for at in (0, 1))
            yield Read(layer, pool.get_kv_buffer(layer), plan.for_layer(layer), list(queries), keys, values)
        lens = total
        evicted = pool.allocator.evict_swa(table, rows, evicted, lens).tolist()


def attention(read: Read, b: int, dtype: torch.dtype) -> Tensor:
    """Sequence b's attention `[Q, HEADS * GROUP, DIM]` with sums in `dtype` (half ones: float32) and P and the result
    rounded to it."""
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(dtype).to(wide) for x in (read.queries[b], read.keys[b], read.values[b]))
    k, v = (x.repeat_interleave(GROUP, 1) for x in (k, v))
    at, position = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = at > position
    if (window := LAYERS[read.layer].window) is not None:
        hidden |= at <= position - window
    p = (torch.einsum("qhd,khd->hqk", q, k) * SCALE).masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", p.to(dtype).to(wide), v).to(dtype)


def assert_close(got: Tensor, read: Read, b: int) -> None:
    """At most four times the error of a reference in the queries' dtype: vLLM's exponential is a polynomial."""
    exact, low = attention(read, b, torch.float64), attention(read, b, got.dtype)
    error, budget = ((x.double() - exact).abs().max().item() for x in (got, low))
    assert error <= 4 * budget, f"layer {read.layer}, sequence {b}: error {error}, budget {4 * budget}"


def attend(vllm: Any, read: Read, isa: str, scales: tuple[float, float]) -> Tensor:
    """vLLM's attention: positions count from the first page that a sequence's table names."""
    q = torch.cat(read.queries)
    caches, kind = read.caches, "auto"
    if caches[0].dtype.itemsize == 1:
        kind = "fp8_e4m3" if caches[0].dtype == torch.float8_e4m3fn else "fp8_e5m2"
        caches = caches[0].view(torch.uint8), caches[1].view(torch.uint8)
    query_lens = torch.tensor([0, *map(len, read.queries)], dtype=torch.int32)
    starts, lens = query_lens.cumsum(0, dtype=torch.int32), read.plan.lens
    window = LAYERS[read.layer].window or -1
    shape = (len(lens), HEADS * GROUP, HEADS, DIM)
    plan = vllm.get_scheduler_metadata(*shape, lens, q.dtype, starts, True, window, isa, True, None, kind)
    out = torch.full_like(q, math.nan)
    rest = (SCALE, True, None, window, read.plan.indices, 0.0, plan, None, None, *scales, kind)
    vllm.cpu_attention_with_kv_cache(q, *caches, out, starts, lens, *rest)
    return out


FLOATS = [torch.bfloat16, torch.float16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("page", [32, 96])
@pytest.mark.parametrize("dtype", FLOATS + FP8, ids=str)
def test_vllm_reads_vector_pages(vllm: Any, dtype: torch.dtype, page: int) -> None:
    scales = (0.5, 2.0) if dtype in FP8 else (1.0, 1.0)
    for read in forwards("cpu_vec", dtype, page, scales):
        out = attend(vllm, read, "vec", scales)
        for b, got in enumerate(out.split([len(q) for q in read.queries])):
            assert_close(got, read, b)


def test_a_key_moved_by_one_slot_is_noticed(vllm: Any) -> None:
    read = list(forwards("cpu_vec", torch.bfloat16, 32))[-1]
    read.caches[0].view(-1)[:] = read.caches[0].view(-1).roll(1)
    with pytest.raises(AssertionError, match="budget"):
        assert_close(attend(vllm, read, "vec", (1.0, 1.0))[: len(read.queries[0])], read, 0)


# AMX, emulated: few machines have it. A tile is 16 rows of 64 bytes.


def load_tile(flat: Tensor, offset: int) -> Tensor:
    """A tile from rows that follow each other, as `[row, column, pair]`."""
    return flat.as_strided((16, 16, 2), (32, 2, 1), flat.storage_offset() + offset).float()


def multiply_tiles(c: Tensor, a: Tensor, b: Tensor) -> None:
    """TDPBF16PS: `c[m, n]` += the products of the pairs `a[m, k]` and `b[k, n]`, in float32."""
    c += torch.einsum("mkp,knp->mn", a, b)


def attend_tiles(read: Read, b: int, page: int) -> Tensor:
    """Attention on packed bytes by tiles alone: S = Q·Kᵀ from K's, O = P·V from V's, 16 queries at a time."""
    q = read.queries[b].float()
    out = torch.empty_like(q)
    num_keys, start = int(read.plan.lens[b]), int(read.plan.starts[b])
    window = LAYERS[read.layer].window or len(read.keys[b])
    first = len(read.keys[b]) - start - len(q)
    pages = read.plan.indices[b, : -(-num_keys // page)].tolist()
    at = torch.arange(len(pages) * page)
    for head in range(HEADS * GROUP):
        k, v = (cache[:, head // GROUP].flatten(1) for cache in read.caches)
        for row in range(0, len(q), 16):
            n = min(16, len(q) - row)
            block = torch.zeros(16, DIM)
            block[:n] = q[row : row + n, head]
            scores = torch.zeros(16, len(at))
            for tokens in range(0, len(at), 16):
                for d in range(0, DIM, 32):
                    tile = load_tile(k[pages[tokens // page]], (tokens % page // 16 * (DIM // 2) + d // 2) * 32)
                    multiply_tiles(scores[:, tokens : tokens + 16], block[:, d : d + 32].reshape(16, 16, 2), tile)
            position = first + row + torch.arange(16)[:, None]
            hidden = (at > position) | (at <= position - window) | (at >= num_keys)
            p = (scores * SCALE).masked_fill(hidden, -math.inf).softmax(-1).nan_to_num().bfloat16().float()
            for d in range(0, DIM, 16):
                result = torch.zeros(16, 16)
                for tokens in range(0, len(at), 32):
                    tile = load_tile(v[pages[tokens // page]], d * page + tokens % page // 2 * 32)
                    multiply_tiles(result, p[:, tokens : tokens + 32].reshape(16, 16, 2), tile)
                out[row : row + n, head, d : d + 16] = result[:n]
    return out.bfloat16()


@pytest.mark.parametrize("page", [32, 96])
def test_tile_arithmetic_reads_matrix_pages(page: int) -> None:
    for read in forwards("cpu_amx", torch.bfloat16, page):
        for b in range(len(read.queries)):
            assert_close(attend_tiles(read, b, page), read, b)
