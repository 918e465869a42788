"""KVFormat: how a token's K and V lie in memory. Variant: which compiled kernel an op needs."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

PAD = 0
"""The slot that padding points at: row 0 of the reserved page, never written."""

FAULT_KINDS = ("translate_loc", "cast_loc", "store_kv", "gather_kv", "move_kv", "build_read")
"""Entries of a fault counter, one int64 per op that can meet a slot it has to skip."""


SLOT_OPS = ("translate_loc", "cast_loc", "patch_map", "build_read")
"""The ops that know no format."""


class Layout(enum.Enum):
    """How the tokens of one side are laid out."""

    ROWS = "rows"  # K [rows, H, D], V [rows, H, Dv]
    MLA = "mla"  # [rows, 1, D + Dv]: the latent and the rope part of a token, one after the other
    FLASHMLA = "flashmla"  # DeepSeek-V4 pages: 584 bytes a token, block scales behind the rows of a page
    FLASHMLA_V32 = "flashmla_v32"  # DeepSeek-V3.2 rows: 656 bytes a token
    CPU_AMX = "cpu_amx"  # pages of pairs in tiles, for AMX
    CPU_VEC = "cpu_vec"  # pages with K transposed, for vectors

    @property
    def packed(self) -> bool:
        """Whether only the whole page of a head has a meaning to readers, which are CPUs, not a token's row."""
        return self in (Layout.CPU_AMX, Layout.CPU_VEC)


@dataclass(frozen=True, slots=True)
class Fp8:
    """The constants of one fp8 dialect that a quantising store needs (OCP FP8 and the fnuz forms)."""

    dtype: torch.dtype
    mantissa_bits: int
    exponent_bias: int
    max: float
    nan_byte: int
    has_negative_zero: bool


FP8_DIALECTS = {
    f.dtype: f
    for f in (
        Fp8(torch.float8_e4m3fn, 3, 7, 448.0, 0x7F, True),
        Fp8(torch.float8_e4m3fnuz, 3, 8, 240.0, 0x80, False),
        Fp8(torch.float8_e5m2, 2, 15, 57344.0, 0x7F, True),
        Fp8(torch.float8_e5m2fnuz, 2, 16, 57344.0, 0x80, False),
    )
}

