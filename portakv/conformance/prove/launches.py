"""What is known of each launch before it runs: its numbers, its tensors, its grid, and who guarantees each relation.

A function an op. Everything else is left open: the contents of slot tensors, the size of the pool, the number of
tokens, every stride. A relation that nobody guarantees does not belong here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import z3

from portakv.conformance.prove.terms import Condition, Sum, Terms, both, negate, number
from portakv.conformance.prove.threads import Loop, Thread
from portakv.conformance.prove.ttir import Op
from portakv.formats import FAULT_KINDS, PAD, VECTOR_BYTES, Structure, Variant
from portakv.kernels._triton.rows import MOST_ROWS

MOST_BYTES = 1 << 56
"""Of one tensor. Addresses have at most 57 bits."""

MOST_SLOTS = 1 << 40
MOST_TOKENS = 1 << 38
"""Of the ops that move slots only: what a grid of 2^31 - 1 programs covers."""

MOST_LENGTH = 1 << 31
"""Of a batch, and of a row of a table of slots."""

MOST_PAGE = 1 << 20
"""Of the slots of a page."""

MOST_PLACES = 1 << 40
"""Of a row of what `build_read` writes."""

Case = dict[str, str]
"""Which of its forms a launch has: the caches' axes, which of two launches it is."""


@dataclass(frozen=True, slots=True)
class Relation:
    holds: Condition
    guaranteed_by: str


@dataclass(frozen=True, slots=True)
class View:
    """How K's and V's caches may share memory: V's first byte lies `apart` bytes after K's, if `relations` hold."""

    name: str
    tensors: tuple[str, str]
    apart: Sum
    relations: tuple[Relation, ...]
    twins: Mapping[str, str]  # V's strides that are K's, by name


