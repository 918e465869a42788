"""Rope stores through the pool: rotated in float32, rounded to the source's dtype, then stored as any other rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from portakv import HybridKVPool, LayerSpec, Rope, dispatch
from portakv.formats import FLOAT_DTYPES, SLOT_OPS, KVFormat

HEADS = [LayerSpec(None, 3, 16, 8), LayerSpec(6, 3, 16, 8)]
MLA = [LayerSpec(None, 1, 24, 16, mla=True), LayerSpec(6, 1, 24, 16, mla=True)]
V4 = [LayerSpec(None, 1, 448, 64, mla=True)]
KINDS: dict[str, tuple[list[LayerSpec], dict[str, Any]]] = {
    "rows": (HEADS, {}),
    "fp8 rows": (HEADS, {"dtype": torch.float8_e5m2}),
    "float32 rows": (HEADS, {"dtype": torch.float32}),
    "mla": (MLA, {}),
    "fp8 mla": (MLA, {"dtype": torch.float8_e4m3fn}),
    "flashmla": (V4, {"dtype": torch.float8_e4m3fn, "layout": "flashmla"}),
}
TOKENS, POSITIONS = 9, 50


def rows_here() -> list[str]:
    found = dispatch.facts("cpu")
    chosen = dispatch.select("store_kv_rope", found)
    return [chosen.row.name, *(row.name for row, why in chosen.rejected if why.endswith("comes first"))]


@pytest.fixture(params=rows_here())
def make(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    if device.type == "cpu":
        monkeypatch.setenv("PORTAKV_KERNELS", ",".join(f"{op}={request.param}" for op in dispatch.OPS))

    def pool(kind: str, **options: Any) -> HybridKVPool:
        layers, own = KINDS[kind]
        options = {"size": 48, "swa_size": 32, "page_size": 4, "check": True} | own | options
        return HybridKVPool(layers, device=device, **options)

    return pool


def angles(dims: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """As vLLM and SGLang make their cache: frequencies of base 10000, cosines and then sines of each position."""
    turns = torch.arange(POSITIONS)[:, None] * 10000.0 ** (-torch.arange(0, dims, 2) / dims)
    return torch.cat((turns.cos(), turns.sin()), -1).to(dtype)


def rotated(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """By complex numbers of one token, head and pair at a time: another way to the same float32 results."""
    out, half = x.float().clone(), table.shape[1] // 2
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            cos, sin = table[position, i].float(), table[position, i + half].float()
            out[t, :, a] = x[t, :, a].float() * cos - x[t, :, b].float() * sin
            out[t, :, b] = x[t, :, b].float() * cos + x[t, :, a].float() * sin
    return out.to(x.dtype)


def batch(pool: HybridKVPool, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, torch.Tensor, torch.Tensor]:
    pool.allocator.alloc(4)
    spec, generator = pool.layers[0], torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(TOKENS, spec.num_kv_heads, d, generator=generator).to(dtype) for d in (spec.head_dim, spec.v_dim)
    )
    return pool.plan_write(pool.allocator.alloc(TOKENS)), k, v


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_those_of_rotating_rounding_and_storing(
    make: Any, kind: str, index: torch.dtype, interleaved: bool
) -> None:
    for dtype, table_dtype, part in (
        *((dtype, torch.float32, 1) for dtype in FLOAT_DTYPES),
        (torch.bfloat16, torch.bfloat16, 2),
    ):
        pool, plain = make(kind), make(kind)
        write_loc, k, v = batch(pool, dtype)
        batch(plain)
        for each, layer in itertools.product((pool, plain), range(len(pool.layers))):
            each.set_scales(layer, 0.5, 4.0)
        is_mla = pool.layers[0].mla
        table = angles((v if is_mla else k).shape[-1] // part, table_dtype)
        positions = (torch.arange(TOKENS) * 7 % POSITIONS).to(index)
        rope = Rope(table.to(pool.device), positions.to(pool.device), interleaved)
        turned = (
            (k, rotated(v, table, positions, interleaved))
            if is_mla
            else (
                rotated(k, table, positions, interleaved),
                v,
            )
        )
        for layer in range(len(pool.layers)):
            pool.set_kv_buffer(layer, write_loc, k.to(pool.device), v.to(pool.device), rope)
            plain.set_kv_buffer(layer, write_loc, *(x.to(pool.device) for x in turned))
            for mine, his in zip(pool.get_kv_buffer(layer), plain.get_kv_buffer(layer), strict=True):
                assert torch.equal(mine.contiguous().view(torch.uint8), his.contiguous().view(torch.uint8))
                assert mine.any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [2, 6, 62, 64])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_each_product_and_each_sum_is_rounded_to_float32(dtype: torch.dtype, dims: int, interleaved: bool) -> None:
    """By numpy in float64, rounded after each step; with angles that are no numbers. The other dims keep their bits."""
    for row in rows_here():
        kernels = dict.fromkeys((*SLOT_OPS, *KVFormat(3, 64, 64, dtype).ops), row)
        pool = HybridKVPool([LayerSpec(None, 3, 64)], size=64, dtype=dtype, device="cpu", kernels=kernels)
        generator = torch.Generator().manual_seed(dims)
        k, table = (torch.randn(shape, generator=generator) for shape in ((TOKENS, 3, 64), (20, dims)))
        table[3, 0], table[4, 1], k = math.nan, math.inf, k.to(dtype)
        positions = torch.tensor([0, 1, 2, 3, 4, 19, 7, 7, 5])
        write_loc = pool.plan_write(pool.allocator.alloc(TOKENS))
        pool.set_kv_buffer(0, write_loc, k, k, Rope(table, positions, interleaved))
        x, half = k.double().numpy(), dims // 2
        cos, sin = np.split(table[positions].double().numpy()[:, None], 2, -1)
        a, b = (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (slice(0, half), slice(half, dims))
        want = x.astype(np.float32)
        with np.errstate(all="ignore"):
            products = [(x[..., i] * y).astype(np.float32) for i, y in ((a, cos), (b, sin), (b, cos), (a, sin))]
            want[..., a] = products[0] - products[1]
            want[..., b] = products[2] + products[3]
        stored_k, stored_v = (x[write_loc.loc] for x in pool.get_kv_buffer(0))
        turned = torch.from_numpy(want).to(dtype)
        assert turned.isnan().any()
        torch.testing.assert_close(stored_k, turned, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(stored_k[..., dims:], k[..., dims:])
        assert torch.equal(stored_v, k)


def test_a_rotation_is_one() -> None:
    """Against float64: what is stored turns by the position's angle and keeps its length."""
    pool = HybridKVPool([LayerSpec(None, 1, 8)], size=64, dtype=torch.float32, device="cpu")
    write_loc = pool.plan_write(pool.allocator.alloc(2))
    k = torch.tensor([[[3.0, 0, 0, 0, 4.0, 0, 0, 0]]] * 2)
    pool.set_kv_buffer(0, write_loc, k, k, Rope(angles(8), torch.tensor([0, 1])))
    stored = pool.get_kv_buffer(0)[0][write_loc.loc].double()
    torch.testing.assert_close(stored[0], k[0].double())
    want = [3 * math.cos(1) - 4 * math.sin(1), 4 * math.cos(1) + 3 * math.sin(1)]
    torch.testing.assert_close(stored[1, 0, ::4], torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["rows", "mla", "flashmla"])
