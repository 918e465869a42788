"""Part tables of our layouts, and of other engines' written as data: every part is a bijection, no two overlap, all
lie inside the item, raw rows are lossless, and a store leaves every other byte.

Sources of the formulas: SGLang 0.5.23 (`srt/mem_cache`, `kernels/ops/kvcache`), vLLM 0.33.0 (`v1/attention`,
`csrc/nvfp4_kv_cache_kernels.cu`), aiter (`op_tests/test_kvcache.py`), TensorRT-LLM (`kernels/kvCacheUtils.h`).
"""

from __future__ import annotations

import pytest
import torch

from portakv import HybridKVPool, LayerSpec
from portakv.formats import KVFormat, Layout
from portakv.memory.layouts import LAYOUTS, find_layout
from portakv.memory.parts import Buffer, Part, PartTable, Tile

E4M3 = torch.float8_e4m3fn
H, D, P = 4, 128, 128
"""KV heads, head dim, slots of a page."""


def mxfp8_interleaved() -> PartTable:
    """SGLang `MHATokenToKVPoolMXFP8`: K and V rows of e4m3fn, an exponent for 32 values, tiled over 32 tokens."""
    scales = D // 32
    tile = Tile(32, scales, P // 32 * scales, 1, 1, 0)
    head = 32 * (P // 32) * scales
    data = [Part(role, "float8_e4m3fn", D, 1, Tile.row(H * D, 1), H, D, i) for i, role in enumerate(("k", "v"))]
    scale = [Part(f"{role}_scale", "e8m0", scales, 1, tile, H, head, 2 + i) for i, role in enumerate(("k", "v"))]
    return PartTable((Buffer(P * H * D, P), Buffer(P * H * D, P), *(Buffer(H * head, P),) * 2), (*data, *scale))


def nvfp4_page(page: int = 16) -> PartTable:
    """vLLM's NVFP4 page: K data, K scales, V data, V scales; V's scales interleaved over four tokens."""
    data, scales = D // 2, D // 16
    side = H * page * (data + scales)
    parts = []
    for i, role in enumerate(("k", "v")):
        tile = Tile.row(scales, 1) if role == "k" else Tile(4, 4 * scales, 1, 1, 4, 0)
        at = i * side
        parts.append(Part(role, "e2m1x2", data, 1, Tile.row(data, 1), H, page * data, offset=at))
        at += H * page * data
        parts.append(Part(f"{role}_scale", "float8_e4m3fn", scales, 1, tile, H, page * scales, offset=at))
    return PartTable((Buffer(2 * side, page),), tuple(parts))


def fp8_keys_nvfp4_values(page: int = 16) -> PartTable:
    """TensorRT-LLM's `MixedKVBlockArray`: two pools, `[H, page, D]` blocks of fp8 keys, NVFP4 values with scales."""
    data, scales = D // 2, D // 16
    value = H * page * data
    return PartTable(
        (Buffer(H * page * D, page), Buffer(value + H * page * scales, page)),
        (
            Part("k", "float8_e4m3fn", D, 1, Tile.row(D, 1), H, page * D),
            Part("v", "e2m1x2", data, 1, Tile.row(data, 1), H, page * data, 1),
            Part("v_scale", "float8_e4m3fn", scales, 1, Tile(4, 4 * scales, 1, 1, 4, 0), H, page * scales, 1, value),
        ),
    )


def int8_per_token_head(heads_first: bool, page: int = 16) -> PartTable:
    """vLLM TRITON_ATTN: a cell of K, its float32 scale, V and its scale, by head and slot or by slot and head."""
    cell = 2 * D + 8
    slot, head = (cell, page * cell) if heads_first else (H * cell, cell)
    parts, at = [], 0
    for role in ("k", "v"):
        parts.append(Part(role, "int8", D, 1, Tile.row(slot, 1), H, head, offset=at))
        parts.append(Part(f"{role}_scale", "float32", 1, 4, Tile.row(slot, 4), H, head, offset=at + D))
        at += D + 4
    return PartTable((Buffer(H * page * cell, page),), tuple(parts))


def x_packed(shuffled: bool, itemsize: int, scaled: bool = False, page: int = 16) -> PartTable:
    """vLLM ROCM_ATTN and aiter's pages: K in groups of x dims, V by dim or in groups of x tokens."""
    x = 16 // itemsize
    k = Tile(1, x * itemsize, 0, x, page * x * itemsize, itemsize)
    v = (
        Tile(x, D * x * itemsize, itemsize, 1, x * itemsize, 0)
        if shuffled
        else Tile(1, itemsize, 0, 1, page * itemsize, 0)
    )
    encoding = "bfloat16" if itemsize == 2 else "float8_e4m3fn"
    item = H * page * D * itemsize
    parts = [
        Part("k", encoding, D, itemsize, k, H, page * D * itemsize, 0),
        Part("v", encoding, D, itemsize, v, H, page * D * itemsize, 1),
    ]
    buffers = [Buffer(item, page), Buffer(item, page)]
    if scaled:
        parts += [Part(f"{r}_scale", "float32", 1, 4, Tile.row(4, 4), H, page * 4, 2 + i) for i, r in enumerate("kv")]
        buffers += [Buffer(H * page * 4, page)] * 2
    return PartTable(tuple(buffers), tuple(parts))


def index_keys(shuffled: bool, page: int = 64) -> PartTable:
    """DSA's index keys: 128 fp8 of every token, then a float32 scale of every token; on ROCm 16 by 16 shuffled."""
    tile = Tile(16, 2048, 16, 16, 256, 1) if shuffled else Tile.row(128, 1)
    return PartTable(
        (Buffer(page * 132, page),),
        (
            Part("k", "float8_e4m3fn", 128, 1, tile),
            Part("k_scale", "float32", 1, 4, Tile.row(4, 4), offset=page * 128),
        ),
    )


def v41_rows(split: bool, page: int = 64) -> PartTable:
    """DeepSeek-V4.1: 512 fp8 with an exponent for 32; the scales behind the page's data, or behind each row."""
    if split:
        item = -(-page * 528 // 512) * 512
        tiles, at = (Tile.row(512, 1), Tile.row(16, 1)), page * 512
        buffer = Buffer(item, page)
    else:
        tiles, at, buffer = (Tile.row(528, 1), Tile.row(528, 1)), 512, Buffer(528)
    return PartTable(
        (buffer,),
        (
            Part("latent", "float8_e4m3fn", 512, 1, tiles[0]),
            Part("latent_scale", "e8m0", 16, 1, tiles[1], offset=at),
        ),
    )


def nvfp4_ds_mla() -> PartTable:
    """vLLM `nvfp4_ds_mla`: 256 bytes of codes, 64 of rope in fp8, 32 scales at byte `8 * (s % 4) + s // 4`."""
    return PartTable(
        (Buffer(352),),
        (
            Part("latent", "e2m1x2", 256, 1, Tile.row(352, 1)),
            Part("rope", "float8_e4m3fn", 64, 1, Tile.row(352, 1), offset=256),
            Part("latent_scale", "float8_e4m3fn", 32, 1, Tile(1, 352, 0, 4, 1, 8), offset=320),
        ),
    )


def two_pools() -> PartTable:
    """SGLang's unified pool on ROCm: 448 fp8 and 7 scales, each written twice, and the rope part in another pool."""
    return PartTable(
        (Buffer(512), Buffer(128)),
        (
            Part("latent", "float8_e4m3fn", 448, 1, Tile.row(512, 1)),
            Part("latent_scale", "e8m0", 7, 1, Tile(1, 512, 0, 1, 2, 0), offset=448),
            Part("latent_scale", "e8m0", 7, 1, Tile(1, 512, 0, 1, 2, 0), offset=449),
            Part("rope", "bfloat16", 64, 2, Tile.row(128, 2), buffer=1),
        ),
    )


def flashmla_v4(page: int = 64) -> PartTable:
    """DeepSeek-V4: 448 fp8 and 64 bfloat16 of a token, behind the page's rows 8 bytes of exponents each."""
    return PartTable(
        (Buffer(-(-page * 584 // 576) * 576, page),),
        (
            Part("latent", "float8_e4m3fn", 448, 1, Tile.row(576, 1)),
            Part("rope", "bfloat16", 64, 2, Tile.row(576, 2), offset=448),
            Part("latent_scale", "e8m0", 8, 1, Tile.row(8, 1), offset=page * 576),
        ),
    )


def amx_pages(page: int = 32) -> PartTable:
    """vLLM's CPU attention with AMX: pairs of K for 16 tokens, pairs of tokens of V for 16 dims."""
    item = H * page * D * 2
    return PartTable(
        (Buffer(item, page), Buffer(item, page)),
        (
            Part("k", "bfloat16", D, 2, Tile(16, D * 32, 4, 2, 64, 2), H, page * D * 2, 0),
            Part("v", "bfloat16", D, 2, Tile(2, 64, 2, 16, page * 32, 4), H, page * D * 2, 1),
        ),
    )


TABLES = {
    "MXFP8, interleaved scales": mxfp8_interleaved(),
    "NVFP4 page, swizzled": nvfp4_page(),
    "fp8 K, NVFP4 V": fp8_keys_nvfp4_values(),
    "int8 per token and head, HND": int8_per_token_head(True),
    "int8 per token and head, NHD": int8_per_token_head(False),
    "fp8 per token, x-packed": x_packed(True, 1, scaled=True),
    "5-D page": x_packed(False, 2),
    "5-D page, shuffled": x_packed(True, 2),
    "index keys": index_keys(False),
    "index keys, preshuffled": index_keys(True),
    "V4.1, split": v41_rows(True),
    "V4.1, interleaved": v41_rows(False),
    "nvfp4_ds_mla": nvfp4_ds_mla(),
    "two pools": two_pools(),
    "FlashMLA V4": flashmla_v4(),
    "AMX pages": amx_pages(),
}
RAW_BYTES = {"int8 per token and head, HND": 1056, "NVFP4 page, swizzled": 576, "two pools": 590, "FlashMLA V4": 584}
"""Of some, as their engines count them: 264 and 144 bytes of K and V a head."""


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> PartTable:
    return TABLES[request.param]


def count_slots(table: PartTable) -> int:
    return max(8, *(2 * buffer.slots for buffer in table.buffers))


def filled(table: PartTable, num_slots: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (buffer.item_bytes * (num_slots // buffer.slots) for buffer in table.buffers)
    return [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]


def test_parts_are_apart_and_inside(table: PartTable) -> None:
    assert list(table.problems()) == []


def test_every_part_is_a_bijection(table: PartTable) -> None:
    """Of (slot, head, unit) to bytes of the item."""
    for part in table.parts:
        of = table.buffers[part.buffer]
        places = table.view(part, torch.arange(of.item_bytes)).flatten()
        assert len(places) == of.slots * part.nbytes
        assert len(places.unique()) == len(places)


def test_an_address_is_the_formulas(table: PartTable) -> None:
    """`view` and `index` against the definition, byte by byte, at a few places."""
    for part in table.parts:
        of, tile = table.buffers[part.buffer], part.tile
        memory = torch.arange(2 * of.item_bytes)
        for slot in {0, 1, of.slots - 1, of.slots, 2 * of.slots - 1}:
            (found,) = table.view(part, memory)[table.index(part, torch.tensor([slot]))]
            item, t = divmod(slot, of.slots)
            for head in {0, part.heads - 1}:
                for d in {0, 1 % part.units, part.units // 2, part.units - 1}:
                    want = item * of.item_bytes + part.offset + head * part.head_stride
                    want += t // tile.a * tile.s1 + t % tile.a * tile.s2 + d // tile.b * tile.s3 + d % tile.b * tile.s4
                    assert found.reshape(part.heads, part.units, part.unit_bytes)[head, d].tolist() == [
                        want + i for i in range(part.unit_bytes)
                    ]


def test_moving_every_slot_through_its_raw_row_is_lossless(table: PartTable) -> None:
    num_slots = count_slots(table)
    buffers, order = filled(table, num_slots), torch.randperm(num_slots)
    raw = table.gather(buffers, torch.arange(num_slots))
    assert raw.shape == (num_slots, table.raw_bytes)
    moved = [buffer.clone() for buffer in buffers]
    table.scatter(raw, moved, order)
    assert torch.equal(table.gather(moved, order), raw)
    table.scatter(table.gather(moved, order), moved, torch.arange(num_slots))
    assert all(torch.equal(x, y) for x, y in zip(moved, buffers, strict=True))


def test_a_store_leaves_all_other_bytes_of_the_page(table: PartTable) -> None:
    num_slots = count_slots(table)
    buffers, slots = filled(table, num_slots), torch.tensor([1, num_slots // 2, num_slots - 1])
    before = [buffer.clone() for buffer in buffers]
    table.scatter(255 - table.gather(buffers, slots), buffers, slots)
    changed = sum(int((x != y).sum()) for x, y in zip(before, buffers, strict=True))
    assert changed == len(slots) * table.raw_bytes
    others = torch.tensor([s for s in range(num_slots) if s not in slots.tolist()])
    assert torch.equal(table.gather(before, others), table.gather(buffers, others))


@pytest.mark.parametrize("name", RAW_BYTES)
def test_raw_bytes_are_those_that_the_engine_counts(name: str) -> None:
    assert TABLES[name].raw_bytes == RAW_BYTES[name]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (Part("k", "int8", 4, 1, Tile.row(8, 1), offset=5), "k: expected bytes inside an item of 16, got 17"),
        (Part("k", "int8", 4, 1, Tile.row(2, 1)), "byte 2 of an item belongs to 2 places"),
        (Part("k", "int8", 4, 1, Tile(4, 0, 0, 1, 1, 0)), "k: expected multiples of 4 slots and 1 units, got 2, 4"),
        (Part("k", "int8", 4, 1, Tile.row(8, 1), offset=-1), "k: expected bytes inside an item"),
    ],
)
def test_what_is_no_table_is_told(part: Part, problem: str) -> None:
    (found,) = PartTable((Buffer(16, 2),), (part,)).problems()
    assert problem in found


# Our own layouts.

OURS = {
    "rows": (KVFormat(3, 40, 24, torch.bfloat16, 4), LayerSpec(None, 3, 40, 24)),
    "mla": (KVFormat(1, 40, 24, torch.float8_e5m2, 4, Layout.MLA), LayerSpec(None, 1, 40, 24, mla=True)),
    "flashmla": (KVFormat(1, 448, 64, E4M3, 4, Layout.FLASHMLA), LayerSpec(None, 1, 448, 64, mla=True)),
    "flashmla_v32": (KVFormat(1, 512, 64, E4M3, 4, Layout.FLASHMLA_V32), LayerSpec(None, 1, 512, 64, mla=True)),
    "cpu_amx": (KVFormat(2, 64, 32, torch.bfloat16, 32, Layout.CPU_AMX), LayerSpec(None, 2, 64, 32)),
    "cpu_vec": (KVFormat(2, 48, 80, torch.float32, 32, Layout.CPU_VEC), LayerSpec(None, 2, 48, 80)),
}


def test_all_of_ours_are_here() -> None:
    assert list(OURS) == [layout.name for layout in LAYOUTS]


@pytest.mark.parametrize("name", OURS)
def test_our_tables_are_tables(name: str) -> None:
    fmt, _ = OURS[name]
    assert fmt.layout is find_layout(name)
    assert list(fmt.table.problems()) == []
    assert fmt.table.raw_bytes == fmt.raw.row_bytes


@pytest.mark.parametrize("name", OURS)
def test_raw_rows_are_what_host_copies_have(name: str) -> None:
    """Kernels of each layout move the bytes that its table names: a copy to the host, and a move, against raw rows."""
    fmt, spec = OURS[name]
    page = fmt.page_size
    pool = HybridKVPool([spec, spec], size=6 * page, page_size=page, dtype=fmt.dtype, layout=name, device="cpu")
    (group,) = pool.groups
    assert group.fmt == fmt
    torch.manual_seed(0)
    slots = pool.allocator.alloc(3 * page)
    write_loc = pool.plan_write(slots)
    for layer_id in range(2):
        k, v = (torch.randn(len(slots), spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.v_dim))
        pool.set_kv_buffer(layer_id, write_loc, k, v)
    buffers = [[buffer[i].flatten() for buffer in group.buffers] for i in range(2)]
    raw = [fmt.table.gather(of, slots) for of in buffers]
    copy = pool.copy_to_host(slots)
    for i in range(2):
        parts = [x[0][i].contiguous().view(torch.uint8).flatten(1) for x in (copy.keys, copy.values)]
        assert torch.equal(torch.cat(parts, -1), raw[i])
    pool.move_kv_cache(slots.flip(0)[: 2 * page], slots[: 2 * page])
    for i in range(2):
        moved = raw[i].clone()
        moved[torch.arange(3 * page).flip(0)[: 2 * page]] = raw[i][: 2 * page]
        assert torch.equal(fmt.table.gather(buffers[i], slots), moved)
