"""A launch that a kernel can be given: its numbers, its tensors, its grid, and who guarantees each relation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import z3

from portakv.conformance.prove.terms import Condition, Sum, Terms, both, number
from portakv.conformance.prove.threads import Thread
from portakv.formats import FAULT_KINDS, VECTOR_BYTES, Variant
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
                    steps.append(wide if not size.factors else z3.Or(as_z3(self.terms.less(size, 2)), as_z3(wide)))
                    span += self.terms.times(size - 1, stride)
            ways.append(as_z3(both(*steps)))
        return z3.Or(*ways)

    def slots(self, name: str, stride: str, count: Sum, live: tuple[Sum, Sum] | None = None) -> None:
        """A vector of slots. Where stores need distinct ones, `live` bounds those that must be."""
        item = self.variant.index_dtype.itemsize
        self.tensor(name, item, [(count, self.stride(stride, item))])
        if live is not None:
            self.distinct[name] = live
            own = as_z3(self.terms.at_least(self.scalars[stride], 1))
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
        axes = [(tokens, self.stride(f"{name}_token", item, multiple))]
        if heads:
            axes.append((number(heads), self.stride(f"{name}_head", item, multiple)))
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
                relations.append(as_z3(self.terms.equal(a, b)))
            else:
                relations.append(self._nested(lies[k][:inner], apart + spans[1]))
                says = "KVFormat.caches: K and V are the parts of each row or page"
                held = tuple(Relation(as_z3(x), says) for x in relations)
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
            steps.append(z3.Or(as_z3(self.terms.less(size, 2)), as_z3(self.terms.at_least(stride, span))))
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


def as_z3(condition: Condition) -> Condition:
    return z3.BoolVal(True) if condition is True else condition