def test_a_token_without_an_angle_is_skipped_and_counted(make: Any, kind: str) -> None:
    pool, checked = make(kind, check=False), make(kind, check=True)
    for each in (pool, checked):
        write_loc, k, v = (x.to(each.device) if isinstance(x, torch.Tensor) else x for x in batch(each))
        table = angles(8).to(each.device)
        positions = torch.arange(TOKENS, device=each.device)
        positions[2], positions[5] = POSITIONS, -1
        if each is checked:
            with pytest.raises(ValueError, match=rf"rope.positions\[2\]: expected 0 to 49, got {POSITIONS}"):
                each.set_kv_buffer(0, write_loc, k, v, Rope(table, positions))
            assert not any(x.any() for x in each.get_kv_buffer(0))
            padded = write_loc.loc.clone()
            padded[2], padded[5] = 0, -1
            each.set_kv_buffer(0, type(write_loc)(padded, write_loc.swa_loc), k, v, Rope(table, positions))
            continue
        each.set_kv_buffer(0, write_loc, k, v, Rope(table, positions))
        out, _ = each.gather_kv(0, write_loc)
        stored = out.flatten(1).view(torch.uint8).any(1)
        assert stored.tolist() == [t not in (2, 5) for t in range(TOKENS)]
        assert each.faults()["store_kv"] == 2
        padded = write_loc.loc.clone()
        padded[2], padded[5] = 0, -1  # padding has no position that counts
        each.set_kv_buffer(0, type(write_loc)(padded, write_loc.swa_loc), k, v, Rope(table, positions))
        assert each.faults()["store_kv"] == 2