@dataclass
class Launch:
    """One launch, any of those that a variant's kernel can be given.

    `tensors` are their bytes; `assumed` holds always. What only "no byte is written twice" needs: `apart`, that no two
    elements of a tensor share a byte; `distinct`, slot tensors and the bounds of their live slots, no two of which are
    the same; `views`, how K and V may lie in one buffer. `reserved` gives any byte of a reserved page, and when it is
    one. `counts` says of each atomic, in the kernel's order, which fault a lane counts with it, and when; None where
    that is not declared.
    """

    terms: Terms
    variant: Variant
    constants: Mapping[str, Any]
    case: Case
    scalars: dict[str, Sum] = field(default_factory=dict)
    tensors: dict[str, Sum] = field(default_factory=dict)
    programs: list[Sum] = field(default_factory=lambda: [number(1)] * 3)
    assumed: list[Relation] = field(default_factory=list)
    apart: dict[str, Relation] = field(default_factory=dict)
    views: list[View] = field(default_factory=list)
    distinct: dict[str, tuple[Sum, Sum]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # the first byte that may be accessed, unless that is 0
    reserved: dict[str, Callable[[], tuple[Sum, Condition]]] = field(default_factory=dict)
    counts: Callable[[Thread], Sequence[tuple[str, Condition | None]]] = lambda thread: ()

    # Numbers.

    def scalar(self, name: str, low: int, high: int) -> Sum:
        self.scalars[name] = self.terms.name(name, low, high)
        return self.scalars[name]

    def stride(self, name: str, item: int, multiple: int = 1) -> Sum:
        """A stride in items of `item` bytes, not negative as all of torch's; in bytes a multiple of `multiple`."""
        step = max(multiple // item, 1)
        self.scalars[name] = step * self.terms.name(f"{name}/{step}" if step > 1 else name, 0, (1 << 60) // step)
        return self.scalars[name]

    def assume(self, holds: Condition, guaranteed_by: str) -> None:
        if holds is not True:
            self.assumed.append(Relation(holds, guaranteed_by))

    def blocks(self, count: Sum, size: int) -> Sum:
        """As many programs as cover `count` by `size`."""
        if size == 1:
            return count
        out = self.terms.fresh("programs", 0, self.terms.range(count)[1] // size + 1)
        self.assume(self.terms.at_least(size * out, count), "launch: the grid covers all rows")
        self.assume(self.terms.less(size * out, count + size), "launch: the grid has no program to spare")
        return out

    # Tensors.

    def tensor(self, name: str, item: int, axes: Sequence[tuple[Sum, Sum]], dim: int = 1) -> None:
        """Axes of (size, stride in items) around rows of `dim` dense items; empty if an axis is."""
        span = number(item * dim)
        for size, stride in axes:
            span += item * self.terms.times(size - 1, stride)
        some = both(*(self.terms.at_least(size, 1) for size, _ in axes))
        self.tensors[name] = span if some is True else self.terms.choose(some, span, number(0))
        self.assume(self.terms.at_least(number(MOST_BYTES), self.tensors[name]), "a tensor lies in memory")

    def elements_apart(self, item: int, axes: Sequence[tuple[Sum, Sum]], dim: int, outer: int = 0) -> Condition:
        """That no two elements of such a tensor share a byte: in some order, each axis strides over all inside it.

        The first `outer` axes lie outside all others, whatever the order of these.
        """
        fixed, free = axes[:outer], axes[outer:]
        ways = []
        for order in itertools.permutations(free):
            span, steps = number(dim), []
            for size, stride in (*order, *reversed(fixed)):  # from the innermost out
                if size.factors or size.const > 1:
                    wide = self.terms.at_least(stride, span)
                    steps.append(wide if not size.factors else z3.Or(_z(self.terms.less(size, 2)), _z(wide)))
                    span += self.terms.times(size - 1, stride)
            ways.append(_z(both(*steps)))
        return z3.Or(*ways)

    def slots(self, name: str, stride: str, count: Sum, live: tuple[Sum, Sum] | None = None) -> None:
        """A vector of slots. Where stores need distinct ones, `live` bounds those that must be."""
        item = self.variant.index_dtype.itemsize
        self.tensor(name, item, [(count, self.stride(stride, item))])
        if live is not None:
            self.distinct[name] = live
            own = _z(self.terms.at_least(self.scalars[stride], 1))
            self.apart[name] = Relation(own, "slots are distinct, so not expanded")

    def faults(self) -> None:
        self.tensors["faults"] = number(8 * len(FAULT_KINDS))  # HybridKVPool allocates one int64 a kind

    # What row movers share.

    @property
    def heads(self) -> int:
        return int(self.constants["HEADS"])

    def tokens(self, rows_per_token: int) -> Sum:
        """`num_tokens`, and the grid over their rows."""
        tokens = self.scalar("num_tokens", 1, MOST_ROWS)  # launch: returns where there are none
        rows = rows_per_token * tokens
        size = int(self.constants["ROWS"])
        self.assume(self.terms.at_least(number(MOST_ROWS), rows), "launch: more are refused (too_many_rows)")
        self.programs[0] = self.blocks(rows, size)
        if "BLOCK" in self.constants and "K_DIM" in self.constants:
            widest = max(self.constants["K_DIM"], self.constants["V_DIM"])
            self.programs[1] = number(-(-widest // self.constants["BLOCK"]))
        return tokens

    def rows(self, name: str, tokens: Sum, dim: int, item: int, out: bool = False, heads: int = 0) -> None:
        """Rows `[T, H, dim]`, or `[T, 1, dim]` whose head stride no kernel takes, with any strides."""
        multiple = VECTOR_BYTES if self.constants["ALIGNED"] else 1
        prefix = name.removesuffix("_out")
        axes = [(tokens, self.stride(f"{prefix}_token", item, multiple))]
        if heads:
            axes.append((number(heads), self.stride(f"{prefix}_head", item, multiple)))
        self.tensor(name, item, axes, dim)
        if out:
            apart = self.elements_apart(item, axes, dim)
            self.apart[name] = Relation(apart, "gather_kv: check_outputs refuses outputs that overlap themselves")

    def caches(self, dims: Mapping[str, tuple[str, int]], item: int, heads: int, layers: Sum | None = None) -> Sum:
        """The caches of K and V, `{tensor: (prefix of its strides, dim)}`; returns the number of slots.

        Rows `[slots, H, dim]`, or pages `[pages, page, H, dim]`; no two elements share a byte.
        """
        terms, paged = self.terms, self.case["caches"] == "pages"
        if paged:
            page = self.scalar("page_size", 2, 1 << 20)
            pages = terms.name("num_pages", 1, MOST_SLOTS)
            slots = self.scalars["num_slots"] = terms.times(pages, page)
            self.assume(terms.at_least(number(MOST_SLOTS), slots), "a pool has at most MOST_SLOTS slots")
        else:
            page, self.scalars["page_size"] = number(1), number(1)
            pages = slots = self.scalar("num_slots", 1, MOST_SLOTS)
        lies: dict[str, list[tuple[Sum, Sum]]] = {}
        for name, (prefix, dim) in dims.items():
            multiple = VECTOR_BYTES if self.constants["ALIGNED"] or "BLOCKS" in self.constants else 1
            # In V4's pages a token has eight bytes of scales (KVFormat.raw).
            of_slot = min(multiple, dim) if paged and "BLOCKS" in self.constants else multiple
            axes: list[tuple[Sum, Sum]] = []
            if layers is not None:
                axes.append((layers, self.stride(f"{prefix}_layer", item, multiple)))
            if paged:
                axes.append((pages, self.stride(f"{prefix}_page", item, multiple)))
                axes.append((page, self.stride(f"{prefix}_slot", item, of_slot)))
            else:
                self.scalars[f"{prefix}_page"] = number(0)
                axes.append((slots, self.stride(f"{prefix}_slot", item, multiple)))
            if heads:
                head = f"{prefix}_head" if layers is not None else f"{prefix}_cache_head"
                axes.append((number(heads), self.stride(head, item, multiple)))
            self.tensor(name, item, axes, dim)
            apart = self.elements_apart(item, axes, dim, outer=int(layers is not None))
            self.apart[name] = Relation(apart, "KVFormat.caches: no two elements of a cache share a byte")
            lies[name] = axes
            self.reserved[name] = functools.partial(
                self._reserved, axes, dim * item, item, slots, int(layers is not None)
            )
        self._share(dims, lies, item, paged, layers is not None)
        return slots

    def _share(
        self,
        dims: Mapping[str, tuple[str, int]],
        lies: Mapping[str, list[tuple[Sum, Sum]]],
        item: int,
        paged: bool,
        layered: bool,
    ) -> None:
        """V's part of each row lies behind K's (MLA, V3.2), or V's part of each page behind K's (V4)."""
        (k, (_, k_dim)), (v, (_, v_dim)) = dims.items()
        first = int(layered)
        whole = number(1)
        forms = {"one row": first + 1 + paged, "one page": first + 1} if paged else {"one row": first + 1}
        for name, inner in forms.items():
            spans = []
            for tensor, dim in ((k, k_dim), (v, v_dim)):
                span = number(dim)
                for size, stride in lies[tensor][inner:]:
                    span += self.terms.times(size - whole, stride)
                spans.append(span)
            apart = self.terms.fresh("apart", 0, MOST_BYTES)
            relations = [self.terms.at_least(apart, spans[0])]
            twins = {}
            for (_, a), (_, b) in zip(lies[k][:inner], lies[v][:inner], strict=True):
                (mine, n), (theirs, m) = *a.factors.items(), *b.factors.items()
                if n != m:
                    break  # V4: a token's parts have strides of their own, and lie in one page, not in one row
                twins[theirs] = mine
                relations.append(_z(self.terms.equal(a, b)))
            else:
                relations.append(self._nested(lies[k][:inner], apart + spans[1]))
                says = "KVFormat.caches: K and V are the parts of each row or page"
                held = tuple(Relation(_z(x), says) for x in relations)
                self.views.append(View(name, (k, v), item * apart, held, twins))

    def _reserved(
        self, axes: Sequence[tuple[Sum, Sum]], row_bytes: int, item: int, slots: Sum, layered: int
    ) -> tuple[Sum, Condition]:
        """A byte of a reserved slot: any layer, slot of page 0, head and byte of its row."""
        assert self.variant.fmt is not None
        terms = self.terms
        slot = terms.fresh("reserved", 0, self.variant.fmt.page_size - 1)
        at, where = terms.fresh("byte", 0, row_bytes - 1), terms.less(slot, slots)
        paged = self.case["caches"] == "pages"
        index = list(terms.divide(slot, self.scalars["page_size"])) if paged else [slot]
        for i, (size, stride) in enumerate(axes):
            if layered <= i < layered + len(index):
                x = index[i - layered]
            else:
                x = terms.fresh("index", 0, terms.range(size)[1] - 1)
                where = both(where, terms.less(x, size))
            at += item * terms.times(x, stride)
        return at, where

    # Faults.

    def first_of_token(self, thread: Thread, per_token: int) -> tuple[Sum, Condition]:
        """A row's token, and whether the row is its first, in the first block of columns."""
        row = self.constants["ROWS"] * thread.program_id(0) + thread.lane((self.constants["ROWS"],))[0]
        token, head = self.terms.divide(row, number(per_token))
        first = both(self.terms.equal(head, 0), self.terms.equal(thread.program_id(1), 0))
        return token, both(self.terms.less(token, self.scalars["num_tokens"]), first)

    def _nested(self, axes: Sequence[tuple[Sum, Sum]], span: Sum) -> Condition:
        """That the items of `span` which `axes` count do not overlap, the last axis inside the others."""
        steps = []
        for size, stride in reversed(axes):
            steps.append(z3.Or(_z(self.terms.less(size, 2)), _z(self.terms.at_least(stride, span))))
            span = span + self.terms.times(size - 1, stride)
        return z3.And(*steps)

    def scales(self, *names: str) -> None:
        for name in names:
            self.tensors[name] = number(4 * self.heads)  # LayerGroup.scales: float32, one a KV head

    def angles(self, tokens: Sum, most_dims: int) -> None:
        assert self.variant.rope is not None
        words = self.terms.name("words - 1", 0, 1) + 1  # rope_arguments: int32 or int64
        self.scalars["words"] = words
        self.tensor("positions", 4, [(self.terms.times(tokens, words), number(1))])  # Rope: dense
        positions = self.scalar("num_positions", 0, 1 << 31)
        half = self.terms.name("dims / 2", 1, most_dims // 2)  # Rope: pairs, and _check: no more than are rotated
        self.scalars["dims"] = dims = 2 * half
        item = self.variant.rope.itemsize
        stride = self.stride("angle_stride", item)
        some = self.terms.at_least(positions, 1)
        span = item * (self.terms.times(positions - 1, stride) + dims)
        self.tensors["cos_sin"] = self.terms.choose(some, span, number(0))
        self.assume(self.terms.at_least(number(MOST_BYTES), self.tensors["cos_sin"]), "a tensor lies in memory")
        self.scalar("interleaved", 0, 1)


def _z(condition: Condition) -> Condition:
    return z3.BoolVal(True) if condition is True else condition


def _past_end(x: Launch, kind: str, per_token: int, thread: Thread) -> list[tuple[str, Condition]]:
    """A token whose slot lies past the last one counts once."""
    _, first = x.first_of_token(thread, per_token)
    slot = thread.read("loc")
    return [(kind, both(first, x.terms.at_least(slot, x.scalars["num_slots"])))]


def _past_end_or_angles(x: Launch, per_token: int, thread: Thread) -> list[tuple[str, Condition]]:
    """As does one that would be stored and has no angle: positions are one or two words, and the second one 0."""
    terms = x.terms
    _, first = x.first_of_token(thread, per_token)
    slot = thread.read("loc")
    low, high = thread.read("positions"), thread.read("positions", 1)
    short = z3.Or(_z(terms.equal(x.scalars["words"], 1)), _z(terms.equal(high, 0)))
    known = both(terms.at_least(low, 0), terms.less(low, x.scalars["num_positions"]), short)
    lost = both(_stored(x, slot), negate(known))
    return [("store_kv", both(first, z3.Or(_z(terms.at_least(slot, x.scalars["num_slots"])), _z(lost))))]


def _stored(x: Launch, slot: Sum) -> Condition:
    assert x.variant.fmt is not None
    return both(x.terms.at_least(slot, x.variant.fmt.page_size), x.terms.less(slot, x.scalars["num_slots"]))


def store_kv(x: Launch) -> None:
    fmt, dtype = x.variant.fmt, x.variant.dtype
    assert fmt is not None
    assert dtype is not None
    tokens = x.tokens(fmt.num_kv_heads)
    for name, dim in (("k", fmt.head_dim), ("v", fmt.v_head_dim)):
        x.rows(name, tokens, dim, dtype.itemsize, heads=fmt.num_kv_heads)
    dims = {"k_cache": ("k", fmt.head_dim), "v_cache": ("v", fmt.v_head_dim)}
    slots = x.caches(dims, fmt.dtype.itemsize, fmt.num_kv_heads)
    x.slots("loc", "loc_stride", tokens, (number(fmt.page_size), slots))
    x.scales("k_inv", "v_inv")
    x.faults()
    x.counts = functools.partial(_past_end, x, "store_kv", fmt.num_kv_heads)


def store_kv_rope(x: Launch) -> None:
    store_kv(x)
    assert x.variant.fmt is not None
    x.angles(x.scalars["num_tokens"], x.variant.fmt.rotated_dim)
    x.counts = functools.partial(_past_end_or_angles, x, x.variant.fmt.num_kv_heads)


def gather_kv(x: Launch) -> None:
    fmt, dtype = x.variant.fmt, x.variant.dtype
    assert fmt is not None
    assert dtype is not None
    tokens = x.tokens(fmt.num_kv_heads)
    for name, dim in (("k_out", fmt.head_dim), ("v_out", fmt.v_head_dim)):
        x.rows(name, tokens, dim, dtype.itemsize, out=True, heads=fmt.num_kv_heads)
    dims = {"k_cache": ("k", fmt.head_dim), "v_cache": ("v", fmt.v_head_dim)}
    x.caches(dims, fmt.dtype.itemsize, fmt.num_kv_heads)
    x.slots("loc", "loc_stride", tokens)
    x.scales("k_scale", "v_scale")
    x.faults()
    x.reserved.clear()
    x.counts = functools.partial(_past_end, x, "gather_kv", fmt.num_kv_heads)


def move_kv(x: Launch) -> None:
    fmt = x.variant.fmt
    assert fmt is not None
    tokens = x.tokens(fmt.num_kv_heads)
    layers = x.programs[2] = x.terms.name("num_layers", 1, 1 << 16)
    x.scalar("first_layer", 0, 1 << 16)
    writing = x.case["launch"] == "out of the scratch"
    x.scalars["writing"] = number(int(writing))
    caches, scratch = (("k_to", "v_to"), ("k_from", "v_from")) if writing else (("k_from", "v_from"), ("k_to", "v_to"))
    item, heads = fmt.dtype.itemsize, fmt.num_kv_heads
    dims = {caches[0]: ("k", fmt.head_dim), caches[1]: ("v", fmt.v_head_dim)}
    slots = x.caches(dims, item, heads, layers)
    for name, prefix, dim in ((scratch[0], "k_row", fmt.head_dim), (scratch[1], "v_row", fmt.v_head_dim)):
        # launch: new_empty makes it dense
        x.scalars[f"{prefix}_head"], x.scalars[prefix] = number(dim), number(heads * dim)
        x.scalars[f"{prefix}_layer"] = heads * dim * tokens
        x.tensor(name, item, [(layers, heads * dim * tokens), (tokens, number(heads * dim))], heads * dim)
    x.slots("src", "src_stride", tokens)
    x.slots("tgt", "tgt_stride", tokens, (number(fmt.page_size), slots) if writing else None)
    x.faults()

    def counts(thread: Thread) -> list[tuple[str, Condition]]:
        """A source past the end in the first launch; in the second a target past it, of a source that is not."""
        _, first = x.first_of_token(thread, fmt.num_kv_heads)
        first = both(first, x.terms.equal(thread.program_id(2), 0), x.terms.equal(x.scalars["first_layer"], 0))
        src, tgt = thread.read("src"), thread.read("tgt")
        read = both(x.terms.at_least(src, 0), x.terms.less(src, slots))
        never = z3.BoolVal(False)
        target = both(first, read, x.terms.at_least(tgt, slots)) if writing else never
        source = never if writing else both(first, x.terms.at_least(src, slots))
        return [("move_kv", target), ("move_kv", source)]

    x.counts = counts


def _packed(x: Launch, rows: tuple[str, str], out: bool) -> Sum:
    """What the ops of FlashMLA's layouts share; a row is a block of a token, or its rope part."""
    fmt, dtype = x.variant.fmt, x.variant.dtype
    assert fmt is not None
    assert dtype is not None
    tokens = x.tokens(x.constants["BLOCKS"] + 1)
    for name, dim in zip(rows, (fmt.head_dim, fmt.v_head_dim), strict=True):
        x.rows(name, tokens, dim, dtype.itemsize, out=out)
    raw = fmt.raw
    slots = x.caches({"k_cache": ("k", raw.head_dim), "v_cache": ("v", raw.v_head_dim)}, 1, 0)
    x.slots("loc", "loc_stride", tokens, None if out else (number(fmt.page_size), slots))
    x.faults()
    if out:
        x.reserved.clear()
    kind = "gather_kv" if out else "store_kv"
    x.counts = functools.partial(_past_end, x, kind, x.constants["BLOCKS"] + 1)
    return tokens


def store_kv_flashmla(x: Launch) -> None:
    _packed(x, ("k", "v"), False)


def store_kv_rope_flashmla(x: Launch) -> None:
    assert x.variant.fmt is not None
    x.angles(_packed(x, ("k", "v"), False), x.variant.fmt.rotated_dim)
    x.counts = functools.partial(_past_end_or_angles, x, x.constants["BLOCKS"] + 1)


def gather_kv_flashmla(x: Launch) -> None:
    _packed(x, ("k_out", "v_out"), True)


def _unfit(x: Launch, index: Sum, length: str, value: Sum) -> Condition:
    return both(x.terms.less(index, x.scalars[length]), negate(x.terms.fits(value, 32)))


def translate_loc(x: Launch) -> None:
    out = x.variant.out_index_dtype
    assert out is not None
    tokens = x.scalar("num_tokens", 0, MOST_TOKENS)
    x.slots("loc", "loc_stride", tokens)
    slots = x.scalar("num_slots", 0, MOST_SLOTS)
    x.tensors["mapping"] = 8 * slots  # full_to_swa: an entry a slot; the one behind is nobody's
    longest = x.terms.name("longest", 1, MOST_TOKENS)
    for name, item in (("swa_out", out.itemsize), ("loc_out", out.itemsize), ("swa_twin", 4), ("loc_twin", 4)):
        length = x.scalar(f"{name.removesuffix('_out') if name != 'loc_out' else 'loc'}_len", 0, MOST_TOKENS)
        stride = x.stride("loc_out_stride" if name == "loc_out" else f"{name.removesuffix('_out')}_stride", item)
        x.tensor(name, item, [(length, stride)])
        x.assume(x.terms.at_least(longest, length), "launch: the grid covers the longest output")
        x.apart[name] = Relation(_z(x.terms.at_least(stride, 1)), "KVWriteLoc, GraphWriteLoc: outputs of their own")
    x.programs[0] = x.blocks(longest, x.constants["BLOCK"])
    x.faults()

    def counts(thread: Thread) -> list[tuple[str, Condition]]:
        """A slot past the end; then of each int32 output, in order, a value that does not fit."""
        index = x.constants["BLOCK"] * thread.program_id(0) + thread.lane((x.constants["BLOCK"],))[0]
        live = x.terms.less(index, tokens)
        slot, peer = thread.read("loc"), thread.read("mapping")
        past = x.terms.at_least(slot, slots)
        known = both(x.terms.at_least(slot, 0), x.terms.less(slot, slots))
        swa = x.terms.choose(live, x.terms.choose(known, peer, number(-1)), number(PAD))
        loc = x.terms.choose(live, slot, number(PAD))
        found = [("translate_loc", both(live, past))]
        outputs = (("swa_len", swa, out), ("loc_len", loc, out))
        for length, value, dtype in (*outputs, ("swa_twin_len", swa, torch.int32), ("loc_twin_len", loc, torch.int32)):
            if dtype is torch.int32:
                found.append(("cast_loc", _unfit(x, index, length, value)))
        return found

    x.counts = counts


def cast_loc(x: Launch) -> None:
    tokens = x.scalar("num_tokens", 0, MOST_TOKENS)
    x.slots("loc", "loc_stride", tokens)
    length = x.scalar("out_len", 1, MOST_TOKENS)
    stride = x.stride("out_stride", 4)
    x.tensor("out", 4, [(length, stride)])
    x.apart["out"] = Relation(_z(x.terms.at_least(stride, 1)), "cast_write_loc: an output of its own")
    x.programs[0] = x.blocks(length, x.constants["BLOCK"])
    x.faults()

    def counts(thread: Thread) -> list[tuple[str, Condition]]:
        index = x.constants["BLOCK"] * thread.program_id(0) + thread.lane((x.constants["BLOCK"],))[0]
        loc = x.terms.choose(x.terms.less(index, tokens), thread.read("loc"), number(PAD))
        return [("cast_loc", _unfit(x, index, "out_len", loc))]

    x.counts = counts


def patch_map(x: Launch) -> None:
    edits = x.scalar("num_slots", 1, MOST_TOKENS)
    length = x.scalar("length", 0, MOST_SLOTS)
    x.slots("slots", "slots_stride", edits, (number(0), length))  # the allocator names a slot once an edit
    x.tensor("values", 8, [(edits, x.stride("values_stride", 8))])
    x.tensors["mapping"] = 8 * length
    x.programs[0] = x.blocks(edits, x.constants["BLOCK"])


def build_read(x: Launch) -> None:
    terms, variant = x.terms, x.variant
    assert variant.dtype is not None
    assert variant.out_index_dtype is not None
    ragged = variant.structure is Structure.RAGGED
    out_item, length_item = variant.out_index_dtype.itemsize, variant.dtype.itemsize
    batch = x.scalar("batch", 0, MOST_LENGTH)
    width = x.scalar("width", 0, MOST_LENGTH)
    requests = x.scalar("num_requests", 0, MOST_LENGTH)
    lines = x.scalar("num_lines", 0, MOST_LENGTH - 2)
    places = x.scalar("num_places", 0, MOST_PLACES)
    slots = x.scalar("num_slots", 1, MOST_SLOTS)
    mapped = x.scalar("has_mapping", 0, 1)
    x.scalar("prefix_only", 0, 1)
    x.scalar("pad", -1, 0)
    x.scalar("reserved", 1, MOST_PAGE)
    x.scalar("step", 1, MOST_PAGE if variant.structure is Structure.ROWS else 1)
    window = x.scalar("window", 1, MOST_LENGTH + 1)
    x.assume(terms.at_least(width + 1, window), "launch: no window is longer than a row and one")
    item = variant.index_dtype.itemsize
    row = terms.times(requests - 1, x.stride("table_stride", item)) + width
    some = both(terms.at_least(requests, 1), terms.at_least(width, 1))
    x.tensors["table"] = terms.choose(some, item * row, number(0))
    x.assume(terms.at_least(number(MOST_BYTES), x.tensors["table"]), "a tensor lies in memory")
    # As in translate_loc; nobody asks for the peer of slot 0, which is padding.
    x.tensors["mapping"], x.starts["mapping"] = terms.choose(terms.equal(mapped, 1), 8 * slots, number(0)), 8
    for name, count, stride in (
        ("rows", batch, "rows"),
        ("seq_lens", batch, "seq"),
        ("extra_lens", x.scalar("num_extra", 0, MOST_LENGTH), "extra"),
        ("query_lens", x.scalar("num_queries", 0, MOST_LENGTH), "query"),
    ):
        x.tensor(name, length_item, [(count, x.stride(f"{stride}_stride", length_item))])
        if count is not batch:
            x.assume(z3.Or(_z(terms.equal(count, 0)), _z(terms.equal(count, batch))), "launch: all lengths or none")
    line = x.stride("out_stride", out_item)
    if ragged:
        x.tensors["out"] = out_item * places  # a vector that plan_read made, dense
    else:
        x.tensor("out", out_item, [(lines, line), (places, number(1))])
        x.apart["out"] = Relation(_z(terms.at_least(line, places)), "plan_read: rows of their own")
    x.tensors["indptr"] = out_item * (lines + 1) if ragged else number(0)
    x.tensors["lens"] = x.tensors["starts"] = out_item * lines
    x.faults()
    longest = terms.minimum(width, places) if ragged else places
    x.programs[0] = lines + 1
    x.programs[1] = terms.maximum(number(1), x.blocks(longest, x.constants["SPAN"]))
    x.counts = functools.partial(_read_faults, x)


def _read_faults(x: Launch, thread: Thread) -> list[tuple[str, Condition | None]]:
    """Of `build_read`, in the order of its atomics."""
    terms, per_query = x.terms, x.variant.structure is Structure.QUERY_ROWS
    width, slots = x.scalars["width"], x.scalars["num_slots"]
    line, split = thread.program_id(0), thread.program_id(1)
    accesses = thread.program.accesses
    atomics = [access for access in accesses if access.kind == "atomic"]

    # A sequence out of order is counted by the first program of the line past the last one.
    judging = atomics[per_query]
    (loop,) = (step.op for step in judging.path if isinstance(step, Loop))
    block = thread.bounds(loop)[3] + thread.lane((x.constants["SEQUENCES"],))[0]
    row = thread.read("rows")
    end = _length(x, thread.read("seq_lens"), True)
    end += _length(x, thread.read("extra_lens"), terms.less(block, x.scalars["num_extra"]))
    known = both(terms.at_least(row, 0), terms.less(row, x.scalars["num_requests"]), terms.at_least(width, end))
    judges = both(terms.equal(line, x.scalars["num_lines"]), terms.equal(split, 0))
    live = terms.less(block, x.scalars["batch"])
    found: list[tuple[str, Condition | None]] = [("build_read", None)] * per_query
    found.append(("build_read", both(judges, live, negate(known))))

    # A line that is cut. Where lines are queries, which sequence it is of comes from a sum.
    found.append(("build_read", None if per_query else _cut(x, thread, loop)))

    # A slot that is read and lies past the end, out of step with its page, or without a peer; a value that is written
    # and does not fit.
    table = next(a for a in accesses if a.kind == "load" and thread.touch(a).pointer.tensor == "table")
    read, slot = thread.touch(table).when, thread.read("table")
    mapped, peer = _z(terms.equal(x.scalars["has_mapping"], 1)), thread.read("mapping")
    past, held = _z(terms.at_least(slot, slots)), _z(terms.at_least(slot, x.scalars["reserved"]))
    askew = z3.BoolVal(False)
    if x.variant.structure is Structure.ROWS:  # pages are rows of every `step`-th slot
        step = x.scalars["step"]
        _, rest = terms.divide(slot, step)
        askew = z3.And(held, z3.Not(past), _z(negate(terms.equal(step, 1))), _z(negate(terms.equal(rest, 0))))
    has_peer = z3.Or(z3.Not(mapped), _z(terms.at_least(peer, 1)))
    lost = z3.Or(past, askew, z3.And(held, z3.Not(has_peer)))
    found.append(("build_read", both(read, lost)))
    if x.variant.out_index_dtype is torch.int32:
        named = both(terms.at_least(slot, 1), z3.Not(past), z3.Not(askew), has_peer)
        value = terms.choose(mapped, peer, slot)
        if x.variant.structure is Structure.ROWS:
            pages, _ = terms.divide(value, x.scalars["step"])
            value = terms.choose(terms.equal(x.scalars["step"], 1), value, pages)
        found.append(("cast_loc", both(read, named, negate(terms.fits(value, 32)))))
    return found


def _length(x: Launch, length: Sum, live: Condition) -> Sum:
    """A length as the kernel takes it: in [0, width + 1], 0 where there is none."""
    terms = x.terms
    return terms.choose(live, terms.minimum(terms.maximum(length, number(0)), x.scalars["width"] + 1), number(0))


def _cut(x: Launch, thread: Thread, summed: Op) -> Condition:
    """That a sequence names more than its line has room for."""
    terms, scalars = x.terms, x.scalars
    line, split, width, places = thread.program_id(0), thread.program_id(1), scalars["width"], scalars["num_places"]
    row = thread.read("rows", 1)
    known = both(terms.at_least(row, 0), terms.less(row, scalars["num_requests"]))
    end = _length(x, thread.read("seq_lens", 1), True)
    end += _length(x, thread.read("extra_lens", 1), terms.less(line, scalars["num_extra"]))
    end = terms.choose(known, terms.minimum(end, width), number(0))
    given = terms.less(line, scalars["num_queries"])
    ragged = x.variant.structure is Structure.RAGGED
    queries = _length(x, thread.read("query_lens", 1 if ragged else 0), True)
    queries = terms.minimum(terms.choose(given, queries, number(1)), width)
    start = terms.maximum(end - queries - scalars["window"] + 1, number(0))
    stop = end - terms.times(scalars["prefix_only"], queries)
    some = terms.less(start, stop)
    room = terms.times(places, scalars["step"])
    if ragged:
        before = next(total.result for total in thread.totals if total.loop is summed and total.name.endswith("#0"))
        room = places - terms.minimum(before, places)
    else:
        start -= terms.divide(start, scalars["step"])[1]  # pages begin at a page's first slot
    here = both(terms.less(line, scalars["num_lines"]), terms.less(line, scalars["batch"]), terms.equal(split, 0))
    return both(here, some, terms.less(room, stop - start))


LAUNCHES: dict[str, Callable[[Launch], None]] = {
    "translate_loc": translate_loc,
    "cast_loc": cast_loc,
    "patch_map": patch_map,
    "build_read": build_read,
    "store_kv": store_kv,
    "gather_kv": gather_kv,
    "move_kv": move_kv,
    "store_kv_rope": store_kv_rope,
    "store_kv_flashmla": store_kv_flashmla,
    "store_kv_rope_flashmla": store_kv_rope_flashmla,
    "gather_kv_flashmla": gather_kv_flashmla,
}
"""By op. An op without a line is not proved, which is an error."""


def cases(variant: Variant) -> Iterator[Case]:
    """The forms that a launch of `variant` may have."""
    forms: dict[str, tuple[str, ...]] = {}
    if variant.fmt is not None:
        forms["caches"] = ("rows", "pages")
    if variant.op == "move_kv":
        forms["launch"] = ("into the scratch", "out of the scratch")
    for values in itertools.product(*forms.values()):
        yield dict(zip(forms, values, strict=True))
