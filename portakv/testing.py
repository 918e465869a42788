"""Conformance kit: inputs that stores get wrong, and a comparer against the reference, bit for bit.

    for case in testing.cases("store_kv"):
        testing.check("store_kv", kernel, case, device)

Every tensor lies inside a larger allocation filled with canary bytes, and whole allocations are compared, so a byte
written beside its target fails like a wrong one inside it.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from portakv import device as devices
from portakv.buffers import Buffer, canary, compare, wrap
from portakv.formats import (
    FAULT_KINDS,
    FLOAT_DTYPES,
    FP8_DIALECTS,
    INDEX_DTYPES,
    VECTOR_BYTES,
    KVFormat,
    Layout,
    ReadFormat,
    Structure,
    Variant,
    list_variants,
)
from portakv.kernels.reference import flashmla as reference_flashmla
from portakv.kernels.reference import packed as reference_packed
from portakv.kernels.reference import rows as reference

DTYPES = (*FLOAT_DTYPES, *FP8_DIALECTS)
TOKENS = (0, 1, 2, 7, 33, 131)
STYLES = ("dense", "strided", "paged")
"""How rows and caches lie: dense; slices of a fused QKV and a head-major cache; pages apart from each other."""

MLA_FORMATS = ((512, 64), torch.bfloat16), ((24, 8), torch.float8_e4m3fn)
"""((latent, rope part), dtype) of MLA rows; the second in rows that are no whole number of vectors."""

PACKED_FORMATS = (
    ((3, 96, 64), torch.bfloat16, 32, Layout.CPU_AMX),
    ((2, 64, 128), torch.bfloat16, 96, Layout.CPU_AMX),
    ((2, 80, 48), torch.bfloat16, 32, Layout.CPU_VEC),
    ((3, 64, 64), torch.float16, 96, Layout.CPU_VEC),
    ((1, 48, 80), torch.float32, 64, Layout.CPU_VEC),
    ((2, 80, 96), torch.float8_e4m3fn, 64, Layout.CPU_VEC),
    ((3, 48, 96), torch.float8_e5m2fnuz, 128, Layout.CPU_VEC),
)
"""Of packed pages: (KV heads, K dim, V dim), dtype, page size, layout."""

SHAPES = ((1, 8, 8), (8, 128, 128), (1, 80, 80), (3, 96, 64), (6, 192, 128), (2, 576, 512))
"""(KV heads, K dim, V dim): powers of two and not, K and V alike and not."""


@dataclass(frozen=True, slots=True)
class Case:
    variant: Variant
    tokens: int
    style: str
    seed: int


Arg = Buffer | KVFormat | ReadFormat | int | None


class _Random(random.Random):
    """One seed for Python's choices and torch's numbers, apart from the global generators."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def ints(self, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device="cpu")

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")


def formats() -> tuple[KVFormat, ...]:
    """Every storage dtype with a few shapes each, and page sizes 1, 4 and 16; MLA rows, plain, quantised and packed."""
    mla = tuple(KVFormat(1, *dims, dtype, 4, Layout.MLA) for dims, dtype in MLA_FORMATS)
    e4m3fn = torch.float8_e4m3fn
    packed = KVFormat(1, 448, 64, e4m3fn, 4, Layout.FLASHMLA), KVFormat(1, 512, 64, e4m3fn, 1, Layout.FLASHMLA_V32)
    return (
        mla
        + packed
        + tuple(KVFormat(*shape, dtype, page, layout) for shape, dtype, page, layout in PACKED_FORMATS)
        + tuple(
            KVFormat(*shape, dtype, (1, 4, 16)[(i + j) % 3])
            for i, dtype in enumerate(DTYPES)
            for j, shape in enumerate(SHAPES)
            if (i + j) % 2 == 0 or shape == (8, 128, 128)
        )
    )