@pytest.mark.parametrize("kind", ["rows", "mla", "flashmla"])
def test_a_traced_store_rotates_too(make: Any, kind: str) -> None:
    """What is rotated is made inside the graph, in front of the store."""
    pool, eager = make(kind, check=False), make(kind, check=False)
    write_loc, k, v = (x.to(pool.device) if isinstance(x, torch.Tensor) else x for x in batch(pool))
    table, positions = angles(8).to(pool.device), torch.arange(TOKENS, device=pool.device)

    def step(each: HybridKVPool, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        each.set_kv_buffer(0, write_loc, k * 2, v * 2, Rope(table, positions + 1, True))
        return each.get_kv_buffer(0)[0].view(torch.uint8).sum()

    traced = torch.compile(lambda *args: step(pool, *args), fullgraph=True, backend="aot_eager")
    assert traced(k, v, positions) == step(eager, k, v, positions)
    for mine, his in zip(pool.groups[0].buffers, eager.groups[0].buffers, strict=True):
        assert torch.equal(mine, his)
        assert mine.any()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_slot_past_the_reserved_page_needs_a_position(make: Any, kind: str) -> None:
    pool = make(kind)
    _, k, v = batch(pool)
    k, v = k[:2].to(pool.device), v[:2].to(pool.device)
    first = pool.allocator.clear() or pool.allocator.alloc(1)
    assert first.tolist() == [pool.page_size]
    rope = Rope(angles(8).to(pool.device), torch.tensor([0, POSITIONS], device=pool.device))
    pool.set_kv_buffer(0, pool.plan_write(torch.cat((first, first - 1))), k, v, rope)
    message = rf"rope.positions\[1\]: expected 0 to {POSITIONS - 1}, got {POSITIONS}"
    with pytest.raises(ValueError, match=message):
        pool.set_kv_buffer(0, pool.plan_write(torch.cat((first - 1, first))), k, v, rope)


COS_SIN, TEN = torch.zeros(10, 8), torch.arange(TOKENS)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, TEN), TypeError, "cos_sin_cache: expected a tensor, got NoneType"),
        ((COS_SIN, [0, 1]), TypeError, "positions: expected a tensor, got list"),
        ((COS_SIN[0], TEN), ValueError, "cos_sin_cache: expected shape"),
        ((COS_SIN[:, :7], TEN), ValueError, "cos_sin_cache: expected shape"),
        ((COS_SIN[:0], TEN), ValueError, "cos_sin_cache: expected shape"),
        ((COS_SIN.double(), TEN), TypeError, "cos_sin_cache: expected float32, float16 or bfloat16, got torch.float64"),
        ((torch.zeros(8, 10).T, TEN), ValueError, "cos_sin_cache: expected a dense last axis"),
        ((COS_SIN, torch.arange(2 * TOKENS)[::2]), ValueError, "positions: expected a dense vector"),
        ((COS_SIN, TEN.short()), TypeError, "positions: expected int32 or int64, got torch.int16"),
        ((COS_SIN, TEN, 1), TypeError, "interleaved: expected True or False, got 1"),
    ],
)
def test_what_is_no_rope(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Rope(*arguments)


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        ("rope", TypeError, "rope: expected a Rope or None, got str"),
        (Rope(torch.zeros(10, 18), TEN), ValueError, "rope.cos_sin_cache: expected at most 16 dims, got 18"),
        (Rope(COS_SIN.half(), TEN), TypeError, "rope.cos_sin_cache: expected torch.float32 or torch.bfloat16 as k"),
        (Rope(COS_SIN, TEN[1:]), ValueError, "rope.positions: expected 9, one per token, got 8"),
        (Rope(COS_SIN, torch.arange(10)), ValueError, "rope.positions: expected 9, one per token, got 10"),
        (Rope(COS_SIN.to("meta"), TEN), ValueError, "rope.cos_sin_cache: expected a tensor on cpu, got meta"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_a_rope_that_does_not_fit_is_refused(rope: Any, error: type[Exception], message: str, check: bool) -> None:
    pool = HybridKVPool(HEADS, size=48, device="cpu", check=check)
    write_loc, k, v = batch(pool)
    with pytest.raises(error, match=message):
        pool.set_kv_buffer(0, write_loc, k, v, rope)
    fp8 = HybridKVPool(HEADS, size=48, device="cpu", dtype=torch.float8_e5m2)
    with pytest.raises(TypeError, match="k: expected float32, float16 or bfloat16 to rotate, got"):
        fp8.set_kv_buffer(0, write_loc, k.to(fp8.dtype), v.to(fp8.dtype), Rope(COS_SIN, TEN))
    for each in (pool, fp8):
        assert not any(x.view(torch.uint8).any() for x in each.get_kv_buffer(0))


@pytest.mark.parametrize("checking", ["store_kv", "store_kv_rope"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_refused_whichever_of_both_stores_checks_them(
    kind: str, checking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is the reference, which trusts its caller and writes K before it meets a wrong V."""
    layers, own = KINDS[kind]
    others = [op for op in dispatch.OPS if op.startswith("store_kv_rope") == (checking == "store_kv")]
    monkeypatch.setenv("PORTAKV_KERNELS", ",".join(f"{op}=reference" for op in others))
    pool = HybridKVPool(layers, size=48, page_size=4, device="cpu", **own)
    write_loc, k, v = batch(pool)
    for rope in (None, Rope(angles(8), torch.arange(TOKENS))):
        wide = [v.float()] if rope is not None else []  # without rope each is converted on its own
        for wrong in (v[:-1], v[..., :-1], *wide):
            with pytest.raises((TypeError, ValueError), match=r"^v: expected"):
                pool.set_kv_buffer(0, write_loc, k, wrong, rope)
    assert not any(buffer.any() for group in pool.groups for buffer in group.buffers)


@pytest.mark.parametrize("kind", ["mla", "flashmla"])
def test_angles_past_the_rope_part_are_refused(make: Any, kind: str) -> None:
    pool = make(kind, check=False)
    write_loc, k, v = (x.to(pool.device) if isinstance(x, torch.Tensor) else x for x in batch(pool))
    dims = v.shape[-1]
    rope = Rope(angles(dims + 2).to(pool.device), torch.arange(TOKENS, device=pool.device))
    with pytest.raises(ValueError, match=f"rope.cos_sin_cache: expected at most {dims} dims, got {dims + 2}"):
        pool.set_kv_buffer(0, write_loc, k, v, rope)
    assert not any(buffer.any() for group in pool.groups for buffer in group.buffers)
