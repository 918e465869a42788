"""KVFormat: how a token's K and V lie in memory. Variant: which compiled kernel an op needs."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from portakv.memory.parts import PartTable

PAD = 0
"""The slot that padding points at: row 0 of the reserved page, never written."""

FAULT_KINDS = ("translate_loc", "cast_loc", "store_kv", "gather_kv", "move_kv", "build_read")
"""Entries of a fault counter, one int64 per op that can meet a slot it has to skip."""


SLOT_OPS = ("translate_loc", "cast_loc", "patch_map", "build_read")
"""The ops that know no format."""


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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Layout:
    """How the tokens of one side are laid out: a value of `portakv.memory.layouts`, where names are looked up.

    Attributes:
        name: what `layout=` calls it.
        table: the parts of a format's tokens and the buffers that hold them.
        caches: K and V of every layer as the ops take them, views of those buffers `[L, items, bytes]`.
        readable: a layer's K and V as attention takes them, views of its two caches.
        problem: what keeps a format's layers, of MLA or not, from being laid out so; None if nothing does.
        raw: the format in which the stored bytes of slots move unchanged, to other slots or to the host.
        family: what follows "store_kv", "gather_kv" and "move_kv" in the names of the ops that serve it.
        block: values that share a scale of their own, stored beside them; 0 where a KV head has one scale.
        rotates: what rope turns, "k", or "v" where V is the rope part of an MLA row; None where a store takes no rope.
        packed: whether only the whole page of a head has a meaning to readers, which are CPUs, not a token's row.
    """

    name: str
    table: Callable[[KVFormat], PartTable]
    caches: Callable[[KVFormat, Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
    readable: Callable[[KVFormat, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = lambda fmt, k, v: (
        k,
        v,
    )
    problem: Callable[[KVFormat, bool], str | None] = lambda fmt, mla: None
    raw: Callable[[KVFormat], KVFormat] = lambda fmt: fmt
    family: str = ""
    block: int = 0
    rotates: str | None = "k"
    packed: bool = False

    ROWS: ClassVar[Layout]
    MLA: ClassVar[Layout]
    FLASHMLA: ClassVar[Layout]
    FLASHMLA_V32: ClassVar[Layout]
    CPU_AMX: ClassVar[Layout]
    CPU_VEC: ClassVar[Layout]

    def __repr__(self) -> str:
        return f"Layout({self.name!r})"

    def __reduce__(self) -> str:
        return f"Layout.{self.name.upper()}"  # those of `LAYOUTS` are that


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
    layout: Layout = field(default_factory=lambda: Layout.ROWS)

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
        return f"{self.layout.name}/{dtype}/h{self.num_kv_heads}/k{self.head_dim}/v{self.v_head_dim}{page}"

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
        return self.layout.block

    @property
    def rotates_v(self) -> bool:
        """Whether rope turns V, the rope part of an MLA row, instead of K."""
        return self.layout.rotates == "v"

    @property
    def rotated_dim(self) -> int:
        """The most dims that a store can rotate; 0 for a layout that takes no rope."""
        return {"k": self.head_dim, "v": self.v_head_dim, None: 0}[self.layout.rotates]

    @property
    def family(self) -> str:
        return self.layout.family

    @property
    def packed(self) -> bool:
        return self.layout.packed

    @property
    def raw(self) -> KVFormat:
        """The format in which the stored bytes of slots move unchanged, to other slots or to the host."""
        return self.layout.raw(self)

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
        return self.layout.problem(self, mla)

    @property
    def table(self) -> PartTable:
        """Where each byte of a token lies."""
        return self.layout.table(self)

    @property
    def item_slots(self) -> int:
        """Slots that share an item of a buffer: a page where the bytes of one token lie apart."""
        return self.table.buffers[0].slots

    @property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of one item in each buffer: in K's and in V's, or in the only one."""
        return tuple(buffer.item_bytes for buffer in self.table.buffers)

    def nbytes(self, num_rows: int) -> int:
        """Bytes of one layer of `num_rows` slots, the reserved page's among them."""
        return num_rows // self.item_slots * sum(self.item_bytes)

    def caches(self, buffers: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of every layer as the ops take them, views of `buffers`: `[L, rows, H, D]` and `[L, rows, H, Dv]` of
        rows; other layouts say theirs."""
        return self.layout.caches(self, [x.view(self.dtype) for x in buffers])

    def readable(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's K and V as attention takes them: views of its caches, so that a compiler knows what a store
        changes."""
        return self.layout.readable(self, k_cache, v_cache)


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