def variants() -> Iterator[Variant]:
    """Every variant of `formats()`, but of each dtype and alignment of plain rows one slot width, the two in turn, and
    rotated ones for one shape of each dtype: rows move alike whatever holds their slots, and rotated or not."""
    whole = {fmt.raw for fmt in formats() if fmt.block}  # each has a shape that no plain row has
    for variant in list_variants(formats()):
        if (fmt := variant.fmt) is not None and fmt.layout is Layout.ROWS and fmt not in whole:
            dtypes = [DTYPES.index(dtype) for dtype in (fmt.dtype, variant.dtype, variant.rope) if dtype]
            turn = sum(dtypes) + fmt.page_size + (variant.alignment == VECTOR_BYTES)
            odd_shape = fmt.head_dim != SHAPES[dtypes[0] % len(SHAPES)][1]
            if variant.index_dtype != INDEX_DTYPES[turn % 2] or (variant.rope and odd_shape):
                continue
        yield variant


def cases(op: str) -> Iterator[Case]:
    """The inputs for one op, in a fixed order: every variant, the styles and token counts in turn."""
    seed = 0
    for variant in variants():
        if variant.op == op:
            # A case of slots alone costs little, so each of their variants gets every token count.
            few = len(STYLES) * (2 if variant.structure else len(TOKENS))
            for _ in range(1 if variant.fmt else few):
                # Of 18 cases in a row each is another pair of the two, of 6 each has another count.
                tokens = TOKENS[(seed + seed // len(TOKENS)) % len(TOKENS)]
                yield Case(variant, tokens, STYLES[seed % len(STYLES)], seed)
                seed += 1


def check(
    op: str, kernel: Callable[..., None], case: Case, device: torch.device, last_wins: bool | None = None
) -> None:
    """Run `kernel` on `device` and the reference on the CPU, on equal inputs; raise `Mismatch` if any byte differs.

    Where a slot is named twice the last of its rows must be there, whole, if `last_wins` (None: on a CPU); otherwise
    each element of the slot may be of any of its rows, as on GPUs.
    """
    expected = build(case)
    copies = {id(arg.storage): arg.to(device).storage for arg in expected if isinstance(arg, Buffer)}
    got = [replace(arg, storage=copies[id(arg.storage)]) if isinstance(arg, Buffer) else arg for arg in expected]
    define = _definition(op)
    define(*_tensors(expected))
    kernel(*_tensors(got))
    if last_wins is None:
        last_wins = devices.shares_host_memory(device)
    others = [] if last_wins else [_run_on(define, build(case), order) for order in _orders(case)]
    for i, (want, have, *allowed) in enumerate(zip(expected, got, *others, strict=True)):
        if isinstance(want, Buffer):
            assert isinstance(have, Buffer)
            compare(f"{case}: argument {i}", want, have, [x for x in allowed if isinstance(x, Buffer)])


def _tensors(args: list[Arg]) -> list[torch.Tensor | KVFormat | ReadFormat | int | None]:
    return [arg.tensor if isinstance(arg, Buffer) else arg for arg in args]


def _definition(op: str) -> Callable[..., None]:
    modules = (reference, reference_flashmla, reference_packed)
    found: Callable[..., None] = next(getattr(module, op) for module in modules if op in vars(module))
    return found


def repeats_a_slot(case: Case) -> bool:
    """Whether the case's store or move names a writable slot several times."""
    return next(_orders(case), None) is not None


def _orders(case: Case) -> Iterator[list[int]]:
    """Orders of a store's or move's tokens that, together, have each row named for a slot as its last one; none where
    every slot is named once."""
    op, fmt = case.variant.op, case.variant.fmt
    if fmt is None or op.startswith("gather_kv"):
        return
    slots = build(case)[4 if op.startswith("store_kv") else 2]
    assert isinstance(slots, Buffer)
    named = {t: s for t, s in enumerate(slots.tensor.tolist()) if fmt.page_size <= s < _num_rows(case, fmt)}
    if len(named) == len(set(named.values())):
        return
    seen: set[tuple[int, int]] = set()
    for first in range(case.tokens):
        order = [*range(first, case.tokens), *range(first)]
        last = set({named[t]: t for t in order if t in named}.items())
        if not last <= seen:
            yield order
        seen |= last


_OF_TOKENS = ("k", "v", "loc", "positions", "tgt", "src")


def _run_on(define: Callable[..., None], args: list[Arg], order: Sequence[int]) -> list[Arg]:
    """`args`, after `define` ran on some of their tokens or in another order."""
    given = _tensors(args)
    for i, name in enumerate(inspect.signature(define).parameters):
        if name in _OF_TOKENS and isinstance(x := given[i], torch.Tensor):
            given[i] = x[order] if x.dim() == 1 else reference.as_bytes(x)[order].view(x.dtype)
    define(*given)
    return args


def build(case: Case) -> list[Arg]:
    """The arguments of the case's op, in the order of the reference's signature."""
    return _BUILDERS[case.variant.op](case, _Random(case.seed))


def _translate_args(case: Case, rng: _Random) -> list[Arg]:
    num_rows = 4 * case.tokens + 40
    mapping = rng.ints(0, 50, (num_rows + 1,)) * rng.ints(0, 2, (num_rows + 1,))
    mapping[0], mapping[-1] = 0, -1
    loc = _slots(case, rng, num_rows, unique=False)
    out_dtype = case.variant.out_index_dtype or torch.int64
    tail = rng.choice((0, 5))
    out = [canary((case.tokens + tail,), dtype) for dtype in (out_dtype, out_dtype, torch.int32, torch.int32)]
    optional = [arg if rng.random() < 0.6 else None for arg in out[1:]]
    return [wrap(mapping), loc, out[0], *optional, faults()]


def _cast_args(case: Case, rng: _Random) -> list[Arg]:
    loc = _slots(case, rng, 4 * case.tokens + 40, unique=False)
    return [loc, canary((case.tokens + rng.choice((0, 3)),), torch.int32), faults()]


def _patch_args(case: Case, rng: _Random) -> list[Arg]:
    num_rows = 3 * case.tokens + 10
    slots = torch.tensor(rng.sample(range(1, num_rows), case.tokens), dtype=torch.int64, device="cpu")
    return [canary((num_rows + 1,), torch.int64), wrap(slots), wrap(rng.ints(0, 99, (case.tokens,)))]


def _store_args(case: Case, rng: _Random) -> list[Arg]:
    fmt, dtype = _fmt(case), case.variant.dtype
    assert dtype is not None
    num_rows = _num_rows(case, fmt)
    k, v = (_rows(case, dtype, dim, rng) for dim in (fmt.head_dim, fmt.v_head_dim))
    caches = _caches(case, fmt, num_rows)
    loc = _slots(case, rng, num_rows, unique=True, page_size=fmt.page_size)
    return [k, v, *caches, loc, _scales(fmt, rng), _scales(fmt, rng), faults(), fmt]


def _rope_args(case: Case, rng: _Random) -> list[Arg]:
    """A store with angles of a dtype of their own; some positions have none."""
    fmt, dtype = _fmt(case), case.variant.rope
    assert dtype is not None
    *args, counts, _ = _store_args(case, rng)
    most, dims = rng.choice((1, 40)), 2 * rng.randint(1, fmt.rotated_dim // 2)
    cos_sin = canary((most, dims), dtype, (dims if case.style == "dense" else dims + 3, 1))
    _fill(cos_sin.tensor, rng)
    positions = rng.ints(0, most, (case.tokens,))
    odd = torch.tensor([-1, most, -(2**31), 2**31 - 1], device="cpu")[rng.ints(0, 4, (case.tokens,))]
    positions = torch.where(rng.ints(0, 12, (case.tokens,)) == 0, odd, positions)
    if rng.random() < 0.5:
        positions = positions.to(torch.int32)
    elif case.tokens:
        positions[-1] += rng.choice((0, 2**32))
    return [*args, cos_sin, wrap(positions), rng.random() < 0.5, counts, fmt]


def _gather_args(case: Case, rng: _Random) -> list[Arg]:
    fmt, dtype = _fmt(case), case.variant.dtype
    assert dtype is not None
    num_rows = _num_rows(case, fmt)
    caches = _caches(case, fmt, num_rows)
    for cache in caches:
        _fill(cache.tensor, rng)
    outs = [_rows(case, dtype, dim) for dim in (fmt.head_dim, fmt.v_head_dim)]
    loc = _slots(case, rng, num_rows, unique=False, page_size=fmt.page_size)
    return [*caches, loc, *outs, _scales(fmt, rng), _scales(fmt, rng), faults(), fmt]


def _move_args(case: Case, rng: _Random) -> list[Arg]:
    fmt = _fmt(case)
    num_rows = _num_rows(case, fmt)
    caches = _caches(case, fmt, num_rows, layers=2)
    for cache in caches:
        _fill(cache.tensor, rng)
    tgt = _slots(case, rng, num_rows, unique=True, page_size=fmt.page_size)
    src = _slots(case, rng, num_rows, unique=False, page_size=fmt.page_size)
    return [*caches, tgt, src, faults(), fmt]


def _read_args(case: Case, rng: _Random) -> list[Arg]:
    """A batch whose lengths, rows and slots are partly out of range, and outputs of enough room and of too little."""
    variant = case.variant
    asked, lens_dtype, out_dtype = variant.structure, variant.dtype, variant.out_index_dtype
    structure = rng.choice((Structure.ROWS, Structure.PAGES)) if asked is Structure.ROWS else asked
    assert structure is not None
    assert lens_dtype is not None
    assert out_dtype is not None
    batch, width, page_size = case.tokens % 24, rng.choice((1, 7, 38, 150)), rng.choice((1, 4, 16))
    fmt = ReadFormat(structure, rng.choice((None, 1, 5, 16, 2**62)), page_size, rng.choice((0, -1)), rng.random() < 0.3)

    mapping, num_slots = None, rng.choice((400, 2**40))
    if rng.random() < 0.6:
        num_slots = 400
        peers = rng.ints(1, 300, (num_slots + 1,)) * (rng.ints(0, 5, (num_slots + 1,)) > 0)
        peers[3::40] = 2**33
        peers[0], peers[-1] = 0, -1
        mapping = wrap(peers)
    odd = [-1, 0, 2**31 - 1, *((num_slots, 2**35, 2**41) if variant.index_dtype == torch.int64 else ())]
    requests = batch + 2
    stride = {"dense": (width, 1), "strided": (width + 5, 1), "paged": (3 * width, 1)}[case.style]
    table = canary((requests, width), variant.index_dtype, stride)
    strange = torch.tensor(odd, device="cpu")[rng.ints(0, len(odd), (requests, width))]
    table.tensor.copy_(
        torch.where(rng.ints(0, 30, (requests, width)) == 0, strange, rng.ints(1, 400, (requests, width)))
    )

    def lengths(values: list[int]) -> Buffer:
        out = canary((batch,), lens_dtype, (1 if case.style == "dense" else 2,))
        out.tensor.copy_(torch.tensor(values, dtype=lens_dtype, device="cpu"))
        return out

    def strangely(value: int) -> int:
        return rng.choice((-3, width + 4, 2**31 - 1)) if rng.random() < 0.06 else value

    rows = [strangely(rng.randrange(requests)) for _ in range(batch)]
    seq_lens = [strangely(rng.randrange(width + 1)) for _ in range(batch)]
    extra_lens = [strangely(rng.randrange(3)) for _ in range(batch)] if rng.random() < 0.5 else None
    query_lens = [strangely(rng.randrange(6)) for _ in range(batch)] if rng.random() < 0.7 else None

    lines = batch + rng.choice((0, 3))
    if structure is Structure.QUERY_ROWS and query_lens is not None:
        lines = max(0, sum(min(max(q, 0), 6) for q in query_lens) + rng.choice((-2, 0, 3)))
    step = page_size if structure is Structure.PAGES else 1
    columns = max(0, -(-width // step) + rng.choice((-2, 0, 5)))
    if structure is Structure.RAGGED:
        out = canary((rng.choice((batch * width, batch * width // 3)),), out_dtype)
    else:
        out = canary((lines, columns), out_dtype, (columns + (0 if case.style == "dense" else 3), 1))
    indptr = canary((lines + 1,), out_dtype) if structure is Structure.RAGGED else None
    return [
        *(mapping, table, lengths(rows), lengths(seq_lens)),
        *(None if x is None else lengths(x) for x in (extra_lens, query_lens)),
        *(out, indptr, canary((lines,), out_dtype), canary((lines,), out_dtype), faults(), num_slots, fmt),
    ]


_BUILDERS: dict[str, Callable[[Case, _Random], list[Arg]]] = {
    "translate_loc": _translate_args,
    "cast_loc": _cast_args,
    "patch_map": _patch_args,
    **dict.fromkeys(("store_kv", "store_kv_flashmla", "store_kv_packed"), _store_args),
    **dict.fromkeys(("store_kv_rope", "store_kv_rope_flashmla"), _rope_args),
    **dict.fromkeys(("gather_kv", "gather_kv_flashmla", "gather_kv_packed"), _gather_args),
    **dict.fromkeys(("move_kv", "move_kv_packed"), _move_args),
    "build_read": _read_args,
}


def faults() -> Buffer:
    return wrap(torch.zeros(len(FAULT_KINDS), dtype=torch.int64, device="cpu"))


def _fmt(case: Case) -> KVFormat:
    assert case.variant.fmt is not None
    return case.variant.fmt


def _num_rows(case: Case, fmt: KVFormat) -> int:
    return (case.tokens // fmt.page_size + 4) * fmt.page_size


def _slots(case: Case, rng: _Random, num_rows: int, unique: bool, page_size: int = 1) -> Buffer:
    """Slots, some of them negative, PAD, reserved or past the last row. `unique` ones are named once in seven of ten
    cases, and some of them several times in the others.

    In packed pages often consecutive ones, odd or named again among the first few only: the most tokens fill tiles of
    every width."""
    usable = list(range(page_size, num_rows))
    values = rng.sample(usable, case.tokens) if unique else rng.choices(usable, k=case.tokens)
    count = case.tokens
    if (fmt := case.variant.fmt) is not None and fmt.packed and (case.tokens == TOKENS[-1] or rng.random() < 0.7):
        first, count = rng.randrange(page_size, num_rows - case.tokens + 1), min(4, case.tokens)
        values = list(range(first, first + case.tokens))
    odd = [-1, 0, page_size - 1, num_rows, num_rows + 7, -(2**31), 2**31 - 1]
    if case.variant.index_dtype == torch.int64:
        odd += [2**31, 2**40, -(2**62)]
    for i in range(count):
        if rng.random() < 0.25:
            values[i] = rng.choice(odd)
    if unique and rng.random() < 0.3:
        for i in range(count):
            if rng.random() < 0.3:
                values[i] = rng.choice(values)
    return wrap(torch.tensor(values, dtype=case.variant.index_dtype, device="cpu"))


def _rows(case: Case, dtype: torch.dtype, dim: int, rng: _Random | None = None) -> Buffer:
    """Rows `[T, H, dim]`: dense, or the first columns of a wider fused tensor, or head-major."""
    heads, t = _fmt(case).num_kv_heads, case.tokens
    # A variant promises the alignment of row starts; odd pads keep only that of one element.
    pad = case.variant.alignment // dtype.itemsize
    stride = {
        "dense": (heads * dim, dim, 1),
        "strided": (3 * heads * dim + 5 * pad, dim, 1),
        "paged": (dim + pad, max(t, 1) * (dim + pad), 1),
    }[case.style]
    out = canary((t, heads, dim), dtype, stride)
    if rng is not None:
        _fill(out.tensor, rng)
    return out


def _caches(case: Case, fmt: KVFormat, num_rows: int, layers: int = 0) -> list[Buffer]:
    """K and V caches, `layers` of each or one: buffers of their own, or the two parts of each row or page."""
    raw, page = fmt.raw, fmt.page_size
    if fmt.packed or fmt.layout is Layout.ROWS:
        return [_cache(case, fmt, num_rows, layers, dim) for dim in (fmt.head_dim, fmt.v_head_dim)]
    if fmt.layout is not Layout.FLASHMLA:
        rows = _cache(case, fmt, num_rows, layers, raw.head_dim + raw.v_head_dim)
        return [rows.columns(0, raw.head_dim), rows.columns(raw.head_dim, raw.head_dim + raw.v_head_dim)]
    apart = fmt.item_bytes[0] + (0 if case.style == "dense" else VECTOR_BYTES)
    pages = canary((num_rows // page, page * raw.row_bytes), fmt.dtype, (apart, 1))
    out, begin = [], 0
    for dim in (raw.head_dim, raw.v_head_dim):
        size, stride = (num_rows // page, page, 1, dim), (apart, dim, dim, 1)
        out.append(replace(pages, size=size, stride=stride, offset=pages.offset + begin))
        begin += page * dim
    return out


def _cache(case: Case, fmt: KVFormat, num_rows: int, layers: int, dim: int) -> Buffer:
    """A cache: dense rows, head-major rows of a wider buffer, or pages `[pages, page, H, dim]` that lie apart; packed
    pages `[pages, H, page, dim]`, head after head or in the order of heads, side by side or apart."""
    heads, page = fmt.num_kv_heads, fmt.page_size
    # FlashMLA's rows start at a vector's multiple whatever a variant promises of the others.
    pad = (VECTOR_BYTES if fmt.block else case.variant.alignment) // fmt.dtype.itemsize
    size: tuple[int, ...] = (num_rows, heads, dim)
    stride: tuple[int, ...] = (heads * dim, dim, 1)
    if fmt.packed:
        head, apart = page * dim + pad * (case.style == "paged"), pad * (case.style != "dense")
        size = (num_rows // page, heads, page, dim)
        stride = (heads * head + apart, head, dim, 1)
        if case.style == "strided":
            stride = (head, num_rows // page * head + apart, dim, 1)
    elif case.style == "strided":
        stride = (2 * dim, 2 * dim * num_rows + pad, 1)
    elif case.style == "paged":
        size = (num_rows // page, page, heads, dim)
        stride = (2 * heads * page * dim + pad, dim, page * dim, 1)
    if layers:
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + pad
        size, stride = (layers, *size), (extent, *stride)
    return canary(size, fmt.dtype, stride)


def _fill(x: torch.Tensor, rng: _Random) -> None:
    """Random values over many magnitudes, with NaN, infinities, signed zeros and subnormals among them."""
    if x.dtype in FP8_DIALECTS:
        x.view(torch.uint8).copy_(rng.ints(0, 256, x.shape))
        return
    values = rng.normal(x.shape) * torch.exp2(rng.ints(-12, 12, x.shape).float())
    inf, nan = float("inf"), float("nan")
    odd = [nan, inf, -inf, 0.0, -0.0, 448.0, 464.0, 465.0, -240.0, 57344.0, 6e-8, 1e-40, -6e-40]
    special = torch.tensor(odd, dtype=torch.float32, device="cpu")
    pick = rng.ints(0, 40 * len(special), x.shape)
    x.copy_(torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], values))


def _scales(fmt: KVFormat, rng: _Random) -> Buffer:
    return wrap(torch.exp2(rng.ints(-3, 4, (fmt.num_kv_heads,)).float()) * 1.1)
