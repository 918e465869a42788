"""Packed CPU pages: the addresses of every element, tiles and single tokens, threads, and the pool that holds them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from portakv import HybridKVPool, LayerSpec, NoKernel, dispatch, testing
from portakv.device import Device, DeviceFacts
from portakv.formats import FAULT_KINDS, FP8_DIALECTS, SLOT_OPS, KVFormat, Layout
from portakv.groups import choose_layout
from portakv.kernels.cpu_amx import kernels as cpu_amx
from portakv.kernels.reference import packed as reference_packed
from portakv.kernels.reference import rows as reference
from portakv.memory.layouts import LAYOUTS, find_layout

if problem := cpu_amx.build_problem():
    pytest.fail(problem, pytrace=False)

from portakv.kernels.cpu_amx import _native

BF16 = torch.bfloat16
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(best)


def offset(layout: Layout, is_v: bool, page: int, dim: int, t: int, d: int) -> int:
    """Where one element lies in the page of a head, from vLLM's CPU attention."""
    if layout is Layout.CPU_VEC:
        return t * dim + d if is_v else d * page + t
    if is_v:
        return (d // 16) * (page * 16) + (t // 2) * 32 + d % 16 * 2 + t % 2
    return ((t // 16) * (dim // 2) + d // 2) * 32 + t % 16 * 2 + d % 2


def random_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize("fmt", [f for f in testing.formats() if f.packed], ids=lambda f: f.tag)
def test_every_element_is_where_the_formula_says(fmt: KVFormat, name: str) -> None:
    kernel = _native.store_kv_packed if name == "native" else reference_packed.store_kv_packed
    torch.manual_seed(0)
    heads, dims, page = fmt.num_kv_heads, (fmt.head_dim, fmt.v_head_dim), fmt.page_size
    loc = torch.arange(page + 7, 3 * page)
    x = [random_rows((len(loc), heads, dim), fmt.dtype) for dim in dims]
    caches = [
        torch.zeros(3, heads, page, dim, dtype=torch.uint8).view(fmt.dtype)
        if fmt.dtype.itemsize == 1
        else torch.zeros(3, heads, page, dim, dtype=fmt.dtype)
        for dim in dims
    ]
    one = torch.ones(heads)
    kernel(*x, *caches, loc, one, one, torch.zeros(len(FAULT_KINDS), dtype=torch.int64), fmt)
    for is_v in (False, True):
        ints, dim = INTEGERS[fmt.dtype.itemsize], dims[is_v]
        want = torch.zeros(3, heads, page * dim, dtype=ints)
        for t in range(page):
            index = torch.tensor([offset(fmt.layout, is_v, page, dim, t, d) for d in range(dim)])
            for at in torch.nonzero(loc % page == t)[:, 0].tolist():
                want[int(loc[at]) // page][:, index] = x[is_v][at].view(ints)
        assert torch.equal(caches[is_v].view(ints).flatten(2), want)


@pytest.mark.parametrize("op", ["store_kv_packed", "gather_kv_packed", "move_kv_packed"])
def test_every_instruction_set_matches_the_reference(op: str, isa: str) -> None:
    for case in testing.cases(op):
        testing.check(op, getattr(_native, op), case, torch.device("cpu"))


def test_threads_share_no_line_and_the_last_row_of_a_slot_wins() -> None:
    """Scattered slots with repeats, in checked order against the reference fed without the rows that lose."""
    torch.manual_seed(0)
    fmt = KVFormat(3, 64, 96, BF16, 32, Layout.CPU_AMX)
    loc = torch.randint(32, 64 * 32, (3000,))
    last = {int(slot): t for t, slot in enumerate(loc)}
    kept = torch.tensor(sorted(last.values()))
    k, v = torch.randn(3000, 3, 64).bfloat16(), torch.randn(3000, 3, 96).bfloat16()
    one, faults = torch.ones(3), torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    want, got = ([torch.zeros(64, 3, 32, dim, dtype=BF16) for dim in (64, 96)] for _ in range(2))
    reference_packed.store_kv_packed(k[kept], v[kept], *want, loc[kept], one, one, faults, fmt)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        _native.store_kv_packed(k, v, *got, loc, one, one, faults, fmt)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


TILES = [
    KVFormat(2, 64, 96, BF16, 96, Layout.CPU_AMX),
    KVFormat(1, 80, 48, torch.float32, 32, Layout.CPU_VEC),
    KVFormat(3, 48, 80, BF16, 32, Layout.CPU_VEC),
    KVFormat(2, 80, 96, torch.float8_e4m3fn, 64, Layout.CPU_VEC),
    KVFormat(3, 48, 80, torch.float8_e5m2fnuz, 96, Layout.CPU_VEC),  # its tiles are half a line wide
    KVFormat(2, 48, 80, BF16, 64, Layout.CPU_VEC),  # two lines
    KVFormat(1, 144, 48, torch.float32, 128, Layout.CPU_VEC),  # and four
]


def aligned(x: torch.Tensor, to: int) -> torch.Tensor:
    """A copy whose address is a multiple of `to` and of no larger power of two."""
    memory = torch.empty(x.nbytes + 2 * to, dtype=torch.uint8)
    start = (to - memory.data_ptr()) % (2 * to)
    return memory[start : start + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fmt", TILES, ids=lambda f: f.tag)
def test_tiles_whole_and_partial_in_any_order(fmt: KVFormat, threads: int, isa: str) -> None:
    """Slots repeat, and the last row of each wins: the reference is fed with those alone."""
    torch.manual_seed(threads)
    page, heads, dims = fmt.page_size, fmt.num_kv_heads, (fmt.head_dim, fmt.v_head_dim)
    whole, partial = page + torch.randperm(page), 2 * page + torch.randint(0, page, (page,))
    half, single = 5 * page + torch.arange(page // 2 + 1), [3 * page + 5, 4 * page, 5 * page - 1]
    half_line = 6 * page + torch.arange(8 if fmt.layout is Layout.CPU_AMX else 32 // fmt.dtype.itemsize)
    skipped = [-1, 0, page - 1, 7 * page, 2**31 - 1]
    loc = torch.cat([whole, partial, half, half_line, torch.tensor(single + skipped)])
    loc = loc[torch.randperm(len(loc))].to(torch.int32 if threads == 1 else torch.int64)
    kept = torch.tensor(sorted({int(slot): t for t, slot in enumerate(loc)}.values()))
    before = torch.get_num_threads()
    for dtype in (fmt.dtype, torch.float32):
        k, v = (random_rows((len(loc), heads, dim), dtype) for dim in dims)
        want = [random_rows((7, heads, page, dim), fmt.dtype) for dim in dims]
        got, inv = [aligned(cache, 64 if threads == 1 else 4) for cache in want], torch.rand(heads) + 0.5
        faults, counted = torch.zeros(2, len(FAULT_KINDS), dtype=torch.int64)
        reference_packed.store_kv_packed(k[kept], v[kept], *want, loc[kept], inv, inv, faults, fmt)
        torch.set_num_threads(threads)
        try:
            _native.store_kv_packed(k, v, *got, loc, inv, inv, counted, fmt)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(faults, counted)
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


FMT = KVFormat(2, 64, 32, BF16, 32, Layout.CPU_AMX)


def arguments() -> dict[str, Any]:
    return {
        "k": torch.zeros(3, 2, 64, dtype=BF16),
        "v": torch.zeros(3, 2, 32, dtype=BF16),
        "k_cache": torch.zeros(4, 2, 32, 64, dtype=BF16),
        "v_cache": torch.zeros(4, 2, 32, 32, dtype=BF16),
        "loc": torch.tensor([40, 41, 42]),
        "k_inv": torch.ones(2),
        "v_inv": torch.ones(2),
        "faults": torch.zeros(len(FAULT_KINDS), dtype=torch.int64),
        "fmt": FMT,
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k_cache", torch.zeros(128, 2, 64, dtype=BF16), r"k_cache: expected shape \[pages, heads, page, dim\]"),
        ("k_cache", torch.zeros(4, 2, 64, 64, dtype=BF16), "k_cache: expected pages of the format's size"),
        ("k_cache", torch.zeros(4, 2, 32, 48, dtype=BF16), "k_cache: expected a head dim that is a multiple of 32"),
        ("k_cache", torch.zeros(4, 2, 32, 128, dtype=BF16)[..., ::2], "k_cache: expected dense pages of each head"),
        ("k_cache", torch.zeros(4, 2, 32, 64), "k_cache: expected a bfloat16 tensor, got float32"),
        ("v_cache", torch.zeros(5, 2, 32, 32, dtype=BF16), r"v_cache: expected shape \[..., 4, 2, page, dim\]"),
        ("k", torch.zeros(3, 2, 32, dtype=BF16), r"k: expected shape \[3, 2, 64\]"),
        ("v", torch.zeros(3, 2, 32), "v: expected bfloat16, got float32"),
        ("loc", torch.zeros(3), "loc: expected int32 or int64, got float32"),
        ("fmt", KVFormat(2, 64, 32, torch.float16, 32, Layout.CPU_VEC), "k_cache: expected float16, got bfloat16"),
    ],
)
def test_refusals_name_the_argument(name: str, value: Any, message: str) -> None:
    args = arguments() | {name: value}
    with pytest.raises((TypeError, ValueError), match=message):
        _native.store_kv_packed(*args.values())
    assert not args["v_cache"].any()


# ---- the pool -----------------------------------------------------------------------------------------------------

LAYERS = [LayerSpec(None, 2, 64, 32), LayerSpec(40, 2, 64, 32), LayerSpec(None, 1, 96)]
DTYPES = {"cpu_amx": (BF16,), "cpu_vec": (BF16, torch.float16, torch.float32, *FP8_DIALECTS)}
CHOICES = [(layout, dtype) for layout, dtypes in DTYPES.items() for dtype in dtypes]


def test_rows_of_a_batch_are_refused_by_gathers_of_pages() -> None:
    """The pool gives these kernels rows of their own; what only row gathers can write must not be taken for them."""
    pool = make("cpu_vec")
    layer, loc = pool._layers[0], pool.allocator.alloc(6)
    k, v = (torch.zeros((2, 3, *tail), dtype=pool.dtype) for tail in (layer.k_tail, layer.v_tail))
    one = torch.ones(layer.k_tail[0])
    with pytest.raises(ValueError, match=r"k_out: expected shape \[tokens, heads, dim\], got"):
        layer.gather(layer.k_cache, layer.v_cache, loc, k, v, one, one, pool._faults, layer.fmt)
    got = pool.gather_kv(0, pool.plan_write(loc), k, v)
    assert got[0] is k


def make(layout: str, dtype: torch.dtype = BF16, row: str = "native", **options: Any) -> HybridKVPool:
    kernels = dict.fromkeys((*SLOT_OPS, *KVFormat(2, 64, 32, dtype, 32, find_layout(layout)).ops), row)
    options = {"size": 256, "swa_size": 192, "page_size": 32, "kernels": kernels, "check": True} | options
    return HybridKVPool(LAYERS, dtype=dtype, layout=layout, device="cpu", **options)


@pytest.mark.parametrize("row", ["native", "reference"])
@pytest.mark.parametrize(("layout", "dtype"), CHOICES, ids=str)
def test_a_pool_stores_moves_copies_and_reads(layout: str, dtype: torch.dtype, row: str) -> None:
    pool, twin = make(layout, dtype, row), make(layout, dtype, row)
    torch.manual_seed(0)
    slots = pool.allocator.alloc(96)
    write_loc = pool.plan_write(slots)
    sources, stored = [], []
    for i, spec in enumerate(LAYERS):
        pool.set_scales(i, 0.5, 2.0)
        twin.set_scales(i, 0.5, 2.0)
        k, v = (torch.randn(96, spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.v_dim))
        pool.set_kv_buffer(i, write_loc, k, v)
        fmt = next(group.fmt for group in pool.groups if i in group.layers)
        heads = torch.ones(spec.num_kv_heads)
        sources.append((k, v))
        stored.append((reference.convert(k, fmt, heads * 2), reference.convert(v, fmt, heads / 2)))

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

    for i in range(len(LAYERS)):
        assert all(same(a, b) for a, b in zip(pool.gather_kv(i, write_loc), stored[i], strict=True))
        k, v = pool.gather_kv(i, write_loc, dtype=torch.float32)
        assert torch.allclose(k, sources[i][0], rtol=0.2, atol=0.2)
    copy = pool.copy_to_host(slots)
    there = twin.load_from_host(copy)
    for i in range(len(LAYERS)):
        assert all(same(a, b) for a, b in zip(twin.gather_kv(i, twin.plan_write(there)), stored[i], strict=True))
    src, tgt = slots[:60], slots[36:]  # they overlap
    pool.move_kv_cache(tgt, src)
    moved = pool.plan_write(tgt)
    for i in range(len(LAYERS)):
        assert all(same(a, b[:60]) for a, b in zip(pool.gather_kv(i, moved), stored[i], strict=True))
    pool.check_integrity()
    assert not any(pool.faults().values())


@pytest.mark.parametrize("layout", ["cpu_amx", "cpu_vec"])
def test_pages_as_readers_take_them(layout: str) -> None:
    pool = make(layout)
    k, v = pool.get_kv_buffer(1)
    assert k.shape == (7, 2, 32, 64)
    assert v.shape == (7, 2, 32, 32)
    assert k.is_contiguous()
    assert v.is_contiguous()
    description = next(d for d in pool.describe() if 1 in d.layers)
    assert description.item_slots == 32
    assert (description.k_item_bytes, description.v_item_bytes) == (32 * 2 * 64 * 2, 32 * 2 * 32 * 2)
    assert description.k_buffers == ((k.data_ptr(), k.nbytes),)
    assert description.v_buffers == ((v.data_ptr(), v.nbytes),)
    assert pool.kv_bytes == sum(b.nbytes for group in pool.groups for b in group.buffers)
    fitted = HybridKVPool.fit(LAYERS, 2**20, swa_ratio=0.5, page_size=32, layout=layout, device="cpu")
    assert 0.9 * 2**20 < fitted.nbytes <= 2**20


@pytest.mark.parametrize(
    ("layout", "spec", "options", "why"),
    [
        ("cpu_amx", LayerSpec(None, 2, 80), {}, "head dims 80 and 80, not multiples of 32"),
        ("cpu_vec", LayerSpec(None, 2, 64, 40), {}, "head dims 64 and 40, not multiples of 16"),
        ("cpu_vec", LayerSpec(None, 2, 64), {"page_size": 16}, "pages of 16 slots, not a multiple of 32"),
        ("cpu_amx", LayerSpec(None, 2, 64), {"dtype": torch.float16}, "torch.float16 instead of torch.bfloat16"),
        ("cpu_vec", LayerSpec(None, 1, 512, 64, mla=True), {}, "an MLA latent"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(
    layout: str, spec: LayerSpec, options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portakv.device.zeros", lambda *_: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=f"layout: expected layers that '{layout}' can hold, got {why}"):
        HybridKVPool([spec], **{"size": 64, "page_size": 32, "layout": layout, "device": "cpu"} | options)


@pytest.mark.parametrize("page_size", [0, "32", 32.0, True])
@pytest.mark.parametrize("layout", ["auto", "cpu_vec", "rows"])
def test_what_is_no_page_size(layout: str, page_size: Any) -> None:
    for build in (
        lambda: HybridKVPool([LAYERS[0]], size=64, page_size=page_size, layout=layout, device="cpu"),
        lambda: HybridKVPool.fit([LAYERS[0]], 2**20, page_size=page_size, layout=layout, device="cpu"),
    ):
        with pytest.raises((TypeError, ValueError), match=r"page_size: expected .*, got"):
            build()


@pytest.mark.parametrize("layout", [x.name for x in LAYOUTS if x.packed])
def test_other_devices_do_not_pack(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """meta stands for any device without kernels of its own."""
    for device in {*dispatch.DEVICES, dispatch.OTHER} - {dispatch.CPU}:
        with pytest.raises(
            ValueError, match=f"layout: expected one of .*on a device of kind {device.name}, got '{layout}'"
        ):
            choose_layout(layout, [HEADS], BF16, 32, DeviceFacts(device, "any"))
    monkeypatch.setattr("portakv.device.zeros", lambda *_: pytest.fail("allocated"))
    for build in (
        lambda: HybridKVPool([HEADS], size=64, page_size=32, layout=layout, device="meta"),
        lambda: HybridKVPool.fit([HEADS], 2**20, page_size=32, layout=layout, device="meta"),
    ):
        with pytest.raises(ValueError, match=r"layout: expected one of .*'flashmla', .* of kind other, got"):
            build()


def test_no_gpu_kernel_packs() -> None:
    fmt = KVFormat(2, 64, 64, BF16, 32, Layout.CPU_VEC)
    with pytest.raises(NoKernel, match="cannot store layout 'cpu_vec'"):
        dispatch.select("store_kv", DeviceFacts(dispatch.CUDA, "sm_90"), dispatch.Request(fmt))


HEADS, ODD, MLA = LayerSpec(None, 2, 64), LayerSpec(None, 2, 80), LayerSpec(None, 1, 512, 64, mla=True)


@pytest.mark.parametrize(
    ("device", "features", "layers", "dtype", "page", "layout"),
    [
        (dispatch.CPU, {"amx", "avx512", "avx2"}, [HEADS], BF16, 32, Layout.CPU_AMX),
        (dispatch.CPU, {"amx", "avx512", "avx2"}, [HEADS, ODD], BF16, 32, Layout.CPU_VEC),
        (dispatch.CPU, {"amx", "avx512", "avx2"}, [HEADS], torch.float8_e5m2, 64, Layout.CPU_VEC),
        (dispatch.CPU, {"avx2"}, [HEADS], BF16, 32, Layout.CPU_VEC),
        (dispatch.CPU, {"avx2"}, [HEADS], BF16, 16, Layout.ROWS),
        (dispatch.CPU, set(), [HEADS, MLA], BF16, 32, Layout.ROWS),
        *((device, set(), [HEADS], BF16, 32, Layout.ROWS) for device in dispatch.DEVICES if device is not dispatch.CPU),
    ],
)
def test_auto_takes_what_the_cpu_has(
    device: Device, features: set[str], layers: list[LayerSpec], dtype: torch.dtype, page: int, layout: Layout
) -> None:
    found = DeviceFacts(device, "any", features=frozenset(features))
    assert choose_layout("auto", layers, dtype, page, found) is layout


def test_a_pool_chooses_by_itself() -> None:
    pool = HybridKVPool([HEADS], size=64, page_size=32, layout="auto", device="cpu")
    assert pool.layout in (Layout.CPU_AMX, Layout.CPU_VEC)
    assert pool.kernels["store_kv_packed"] == "native"


def test_random_calls_leave_two_rows_with_the_same_bytes() -> None:
    """Both rows serve the same stores, moves and frees; whole buffers are compared."""
    rng = random.Random(0)
    pools = [make("cpu_vec", torch.float8_e4m3fn, row, check=False) for row in ("native", "reference")]
    torch.manual_seed(0)
    for _ in range(30):
        n = rng.choice((1, 5, 31, 64))
        slots = torch.randint(-2, 300, (n,)) if rng.random() < 0.5 else torch.arange(n) + rng.randrange(0, 250)
        slots = slots.unique()
        for i, spec in enumerate(LAYERS):
            k, v = (torch.randn(len(slots), spec.num_kv_heads, dim).half() for dim in (spec.head_dim, spec.v_dim))
            for pool in pools:
                pool.set_kv_buffer(i, pool.plan_write(slots), k, v)
    for a, b in zip(pools[0].groups, pools[1].groups, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.buffers, b.buffers, strict=True))
    assert pools[0].faults() == pools[1].faults()
