"""What is particular to the C++ kernels: instruction sets, tensor access, threads, refusals, the build.

That every op matches the reference on shared inputs is tested for all rows of the table elsewhere.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from portakv import buffers, check, dispatch, testing
from portakv.formats import FAULT_KINDS, FP8_DIALECTS, KVFormat
from portakv.kernels.cpu_amx import kernels as cpu_amx
from portakv.kernels.reference import flashmla as reference_flashmla
from portakv.kernels.reference import packed as reference_packed
from portakv.kernels.reference import rows as reference

if problem := cpu_amx.build_problem():
    pytest.fail(problem, pytrace=False)

from portakv.kernels.cpu_amx import _native

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SCALES = (1.0, 0.37, 1 / 448, 3000.0, 2.0**-20)


def faults() -> torch.Tensor:
    return torch.zeros(len(FAULT_KINDS), dtype=torch.int64)


def canary(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of a byte pattern that no test expects."""
    return torch.full((*shape[:-1], shape[-1] * dtype.itemsize), 0xA5, dtype=torch.uint8).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def every_half(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 codes of a 16-bit dtype, as [256, 4, 64]."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(256, 4, 64)


def float32_edges() -> torch.Tensor:
    """Every exponent and sign with mantissas about each tie of the narrower formats, as [n, 4, 64]."""
    ties = [(1 << b) + d for b in range(12, 23) for d in (-1, 0, 1)]
    mantissas = torch.tensor(sorted({0, 1, 0x7FFFFF, *ties, *(0x7FFFFF & (3 * t) for t in ties)}))
    bits = (torch.arange(512)[:, None] << 23 | mantissas).flatten()
    bits = torch.cat([bits, bits[: -len(bits) % 256]])
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32).view(-1, 4, 64)


SOURCES: dict[torch.dtype, Callable[[], torch.Tensor]] = {
    torch.float16: lambda: every_half(torch.float16),
    torch.bfloat16: lambda: every_half(torch.bfloat16),
    torch.float32: float32_edges,
}


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(best)