VECTOR_BYTES = 16
"""The widest access of one GPU lane; rows that are aligned to it can be moved by it."""

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that are stored and read by value. The quiet NaN of each is the only NaN a conversion writes."""

CANONICAL_NAN = {torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}


_PAGE_UNIT = 576
"""FlashMLA wants the bytes of a DeepSeek-V4 page to be a multiple of this."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One layer group's memory layout; stores, plans, byte counts, exports and tests all read it.

    `dtype` is the storage dtype; an fp8 dtype names the dialect too. `head_dim` is K's, `v_head_dim` V's; of an MLA
    layer K is the latent and V the rope part.

    Memory is one or two buffers `[L, items, bytes]` of uint8 (`item_bytes`, `item_slots`); everything else is a view.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    page_size: int = 1
    layout: Layout = Layout.ROWS

    @property
    def fp8(self) -> Fp8 | None:
        return FP8_DIALECTS.get(self.dtype)

    @property
    def k_row_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def v_row_bytes(self) -> int:
        return self.num_kv_heads * self.v_head_dim * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return self.k_row_bytes + self.v_row_bytes

    @property
    def tag(self) -> str:
        """A string that two formats share only if their bytes mean the same; exports carry it."""
        dtype = str(self.dtype).removeprefix("torch.")
        page = f"/p{self.page_size}" if self.item_slots > 1 else ""
        return f"{self.layout.value}/{dtype}/h{self.num_kv_heads}/k{self.head_dim}/v{self.v_head_dim}{page}"

    @property
    def source_dtypes(self) -> tuple[torch.dtype, ...]:
        """What a store takes: every float by value, the storage dtype of plain rows byte for byte."""
        return FLOAT_DTYPES if self.block or self.dtype in FLOAT_DTYPES else (*FLOAT_DTYPES, self.dtype)

    @property
    def read_dtype(self) -> torch.dtype:
        """What a gather gives unless it is asked for another dtype."""
        return torch.bfloat16 if self.block else self.dtype

    @property
    def block(self) -> int:
        """Values that share a scale of their own, stored beside them; 0 where a KV head has one scale."""
        return {Layout.FLASHMLA: 64, Layout.FLASHMLA_V32: 128}.get(self.layout, 0)

    @property
    def rotates_v(self) -> bool:
        """Whether rope turns V, the rope part of an MLA row, instead of K."""
        return self.layout in (Layout.MLA, Layout.FLASHMLA, Layout.FLASHMLA_V32)

    @property
    def rotated_dim(self) -> int:
        """The most dims that a store can rotate; 0 for a layout that takes no rope."""
        if self.packed:
            return 0
        return self.v_head_dim if self.rotates_v else self.head_dim

    @property
    def family(self) -> str:
        """What follows "store_kv", "gather_kv" and "move_kv" in the name of the ops that serve this layout."""
        if self.packed:
            return "_packed"
        return "_flashmla" if self.block else ""

    @property
    def packed(self) -> bool:
        return self.layout.packed

    @property
    def raw(self) -> KVFormat:
        """The format in which the stored bytes of slots move unchanged, to other slots or to the host."""
        if self.layout is Layout.FLASHMLA:
            dims = self.head_dim + 2 * self.v_head_dim, self.head_dim // self.block + 1
        elif self.layout is Layout.FLASHMLA_V32:
            dims = self.head_dim + 4 * (self.head_dim // self.block), 2 * self.v_head_dim
        else:
            return self
        return KVFormat(1, *dims, self.dtype, self.page_size)

    @property
    def ops(self) -> dict[str, KVFormat]:
        """The ops that a pool of this format needs, and the format that each is given."""
        own = {f"store_kv{self.family}": self, f"gather_kv{self.family}": self}
        if self.rotated_dim > 1:
            own[f"store_kv_rope{self.family}"] = self
        raw = self.raw
        return own | {f"{op}{raw.family}": raw for op in ("store_kv", "gather_kv", "move_kv")}

    def problem(self, mla: bool) -> str | None:
        """What keeps an MLA layer, or one of K and V heads, from being laid out so; None if nothing does."""
        if self.packed:
            return "an MLA latent" if mla else self._packed_problem()
        if not mla and self.layout in (Layout.MLA, Layout.FLASHMLA, Layout.FLASHMLA_V32):
            return "K and V heads"
        dims = {Layout.FLASHMLA: (448, 64), Layout.FLASHMLA_V32: (512, 64)}.get(self.layout)
        if dims not in (None, (self.head_dim, self.v_head_dim)):
            return f"dims {self.head_dim} and {self.v_head_dim} instead of {dims}"
        if self.block and self.dtype != torch.float8_e4m3fn:
            return f"{self.dtype} instead of torch.float8_e4m3fn"
        return None

    def _packed_problem(self) -> str | None:
        multiple = 32 if self.layout is Layout.CPU_AMX else 16
        if self.head_dim % multiple or self.v_head_dim % multiple:
            return f"head dims {self.head_dim} and {self.v_head_dim}, not multiples of {multiple},"
        if self.page_size % 32:
            return f"pages of {self.page_size} slots, not a multiple of 32,"
        if self.layout is Layout.CPU_AMX and self.dtype != torch.bfloat16:
            return f"{self.dtype} instead of torch.bfloat16"
        return None

    @property
    def item_slots(self) -> int:
        """Slots that share an item of a buffer: a page where the bytes of one token lie apart."""
        return self.page_size if self.packed or self.layout is Layout.FLASHMLA else 1

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of one item in each buffer: in K's and in V's, or in the only one."""
        raw = self.raw
        if self.layout is Layout.FLASHMLA:
            return (-(-self.page_size * raw.row_bytes // _PAGE_UNIT) * _PAGE_UNIT,)
        one = self.layout in (Layout.MLA, Layout.FLASHMLA_V32)
        parts = (raw.row_bytes,) if one else (raw.k_row_bytes, raw.v_row_bytes)
        return tuple(self.item_slots * part for part in parts)

    def nbytes(self, num_rows: int) -> int:
        """Bytes of one layer of `num_rows` slots, the reserved page's among them."""
        return num_rows // self.item_slots * sum(self.item_bytes)

    def caches(self, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of every layer as the ops take them, views of `buffers`: `[L, rows, H, D]` and `[L, rows, H, Dv]`.

        FlashMLA's are those of `raw`: DeepSeek-V4's K `[L, pages, page, 1, 576]` has a token's quantised values and its
        rope part, V `[L, pages, page, 1, 8]` their scales; V3.2's K `[L, rows, 1, 528]` has values and scales, V
        `[L, rows, 1, 128]` the rope part. Packed pages are `[L, pages, H, page, D]` and `[L, pages, H, page, Dv]`, the
        last two axes in the order of the layout.
        """
        raw, (k, *rest) = self.raw, [x.view(self.dtype) for x in buffers]
        if self.layout is Layout.FLASHMLA:
            end = self.page_size * raw.head_dim
            parts = k[..., :end], k[..., end : end + self.page_size * raw.v_head_dim]
            k, v = (x.view(*x.shape[:2], self.page_size, 1, -1) for x in parts)
            return k, v
        page = (self.page_size,) if self.packed else ()
        k, *rest = (x.view(*x.shape[:2], self.num_kv_heads, *page, -1) for x in (k, *rest))
        return k[..., : raw.head_dim], rest[0] if rest else k[..., raw.head_dim :]

    def readable(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V as attention takes them: its caches; for MLA, whose V is part of K, the whole rows `[rows,
        1, D + Dv]` and their latent; for FlashMLA twice its uint8 pages `[pages, page, 1, 584 or 656]`, which in
        DeepSeek-V4 lie further apart than they are long. Views of the caches, so that a compiler knows what a store
        changes."""
        if self.block:
            page, row = self.page_size, self.raw.row_bytes
            size = k_cache.shape[0] * self.item_slots // page, page, 1, row
            stride = k_cache.stride(0) * page // self.item_slots, row, row, 1
            pages = k_cache.as_strided(size, stride).view(torch.uint8)
            return pages, pages
        if self.layout is Layout.MLA:
            rows = *k_cache.shape[:-1], self.head_dim + self.v_head_dim
            return k_cache.as_strided(rows, k_cache.stride()), k_cache
        return k_cache, v_cache


INDEX_DTYPES = (torch.int32, torch.int64)


class Structure(enum.Enum):
    """How attention is told which slots it reads."""

    RAGGED = "ragged"  # indptr [n + 1], and the token slots of all sequences one after another
    PAGES = "pages"  # a row of page ids per sequence
    ROWS = "rows"  # a row of token slots per sequence
    QUERY_ROWS = "query_rows"  # a row of token slots per query token


@dataclass(frozen=True, slots=True)
class ReadFormat:
    """What one read structure of a forward names, and how.

    `window` is the number of visible keys including the query's own token, None: all. `page_size` is the pool's; only
    PAGES divides by it. `pad`, 0 or -1, fills unused places and stands for tokens without a slot. `prefix_only` leaves
    out the keys of the queries themselves, for kernels that take the new K and V directly.
    """

    structure: Structure
    window: int | None = None
    page_size: int = 1
    pad: int = PAD
    prefix_only: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """The name of one compiled kernel. `dtype` is the other dtype of the op: a store's source, a gather's
    output, a read's lengths; `alignment` is the bytes that every row start is a multiple of; `rope` is the dtype of
    the cosines and sines of a rope store."""

    op: str
    fmt: KVFormat | None = None
    dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int64
    out_index_dtype: torch.dtype | None = None
    alignment: int = VECTOR_BYTES
    structure: Structure | None = None
    rope: torch.dtype | None = None


def list_variants(formats: Iterable[KVFormat]) -> tuple[Variant, ...]:
    """Every variant a pool of `formats` can need, in a fixed order and without repeats."""
    out: dict[Variant, None] = {}
    for index in INDEX_DTYPES:
        for out_index in INDEX_DTYPES:
            out[Variant("translate_loc", index_dtype=index, out_index_dtype=out_index)] = None
        out[Variant("cast_loc", index_dtype=index, out_index_dtype=torch.int32)] = None
    out[Variant("patch_map")] = None
    for structure in (Structure.RAGGED, Structure.ROWS, Structure.QUERY_ROWS):  # pages are rows of every n-th slot
        for lengths, index, out_index in itertools.product(INDEX_DTYPES, INDEX_DTYPES, INDEX_DTYPES):
            out[Variant("build_read", None, lengths, index, out_index, structure=structure)] = None
    for fmt in formats:
        out |= dict.fromkeys(_row_variants(fmt, fmt.source_dtypes))
        out |= dict.fromkeys(_row_variants(fmt.raw, (fmt.raw.dtype,)))
        if fmt.rotated_dim > 1:
            out |= dict.fromkeys(_rope_variants(fmt))
    return tuple(out)


def _rope_variants(fmt: KVFormat) -> Iterator[Variant]:
    for dtype in FLOAT_DTYPES:
        for rope in dict.fromkeys((torch.float32, dtype)):
            for index in INDEX_DTYPES:
                yield Variant(f"store_kv_rope{fmt.family}", fmt, dtype, index, alignment=dtype.itemsize, rope=rope)


def _row_variants(fmt: KVFormat, dtypes: Iterable[torch.dtype]) -> Iterator[Variant]:
    for dtype in dtypes:
        # Rows whose dims are not whole vectors cannot all be aligned to one.
        dim_bytes = (fmt.head_dim | fmt.v_head_dim) * min(dtype.itemsize, fmt.dtype.itemsize)
        alignments = (dtype.itemsize,) if fmt.packed or dim_bytes % VECTOR_BYTES else (VECTOR_BYTES, dtype.itemsize)
        for index in INDEX_DTYPES:
            for alignment in alignments:
                yield Variant(f"store_kv{fmt.family}", fmt, dtype, index, alignment=alignment)
                yield Variant(f"gather_kv{fmt.family}", fmt, dtype, index, alignment=alignment)
                if dtype == fmt.dtype:
                    yield Variant(f"move_kv{fmt.family}", fmt, dtype, index, alignment=alignment)
