"""Layouts beside plain rows, through the pool: what is stored, read, moved, copied, described and refused."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch

from portakv import HybridKVPool, LayerSpec, NoKernel, dispatch, testing
from portakv import device as devices
from portakv.errors import IntegrityError
from portakv.formats import KVFormat, Layout, list_variants
from portakv.layers import require_heads
from portakv.memory.layouts import LAYOUTS

MLA_FULL, MLA_SWA = LayerSpec(None, 1, 24, 8, mla=True), LayerSpec(6, 1, 24, 8, mla=True)
HEADS = LayerSpec(None, 2, 8)


def rows_here() -> list[str]:
    found = dispatch.facts("cpu")
    chosen = dispatch.select("store_kv", found)
    return [chosen.row.name, *(row.name for row, why in chosen.rejected if why.endswith("comes first"))]


@pytest.fixture(params=rows_here())
def make(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make(layers, …)`: a small pool on each row that serves here."""
    if device.type == "cpu":
        monkeypatch.setenv("PORTAKV_KERNELS", ",".join(f"{op}={request.param}" for op in dispatch.OPS))

    def pool(layers: list[LayerSpec], **options: Any) -> HybridKVPool:
        options = {"size": 48, "swa_size": 32, "page_size": 4, "check": True} | options
        return HybridKVPool(layers, device=device, **options)

    return pool


def rows(n: int, *dims: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 1, dim, generator=generator).to(torch.bfloat16) for dim in dims]


def test_an_mla_row_is_the_latent_and_then_the_rope_part(make: Any) -> None:
    pool = make([MLA_FULL, HEADS, MLA_SWA])
    pool.allocator.alloc(4, swa_tail=0)
    write_loc = pool.plan_write(pool.allocator.alloc(7))
    latent, rope = (x.to(pool.device) for x in rows(7, 24, 8))
    for layer, loc in ((0, write_loc.loc), (2, write_loc.swa_loc)):
        pool.set_kv_buffer(layer, write_loc, latent, rope)
        whole, part = pool.get_kv_buffer(layer)
        assert whole.shape == (len(whole), 1, 32)
        assert whole.is_contiguous()
        assert torch.equal(whole[loc], torch.cat((latent, rope), -1))
        assert part.data_ptr() == whole.data_ptr()
        assert torch.equal(part[loc], latent)
        assert whole.count_nonzero() == latent.count_nonzero() + rope.count_nonzero()
        for out, x in zip(pool.gather_kv(layer, write_loc), (latent, rope), strict=True):
            assert torch.equal(out, x)
    pool.check_integrity()


def test_equal_formats_of_several_pools_are_one_object() -> None:
    """A launcher tells formats apart by identity."""
    for layout, spec in (("rows", HEADS), ("rows", MLA_FULL), ("flashmla", LayerSpec(None, 1, 448, 64, mla=True))):
        groups = [
            HybridKVPool([spec], size=n, page_size=64, dtype=torch.float8_e4m3fn, layout=layout, device="cpu").groups[0]
            for n in (64, 128)
        ]
        assert groups[0].fmt is groups[1].fmt
        assert groups[0].raw is groups[1].raw