@pytest.fixture(params=(0, 1), ids=("shim", "attributes"))
def reader(request: pytest.FixtureRequest) -> Iterator[None]:
    if not _native.use_reader(request.param):
        pytest.skip("this torch has no such interface")
    yield
    next(reader for reader in range(2) if _native.use_reader(reader))


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *FP8_DIALECTS], ids=str)
def test_store_converts_every_input(isa: str, source: torch.dtype, dtype: torch.dtype) -> None:
    x = SOURCES[source]()
    tokens, heads, dim = x.shape
    fmt = KVFormat(heads, dim, dim, dtype)
    loc = torch.arange(tokens) + 1
    for scale in SCALES if dtype in FP8_DIALECTS else (1.0,):
        inv = torch.tensor([1.0, 0.7, 2.0, 1.3]) * scale
        cache = canary(2, tokens + 2, heads, dim, dtype=dtype)
        _native.store_kv(x, x, cache[0], cache[1], loc, inv, inv, faults(), fmt)
        want = canary(tokens + 2, heads, dim, dtype=dtype).view(torch.uint8)
        want[1:-1] = reference.convert(x, fmt, inv).view(torch.uint8)
        assert same(cache[0], want)
        assert same(cache[1], want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("stored", [*FLOATS, *FP8_DIALECTS], ids=str)
def test_gather_restores_every_input(isa: str, stored: torch.dtype, dtype: torch.dtype) -> None:
    if stored in FP8_DIALECTS:
        cache = torch.arange(256, dtype=torch.uint8).view(stored).view(4, 1, 64).expand(4, 4, 64).contiguous()
    else:
        cache = SOURCES[stored]()
    rows, heads, dim = cache.shape
    fmt = KVFormat(heads, dim, dim, stored)
    loc = torch.arange(rows).flip(0)
    scale = torch.tensor([1.0, 0.37, 3.3e38, 1e-40])
    k_out, v_out = canary(2, rows, heads, dim, dtype=dtype)
    _native.gather_kv(cache, cache, loc, k_out, v_out, scale, scale, faults(), fmt)
    want = reference.restore(cache.view(torch.uint8)[loc].view(stored), dtype, fmt, scale)
    assert same(k_out, want)
    assert same(v_out, want)


@pytest.mark.parametrize("dim", [1, 31, 64, 100, 257])
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_odd_rows_and_alignments(isa: str, reader: None, dim: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        fmt = KVFormat(3, dim, dim, dtype, page_size=2)
        flat = canary(2, 40 * 3 * dim + offset, dtype=dtype)
        k_cache, v_cache = (half[offset:].view(40, 3, dim) for half in flat)
        expected = [half.clone() for half in (k_cache.view(torch.uint8), v_cache.view(torch.uint8))]
        k, v = torch.randn(2, 30, 5, dim, generator=generator).to(torch.bfloat16)[:, :, 1:4].unbind()
        loc = torch.randperm(44, generator=generator)[:30] - 2
        inv, count, want_count = torch.rand(3, generator=generator), faults(), faults()
        _native.store_kv(k, v, k_cache, v_cache, loc, inv, inv, count, fmt)
        want_k, want_v = (e.view(dtype) for e in expected)
        reference.store_kv(k, v, want_k, want_v, loc, inv, inv, want_count, fmt)
        assert same(k_cache, want_k)
        assert same(v_cache, want_v)
        assert torch.equal(count, want_count)


def test_tensors_that_are_not_aligned_to_their_items(isa: str) -> None:
    raw = torch.randint(0, 256, (8 * 2 * 64 * 2 + 1,), dtype=torch.uint8).numpy().tobytes()
    k = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16, offset=1).view(8, 2, 64)
    fmt = KVFormat(2, 64, 64, torch.float16)
    cache, want = canary(2, 9, 2, 64, dtype=torch.float16), canary(2, 9, 2, 64, dtype=torch.float16)
    loc, one = torch.arange(8) + 1, torch.ones(2)
    _native.store_kv(k, k, cache[0], cache[1], loc, one, one, faults(), fmt)
    reference.store_kv(k.clone(), k.clone(), want[0], want[1], loc, one, one, faults(), fmt)
    assert same(cache, want)


def at_odd_address(x: torch.Tensor) -> torch.Tensor:
    """A copy one byte off, with the same strides, as of a header and numbers in one raw buffer."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    raw = torch.frombuffer(bytearray(span * x.itemsize + 1), dtype=x.dtype, offset=1)
    odd = raw.as_strided(x.shape, x.stride())
    assert odd.data_ptr() % x.itemsize
    return odd.copy_(x)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_arguments_at_odd_addresses(isa: str, op: str) -> None:
    """Build with `-fsanitize=undefined` to see more than that they are read and written right."""
    modules = (reference, reference_flashmla, reference_packed)
    define = next(getattr(module, op) for module in modules if op in vars(module))
    names, run = list(inspect.signature(define).parameters), getattr(_native, op)

    def run_at_odd_addresses(*args: Any) -> None:
        moved = {}
        for name, x in zip(names, args, strict=True):
            if isinstance(x, torch.Tensor) and x.numel() and x.itemsize > 1 and name != "faults":
                moved[name] = at_odd_address(x)
        run(*(moved.get(name, x) for name, x in zip(names, args, strict=True)))
        for name, x in zip(names, args, strict=True):
            if name in moved:
                x.copy_(moved[name])

    for case in itertools.islice(testing.cases(op), 0, None, 7):
        testing.check(op, run_at_odd_addresses, case, torch.device("cpu"))


def test_lengths_at_odd_addresses_are_measured() -> None:
    for rows, *lengths, num_rows, max_len, most, multiple, formats in itertools.islice(check.batches(), 0, None, 3):
        given = [x if x is None or not x.numel() else at_odd_address(x) for x in (rows, *lengths)]
        bounds = (num_rows, max_len, most, multiple, formats)
        assert _native.measure_read(*given, *bounds) == reference.measure_read(rows, *lengths, *bounds)


def test_fault_counters_at_an_odd_address_are_refused() -> None:
    """They are counted with atomics, which no machine promises there."""
    loc, odd = torch.tensor([1]), at_odd_address(faults())
    with pytest.raises(ValueError, match="faults: expected counters aligned as atomics must be"):
        _native.cast_loc(loc, loc.int(), odd)


FORKED = """
import os, signal, sys
import torch
from portakv import HybridKVPool, LayerSpec
from portakv.kernels.cpu_amx import _native

layout, first = sys.argv[1:]
torch.set_num_threads(2)
layers = [LayerSpec(None, 4, 64)] if layout != "flashmla" else [LayerSpec(None, 1, 448, 64, mla=True)]
dtype = torch.float8_e4m3fn if layout == "flashmla" else torch.bfloat16
pool = HybridKVPool(layers, size=4096, page_size=64, layout=layout, dtype=dtype, device="cpu", strict=True)
spec = layers[0]
k, v = (torch.ones(2048, spec.num_kv_heads, dim, dtype=torch.bfloat16) for dim in (spec.head_dim, spec.v_dim))
loc = pool.allocator.alloc(2048)
table = loc.repeat(64, 2)[:, :2048].contiguous()

def every_op():
    write_loc = pool.plan_write(loc)
    pool.set_kv_buffer(0, write_loc, k, v)
    rows = pool.gather_kv(0, write_loc, torch.zeros_like(k), torch.zeros_like(v))
    pool.move_kv_cache(loc.flip(0), loc)
    pool.move_kv_cache(loc, loc.flip(0))
    lens = torch.full((64,), 2048)
    for structure in ("ragged", "pages", "rows"):
        pool.plan_read(table, torch.arange(64), lens, structure=structure)
    pool.load_from_host(pool.copy_to_host(loc), loc)
    return rows

def used_threads():
    return len(os.listdir("/proc/self/task"))

(torch.ones(1 << 20) + 1).sum()
if first == "portakv":
    every_op()
child = os.fork()
if child == 0:
    signal.alarm(60)
    got = every_op()
    torch.ones(1 << 20).add_(1)  # an op of torch's own
    good = used_threads() == 1 and all((x == 1).all() for x in got)
    grandchild = os.fork()
    if grandchild == 0:
        signal.alarm(60)
        every_op()
        os._exit(0)
    good = good and os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
    os._exit(0 if good else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
every_op()
print("done", torch.get_num_threads())
"""


@pytest.mark.parametrize("first", ["portakv", "torch"])
@pytest.mark.parametrize("layout", ["rows", "cpu_vec", "flashmla"])
def test_a_forked_child_runs_on_one_thread(layout: str, first: str) -> None:
    """The threads that `first` started stay in the parent, where GCC's OpenMP would wait for them for ever."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", FORKED, layout, first], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.stdout == "done 2\n", done.stderr


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_one_whole_row_wins_at_any_thread_count(isa: str, threads: int) -> None:
    tokens, fmt = 2000, KVFormat(4, 64, 64, torch.bfloat16)
    # Other bits in every row; as numbers, those above 256 would be rounded to their neighbours.
    rows = torch.arange(tokens, dtype=torch.int16).view(torch.bfloat16)[:, None, None].expand(-1, 4, 64).contiguous()
    loc = torch.randint(1, 9, (tokens,), generator=torch.Generator().manual_seed(0))
    cache = canary(2, 10, 4, 64, dtype=torch.bfloat16)
    before, one = torch.get_num_threads(), torch.ones(4)
    torch.set_num_threads(threads)
    try:
        _native.store_kv(rows, rows, cache[0], cache[1], loc, one, one, faults(), fmt)
    finally:
        torch.set_num_threads(before)
    for slot in range(1, 9):
        last = int((loc == slot).nonzero()[-1])
        assert same(cache[0, slot], rows[last])
        assert same(cache[1, slot], rows[last])


STORES = [op for op in dispatch.OPS if op.startswith(("store_kv", "move_kv"))]


@pytest.mark.parametrize("op", STORES)
def test_slots_named_many_times_hold_their_last_rows(isa: str, op: str) -> None:
    """In every layout, dtype and way rows lie, on one thread and several."""
    before, rng = torch.get_num_threads(), random.Random(isa + op)
    for case in [case for case in testing.cases(op) if case.tokens > 2]:
        want, got = testing.build(case), testing.build(case)
        fmt = case.variant.fmt
        assert fmt is not None
        first = rng.randrange(fmt.page_size, testing._num_rows(case, fmt))
        few = [rng.randrange(fmt.page_size, testing._num_rows(case, fmt)) for _ in range(rng.choice((1, 3, 40)))]
        few = rng.choice((few, range(first, min(first + 20, testing._num_rows(case, fmt)))))  # neighbours share lines
        named = [rng.choice(few) if rng.random() < 0.8 else None for _ in range(case.tokens)]
        threads = rng.choice((1, 2, 3, 4))
        for args in (want, got):
            loc = args[2 if op.startswith("move_kv") else 4].tensor
            for t, slot in enumerate(named):
                loc[t] = loc[t] if slot is None else slot
        testing._definition(op)(*testing._tensors(want))
        torch.set_num_threads(threads)
        try:
            getattr(_native, op)(*testing._tensors(got))
        finally:
            torch.set_num_threads(before)
        for a, b in zip(want, got, strict=True):
            if isinstance(a, buffers.Buffer):
                buffers.compare(f"{case} on {threads} threads", a, b)


def test_torchs_thread_count_in_a_python_thread_of_its_own() -> None:
    """OpenMP counts per thread, and torch hands its count on only where it is asked: a store must ask before it starts
    threads."""
    openmp, counts, before = ctypes.CDLL("libgomp.so.1"), [], torch.get_num_threads()
    caches, rows, fmt = torch.zeros(2, 1025, 2, 64), torch.ones(1024, 2, 64), KVFormat(2, 64, 64, torch.float32)
    arguments = (rows, rows, *caches, torch.arange(1, 1025), None, None, faults(), fmt)

    def work() -> None:
        cpu_amx.store_kv(*arguments)
        counts.append(openmp.omp_get_max_threads())

    torch.set_num_threads(before + 3)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert counts == [before + 3]


def test_distinct_slots_from_many_python_threads() -> None:
    tokens, fmt = 64, KVFormat(4, 64, 64, torch.bfloat16)
    cache, one, count = torch.zeros(2, 8 * tokens + 1, 4, 64, dtype=torch.bfloat16), torch.ones(4), faults()
    rows = torch.randn(8, tokens, 4, 64).to(torch.bfloat16)

    def work(i: int) -> None:
        loc = torch.arange(tokens) + 1 + i * tokens
        loc = torch.cat([loc, torch.tensor([10**6])])
        x = torch.cat([rows[i], rows[i, :1]])
        for _ in range(50):
            _native.store_kv(x, x, cache[0], cache[1], loc, one, one, count, fmt)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert same(cache[0, 1:], rows.flatten(0, 1))
    assert same(cache[1, 1:], rows.flatten(0, 1))
    assert dict(zip(FAULT_KINDS, count.tolist(), strict=True)) == dict.fromkeys(FAULT_KINDS, 0) | {"store_kv": 8 * 50}


@pytest.mark.parametrize("count", [7, 3000])
def test_move_permutes_as_if_read_first(isa: str, count: int) -> None:
    dtype, fmt = torch.bfloat16, KVFormat(3, 40, 24, torch.bfloat16)
    k = torch.randn(2, count + 1, 3, 40).to(dtype)
    v = torch.randn(2, count + 1, 5, 24).to(dtype)[:, :, 1:4]
    want_k, want_v = k.clone(), v.clone()
    slots = torch.arange(count) + 1
    _native.move_kv(k, v, slots.roll(1), slots, faults(), fmt)
    want_k[:, slots.roll(1)], want_v[:, slots.roll(1)] = want_k[:, slots].clone(), want_v[:, slots].clone()
    assert same(k, want_k)
    assert same(v, want_v)


def test_rows_without_bytes(isa: str) -> None:
    fmt, slots = KVFormat(3, 40, 0, torch.bfloat16), torch.tensor([1, 2])
    k, v = torch.ones(2, 4, 3, 40, dtype=torch.bfloat16), torch.ones(2, 4, 3, 0, dtype=torch.bfloat16)
    k[:, 1] = 7
    one = torch.ones(3)
    _native.move_kv(k, v, slots.flip(0), slots, faults(), fmt)
    _native.store_kv(k[0, 1:3], v[0, 1:3], k[1], v[1], slots, one, one, faults(), fmt)
    assert k[:, 2].eq(7).all()
    assert k[:, 1].eq(1).all()


@pytest.mark.parametrize("module", [_native, reference], ids=("native", "reference"))
@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_one_element(module: Any, tokens: int, heads: int, stored: torch.dtype) -> None:
    """Such a row is dense whatever its stride, which torch makes 0 in what it computes from no tokens at all."""
    dtype, fmt = torch.bfloat16, KVFormat(heads, 1, 1, stored)
    rows = torch.randn(tokens, heads, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    k, v = rows[..., :1], rows[..., 1:].as_strided((tokens, heads, 1), (3 * heads, 3, 2))
    one, loc, cache = torch.ones(heads), torch.arange(tokens) + 1, canary(2, 5, heads, 1, dtype=stored)
    module.store_kv(k, v, cache[0], cache[1], loc, one, one, faults(), fmt)
    want = canary(2, 5, heads, 1, dtype=stored)
    want[0, 1 : tokens + 1], want[1, 1 : tokens + 1] = k.to(stored), v.to(stored)
    assert same(cache, want)
    out = canary(tokens, heads, 2, dtype=dtype)
    module.gather_kv(cache[0], cache[1], loc, out[..., :1], out[..., 1:], one, one, faults(), fmt)
    assert same(out, torch.cat((k, v), -1).to(stored).to(dtype))


def arguments() -> dict[str, Any]:
    k_cache, v_cache = canary(2, 6, 2, 8, dtype=torch.bfloat16)
    k, v = torch.ones(2, 3, 2, 8, dtype=torch.bfloat16)
    one = torch.ones(2)
    fmt = KVFormat(2, 8, 8, torch.bfloat16)
    loc = torch.tensor([1, 2, 9])
    names = ("k", "v", "k_cache", "v_cache", "loc", "k_inv", "v_inv", "faults", "fmt")
    return dict(zip(names, (k, v, k_cache, v_cache, loc, one, one, faults(), fmt), strict=True))


def shrunk(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` whose storage ends one byte too early."""
    x = x.clone()
    x.untyped_storage().resize_(x.nbytes - 1)
    return x


def freed(x: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """A tensor of the shape of `x` whose memory was given back, `offset` elements behind the start of it."""
    memory = x.new_empty(offset + x.numel())
    x = memory[offset:].view(x.shape)
    memory.untyped_storage().resize_(0)
    return x


BAD: list[tuple[str, Callable[[torch.Tensor], Any], type[Exception]]] = [
    ("k", lambda x: None, TypeError),
    ("k", lambda x: x.numpy(force=True) if x.dtype != torch.bfloat16 else x.float().numpy(), TypeError),
    ("k", lambda x: x.to("meta"), TypeError),
    ("k", lambda x: x.to_sparse(), TypeError),
    ("k", freed, TypeError),
    ("k", lambda x: freed(x, 5), TypeError),
    ("k", lambda x: freed(x, 1 << 20), TypeError),
    ("k", torch._to_functional_tensor, TypeError),
    ("k", shrunk, TypeError),
    ("k", torch._neg_view, TypeError),
    ("k_cache", shrunk, TypeError),
    ("loc", shrunk, TypeError),
    ("loc", torch._neg_view, TypeError),
    ("faults", shrunk, TypeError),
    ("k", lambda x: x.double(), TypeError),
    ("k", lambda x: x.to(torch.float8_e4m3fn), TypeError),
    ("k", lambda x: x[:2], ValueError),
    ("k", lambda x: x[:, :1], ValueError),
    ("k", lambda x: x[..., :4], ValueError),
    ("k", lambda x: x[0], ValueError),
    ("k", lambda x: x[None, None], ValueError),
    ("k", lambda x: torch.ones(3, 2, 16, dtype=x.dtype)[..., ::2], ValueError),
    ("v", lambda x: x[:2], ValueError),
    ("k_cache", lambda x: x.view(torch.float16), TypeError),
    ("k_cache", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), ValueError),
    ("v_cache", lambda x: x[:5], ValueError),
    ("v_cache", lambda x: x.view(torch.float16), TypeError),
    ("loc", lambda x: x.to(torch.int16), TypeError),
    ("loc", lambda x: x[None], ValueError),
    ("loc", lambda x: [1, 2, 3], TypeError),
    ("loc", freed, TypeError),
    ("loc", lambda x: freed(x, 1), TypeError),
    ("faults", lambda x: x[: len(FAULT_KINDS) - 1], ValueError),
    ("faults", lambda x: x.int(), TypeError),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_bad_argument_is_named_and_nothing_is_written(reader: None, case: int) -> None:
    name, spoil, error = BAD[case]
    args = arguments()
    watched = [args[key] for key in ("k_cache", "v_cache", "faults")]
    before = [x.clone() for x in watched]
    args[name] = spoil(args[name])
    with pytest.raises(error, match=rf"^{name}: expected .*, got "):
        _native.store_kv(**args)
    assert all(same(x, y) for x, y in zip(watched, before, strict=True))


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_rows_and_cache_lie_apart(reader: None, name: str, cache: str) -> None:
    args = arguments()
    args[name] = args[cache][2:5]
    before = args[cache].clone()
    with pytest.raises(ValueError, match=rf"^{name}: expected memory apart from the cache, got a part of it"):
        _native.store_kv(**args)
    assert same(args[cache], before)


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(1, 2), None])
def test_a_quantising_store_checks_its_scales(reader: None, bad: Any) -> None:
    args = arguments()
    args["fmt"] = KVFormat(2, 8, 8, torch.float8_e5m2)
    args["k_cache"], args["v_cache"] = canary(2, 6, 2, 8, dtype=torch.float8_e5m2)
    args["v_inv"] = bad
    with pytest.raises((TypeError, ValueError), match=r"^v_inv: expected .*, got "):
        _native.store_kv(**args)
    assert same(args["k_cache"], canary(6, 2, 8, dtype=torch.float8_e5m2))


def test_subclasses_are_read_only_where_they_have_memory(reader: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Plain(torch.Tensor):
        pass

    args = arguments()
    args["k"] = args["k"].as_subclass(Plain)
    args["k_cache"] = torch.nn.Parameter(args["k_cache"], requires_grad=True)
    _native.store_kv(**args)
    assert args["k_cache"][1:3].eq(1).all()
    with FakeTensorMode() as mode:
        args["k"] = mode.from_tensor(torch.ones(3, 2, 8, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match=r"^k: expected a plain torch.Tensor, got FakeTensor"):
        _native.store_kv(**args)


def test_slot_ops_refuse_short_outputs_and_foreign_slots() -> None:
    mapping, loc, count = torch.tensor([0, 3, 4, -1]), torch.tensor([1, 2]), faults()
    out = torch.full((1,), 9)
    with pytest.raises(ValueError, match=r"^loc_out: expected 2 or more slots, got 1"):
        _native.translate_loc(mapping, loc, torch.zeros(2, dtype=torch.int64), out, None, None, count)
    with pytest.raises(ValueError, match=r"^out: expected 2 or more slots, got 1"):
        _native.cast_loc(loc, out, count)
    with pytest.raises(ValueError, match=r"^slots: expected 0 <= slot < 4, got 4"):
        _native.patch_map(mapping, torch.tensor([1, 4]), torch.tensor([7, 7]))
    with pytest.raises(ValueError, match=r"^values: expected 2 entries, got 1"):
        _native.patch_map(mapping, loc, out)
    assert mapping.tolist() == [0, 3, 4, -1]
    assert out.tolist() == [9]
    assert not count.any()


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^name: expected one of isas\(\), got avx9"):
        _native.set_isa("avx9")


def test_probing_the_build_loads_no_extension() -> None:
    code = (
        "import sys, types; root = types.ModuleType('portakv'); root.__path__ = [sys.argv[1]]\n"
        "sys.modules['portakv'] = root\n"
        "from portakv.kernels.cpu_amx.device import build_problem\n"
        "build_problem()\n"
        "assert 'portakv.kernels.cpu_amx._native' not in sys.modules"
    )
    package = Path(cpu_amx.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(package)], check=True)


def test_install_without_a_compiler(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    source = tmp_path / "source"
    unbuilt = shutil.ignore_patterns("*.so", "_build.py", "__pycache__")
    shutil.copytree(root / "portakv", source / "portakv", ignore=unbuilt)
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    wheel_command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "."]
    subprocess.run(
        [*wheel_command, "-w", str(tmp_path)],
        cwd=source,
        env={**os.environ, "CXX": "/nonexistent/c++"},
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert not any(n.endswith((".so", ".cpp", ".h", ".gitignore")) for n in names)
        built = archive.read("portakv/kernels/cpu_amx/_build.py").decode()
    scope: dict[str, Any] = {}
    exec(built, scope)
    assert scope["PROBLEM"] == "not built: no working C++ compiler was found at install time"