def test_each_part_of_a_quantised_mla_row_has_its_own_scale(make: Any) -> None:
    pool = make([MLA_FULL], dtype=torch.float8_e4m3fn)
    write_loc = pool.plan_write(pool.allocator.alloc(5))
    latent, rope = (x.to(pool.device) for x in rows(5, 24, 8))
    pool.set_scales(0, 0.5, 0.0625)
    pool.set_kv_buffer(0, write_loc, latent, rope)
    whole, _ = pool.get_kv_buffer(0)
    want = [(x.float() / scale).to(torch.float8_e4m3fn) for x, scale in ((latent, 0.5), (rope, 0.0625))]
    assert torch.equal(whole[write_loc.loc].view(torch.uint8), torch.cat(want, -1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_mla_rows_move_and_go_to_the_host_and_back(make: Any, dtype: torch.dtype) -> None:
    layers = [MLA_FULL, MLA_SWA]
    pool, other = make(layers, dtype=dtype), make(layers, dtype=dtype)
    loc = pool.allocator.alloc(8)
    write_loc = pool.plan_write(loc)
    for layer in (0, 1):
        pool.set_kv_buffer(layer, write_loc, *(x.to(pool.device) for x in rows(8, 24, 8, seed=layer)))
    before = [pool.gather_kv(layer, write_loc) for layer in (0, 1)]
    copy = pool.copy_to_host(loc)
    other.allocator.alloc(4)
    there = other.plan_write(other.load_from_host(copy))
    order = torch.tensor([3, 0, 2, 1, 7, 5, 6, 4])
    pool.move_kv_cache(loc, loc[order])
    for layer in (0, 1):
        for mine, moved, theirs in zip(
            before[layer], pool.gather_kv(layer, write_loc), other.gather_kv(layer, there), strict=True
        ):
            mine, moved, theirs = (x.view(torch.uint8) for x in (mine, moved, theirs))
            assert torch.equal(mine[order.to(mine.device)], moved)
            assert torch.equal(mine, theirs)
    pool.check_integrity()


def test_an_mla_layer_is_described_as_one_buffer() -> None:
    pool = HybridKVPool([MLA_FULL], size=16, page_size=4, device="cpu")
    loc = pool.allocator.alloc(3)
    latent, rope = rows(3, 24, 8)
    pool.set_kv_buffer(0, pool.plan_write(loc), latent, rope)
    (group,) = pool.describe()
    assert (group.k_item_bytes, group.v_item_bytes, group.item_slots, group.v_buffers) == (64, 0, 1, ())
    ((address, size),) = group.k_buffers
    assert size == pool.kv_bytes == 20 * 64
    want = torch.cat((latent, rope), -1)[2].view(torch.uint8).numpy().tobytes()
    assert ctypes.string_at(address + int(loc[2]) * 64, 64) == want
    assert group.tag != HybridKVPool([LayerSpec(None, 1, 24, 8)], size=16, device="cpu").describe()[0].tag


V4, V32 = LayerSpec(None, 1, 448, 64, mla=True), LayerSpec(None, 1, 512, 64, mla=True)
FLASHMLA = {"flashmla": V4, "flashmla_v32": V32}


def flash_pool(make: Any, layout: str, **options: Any) -> HybridKVPool:
    spec = FLASHMLA[layout]
    options = {"dtype": torch.float8_e4m3fn, "layout": layout} | options
    pool: HybridKVPool = make([spec, dataclasses.replace(spec, window=6)], **options)
    return pool


def packed(layout: str, latent: torch.Tensor, rope: torch.Tensor) -> tuple[bytes, bytes]:
    """One token's bytes as FlashMLA's readers take them: its row, and its scales where these lie apart; in float64."""
    values, scales = b"", b""
    step = 64 if layout == "flashmla" else 128
    for block in latent.double().split(step):
        amax = max(
            float(block[block.isfinite()].abs().max()) if block.isfinite().any() else 0.0, float(np.float32(1e-4))
        )
        exponent = next(e for e in range(-23, 121) if 448 * 2.0**e >= amax)
        scaled = (block * 2.0**-exponent).clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
        values += torch.where(block.isnan(), 0x7F, scaled).to(torch.uint8).numpy().tobytes()
        scales += bytes([exponent + 127]) if step == 64 else struct.pack("<f", 2.0**exponent)
    floats = rope.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    return (values + floats, scales + b"\0") if step == 64 else (values + scales + floats, b"")


def latents(n: int, dim: int) -> torch.Tensor:
    """Blocks of all magnitudes; some with an amax at, just over and just under 448 times a power of two; odd values."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 1, dim, generator=generator) * torch.exp2(torch.arange(n)[:, None, None] * 3.0 - 30)
    for row, peak in enumerate((448.0, 450.0, 446.0, 1.75, 1.7578125, 1e-4, 0.0, math.inf, math.nan, 3e38, 1e-38)):
        x[row].clamp_(-abs(peak), abs(peak)) if peak < 1e30 else None
        x[row, 0, 5::61] = peak
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", FLASHMLA)
def test_flashmla_pages_are_what_its_readers_take(make: Any, layout: str, index_dtype: torch.dtype) -> None:
    pool = flash_pool(make, layout)
    dim = FLASHMLA[layout].head_dim
    pool.allocator.alloc(4)
    write_loc = pool.plan_write(pool.allocator.alloc(21), index_dtype)
    latent, rope = latents(21, dim), rows(21, 64)[0]
    row_bytes = 584 if layout == "flashmla" else 656
    for layer, loc in ((0, write_loc.loc), (1, write_loc.swa_loc)):
        pool.set_kv_buffer(layer, write_loc, latent.to(pool.device), rope.to(pool.device))
        pages, same = pool.get_kv_buffer(layer)
        assert same is pages or same.data_ptr() == pages.data_ptr()
        assert (pages.shape[1:], pages.dtype) == ((4, 1, row_bytes), torch.uint8)
        # A DeepSeek-V4 page is 4 * 584 = 2336 bytes in 5 * 576.
        assert pages.stride()[:2] == ((2880, 584) if layout == "flashmla" else (4 * 656, 656))
        for t, slot in enumerate(loc.tolist()):
            row, scales = packed(layout, latent[t, 0].cpu(), rope[t, 0].cpu())
            page, at = pages[slot // 4].cpu().flatten().numpy().tobytes(), slot % 4
            assert page[at * len(row) : (at + 1) * len(row)] == row, t
            assert page[4 * len(row) + at * len(scales) :][: len(scales)] == scales, t
    pool.check_integrity()


@pytest.mark.parametrize("layout", FLASHMLA)
def test_a_scale_is_the_least_power_of_two_that_will_do(make: Any, layout: str) -> None:
    """Largest magnitudes of 448 times each power of two that a scale can be, and the float32 on either side of it."""
    peak = 448 * torch.exp2(torch.arange(-22, 120).float())
    away = torch.full_like(peak, math.inf)
    peaks = torch.cat((peak, torch.nextafter(peak, away), torch.nextafter(peak, -away)))
    peaks = torch.cat((peaks, torch.tensor([0.0, 1e-40, 1e-4, 3.4028235e38])))
    pool = flash_pool(make, layout, size=448, swa_size=448)
    latent = rows(len(peaks), FLASHMLA[layout].head_dim)[0].float().clamp(-1, 1) * peaks[:, None, None]
    latent[:, 0, ::64] = -peaks[:, None]
    write_loc = pool.plan_write(pool.allocator.alloc(len(peaks)))
    pool.set_kv_buffer(0, write_loc, latent.to(pool.device), torch.zeros(len(peaks), 1, 64).to(pool.device))
    pages = pool.get_kv_buffer(0)[0].cpu()
    for t, slot in enumerate(write_loc.loc.tolist()):
        row, scales = packed(layout, latent[t, 0], torch.zeros(64))
        page, at = pages[slot // 4].flatten().numpy().tobytes(), slot % 4
        assert page[at * len(row) : (at + 1) * len(row)] == row, peaks[t]
        assert page[4 * len(row) + at * len(scales) :][: len(scales)] == scales, peaks[t]


@pytest.mark.parametrize("layout", FLASHMLA)
def test_flashmla_pages_are_gathered_moved_and_copied(make: Any, layout: str) -> None:
    pool, other = flash_pool(make, layout), flash_pool(make, layout)
    dim = FLASHMLA[layout].head_dim
    loc = pool.allocator.alloc(8)
    write_loc = pool.plan_write(loc)
    for layer in (0, 1):
        pool.set_kv_buffer(layer, write_loc, *(x.to(pool.device) for x in rows(8, dim, 64, seed=layer)))
    before = [pool.gather_kv(layer, write_loc, dtype=torch.float32) for layer in (0, 1)]
    latent, rope = rows(8, dim, 64)
    assert torch.equal(before[0][1].cpu(), rope.float())
    torch.testing.assert_close(before[0][0].cpu(), latent.float(), rtol=2**-4, atol=2**-9)
    assert pool.gather_kv(0, write_loc)[0].dtype == torch.bfloat16
    there = other.plan_write(other.load_from_host(pool.copy_to_host(loc)))
    order = torch.tensor([3, 0, 2, 1, 7, 5, 6, 4])
    pool.move_kv_cache(loc, loc[order])
    for layer in (0, 1):
        moved, theirs = (p.gather_kv(layer, at, dtype=torch.float32) for p, at in ((pool, write_loc), (other, there)))
        for a, b, c in zip(before[layer], moved, theirs, strict=True):
            assert torch.equal(a[order.to(a.device)], b)
            assert torch.equal(a, c)
    pages, _ = pool.get_kv_buffer(1)
    copied, _ = other.get_kv_buffer(1)
    other.move_kv_cache(there.loc, there.loc[order.to(there.loc.device)])
    ours, his = (x.flatten(1)[1:3].cpu() for x in (pages, copied))  # the same pages: nothing but the bytes may differ
    assert torch.equal(ours, his)
    pool.move_kv_cache(torch.tensor([1, 3]), loc[:2])  # into the reserved page
    pool.check_integrity()


@pytest.mark.parametrize(
    ("layout", "layers", "dtype"),
    [
        ("rows", [HEADS, MLA_FULL], torch.bfloat16),
        ("cpu_vec", [LayerSpec(None, 2, 16), LayerSpec(6, 2, 16, 32)], torch.bfloat16),
        ("flashmla", [V4], torch.float8_e4m3fn),
        ("flashmla_v32", [V32], torch.float8_e4m3fn),
    ],
)
def test_the_whole_reserved_page_of_every_buffer_is_watched(
    layout: str, layers: list[LayerSpec], dtype: torch.dtype
) -> None:
    pool = HybridKVPool(layers, size=64, swa_size=64, page_size=32, dtype=dtype, layout=layout, device="cpu")
    for group in pool.groups:
        for buffer in group.buffers:
            last = buffer[-1, 32 // group.fmt.item_slots - 1]
            last[-1] = 1
            with pytest.raises(IntegrityError, match="a reserved row of layers"):
                pool.check_integrity()
            last[-1] = 0
    pool.check_integrity()


@pytest.mark.parametrize("layout", FLASHMLA)
def test_flashmla_rows_come_as_floats(make: Any, layout: str) -> None:
    """Bytes of fp8 would lack the scales that a block has."""
    spec = FLASHMLA[layout]
    pool = flash_pool(make, layout)
    write_loc = pool.plan_write(pool.allocator.alloc(3))
    k, v = (x.to(pool.device, torch.float8_e4m3fn) for x in rows(3, spec.head_dim, spec.v_dim))
    with pytest.raises(TypeError, match=r"^k: expected a dtype of .*, got torch.float8_e4m3fn"):
        pool.set_kv_buffer(0, write_loc, k, v)
    with pytest.raises(TypeError, match=r"^k_out: expected a dtype of .*, got torch.float8_e4m3fn"):
        pool.gather_kv(0, write_loc, k, v)
    assert not any(buffer.any() for buffer in pool.groups[0].buffers)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2])
def test_flashmla_has_one_dialect(dtype: torch.dtype) -> None:
    for layout, spec in FLASHMLA.items():
        with pytest.raises(ValueError, match=f"layout: .* got {dtype} instead of torch.float8_e4m3fn in layer 0"):
            HybridKVPool([spec], size=64, dtype=dtype, layout=layout, device="cpu")


def test_a_tag_names_the_page_where_the_bytes_of_a_token_lie_apart() -> None:
    tags = {layout: {KVFormat(1, 448, 64, torch.bfloat16, page, layout).tag for page in (32, 64)} for layout in LAYOUTS}
    assert {layout for layout, each in tags.items() if len(each) > 1} == {
        Layout.FLASHMLA,
        Layout.CPU_AMX,
        Layout.CPU_VEC,
    }


def test_flashmla_is_described_in_pages() -> None:
    pool = HybridKVPool([V4], size=64, page_size=16, dtype=torch.float8_e4m3fn, layout="flashmla", device="cpu")
    (group,) = pool.describe()
    assert (group.k_item_bytes, group.v_item_bytes, group.item_slots) == (17 * 576, 0, 16)
    assert pool.kv_bytes == group.k_buffers[0][1] == 5 * 17 * 576
    fitted = HybridKVPool.fit(
        [V4, V4], 1 << 20, page_size=16, dtype=torch.float8_e4m3fn, layout="flashmla", device="cpu"
    )
    assert (1 << 20) - 2 * 17 * 576 - 512 < fitted.nbytes <= 1 << 20


def test_a_budget_counts_the_bytes_of_mla_rows() -> None:
    pool = HybridKVPool.fit([MLA_FULL, MLA_SWA], 1 << 20, swa_ratio=0.5, page_size=4, device="cpu")
    assert (1 << 20) - 2048 < pool.nbytes <= 1 << 20


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads: expected 1 of an MLA layer, got 2"),
        ({"v_head_dim": None}, ValueError, "v_head_dim: expected the dim of an MLA layer's rope part, got None"),
        ({"mla": 1}, TypeError, "mla: expected True or False, got 1"),
    ],
)
def test_what_is_no_mla_layer(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LayerSpec(**{"window": None, "num_kv_heads": 1, "head_dim": 24, "v_head_dim": 8, "mla": True} | options)


def test_an_mla_layer_shares_its_rows_with_an_mla_layer_only() -> None:
    with pytest.raises(ValueError, match=r"layers\[1\].alias_of: layer 0 has mla True, expected False"):
        HybridKVPool([MLA_FULL, LayerSpec(None, 1, 24, 8, alias_of=0)], size=16, device="cpu")
    with pytest.raises(ValueError, match=r"layers\[1\]: expected K and V heads, got MLA"):
        require_heads([HEADS, MLA_FULL])


@pytest.mark.parametrize(
    ("layout", "layers", "error", "message"),
    [
        ("mla", [HEADS], ValueError, "layout: expected layers that 'mla' can hold, got K and V heads in layer 0"),
        ("flashmla", [MLA_FULL, HEADS], ValueError, "layout: expected layers that 'flashmla' can hold, got"),
        ("flashmla", [V32], ValueError, r"got dims 512 and 64 instead of \(448, 64\) in layer 0"),
        ("flashmla", [V4], ValueError, "got torch.bfloat16 instead of torch.float8_e4m3fn in layer 0"),
        ("cpu_amx", [MLA_FULL], ValueError, "layout: expected layers that 'cpu_amx' can hold, got an MLA latent in"),
        ("columns", [HEADS], ValueError, "layout: expected one of .*'rows', .*, got 'columns'"),
        (torch.bfloat16, [HEADS], ValueError, "layout: expected one of"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_is_allocated(
    layout: Any, layers: list[LayerSpec], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "zeros", None)
    for build in (
        lambda: HybridKVPool(layers, size=64, page_size=32, layout=layout, device="cpu"),
        lambda: HybridKVPool.fit(layers, 1 << 20, page_size=32, layout=layout, device="cpu"),
    ):
        with pytest.raises(error, match=message):
            build()


def test_a_layout_that_no_row_stores_is_refused_by_name() -> None:
    found = devices.DeviceFacts(dispatch.CUDA, "sm_90", packages={"triton": devices.Package("3.6.0")})
    with pytest.raises(NoKernel, match="cannot store layout 'cpu_amx'"):
        dispatch.select_all(found, formats={"store_kv": KVFormat(8, 64, 64, torch.bfloat16, 32, Layout.CPU_AMX)})


@pytest.mark.parametrize(("op", "loc_at"), [("store_kv_packed", 4), ("gather_kv_packed", 2)])
def test_conformance_cases_fill_a_tile_of_every_packed_format(op: str, loc_at: int) -> None:
    """A tile has as many tokens as a cache line of K: its page has them side by side, 16 pairs of each in `cpu_amx`."""
    filled = set()
    for case in testing.cases(op):
        fmt, loc = case.variant.fmt, testing.build(case)[loc_at]
        assert fmt is not None
        assert isinstance(loc, testing.Buffer)
        width = 16 if fmt.layout is Layout.CPU_AMX else 64 // fmt.dtype.itemsize
        slots = set(loc.tensor.tolist())
        if any(slots.issuperset(range(slot, slot + width)) for slot in slots if slot > 0 and slot % width == 0):
            filled.add(fmt)
    assert filled == {fmt for fmt in testing.formats() if fmt.packed}


def test_conformance_cases_move_whole_flashmla_rows_under_both_slot_widths() -> None:
    raws = {fmt.raw for fmt in testing.formats() if fmt.block}
    listed = {variant for variant in list_variants(testing.formats()) if variant.fmt in raws}
    assert listed
    assert listed <= set(testing.variants())
