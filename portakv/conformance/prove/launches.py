"""What is known of each launch before it runs: its numbers, its tensors, its grid, and who guarantees each relation.

A function a kernel. Everything else is left open: the contents of slot tensors, the size of the pool, the number of
tokens, every stride. A relation that nobody guarantees does not belong here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import z3

from portakv.conformance.prove.launch import (
    MOST_BYTES,
    MOST_LENGTH,
    MOST_PAGE,
    MOST_PLACES,
    MOST_SLOTS,
    MOST_TOKENS,
    Case,
    Launch,
    Relation,
    as_z3,
)
from portakv.conformance.prove.program import Loop
from portakv.conformance.prove.terms import Condition, Sum, both, negate, number
from portakv.conformance.prove.threads import Thread
from portakv.conformance.prove.ttir import Op
from portakv.formats import PAD, Structure, Variant


def _faults(x: Launch, per_token: int, thread: Thread) -> list[tuple[str, Condition]]:
    """A token whose slot lies past the last one counts once. A token of a rope store that has no angle, and would be
    stored, counts too: positions are one or two words, and the second one 0."""
    terms = x.terms
    _, first = x.first_of_token(thread, per_token)
    slot = thread.read("loc")
    bad = terms.at_least(slot, x.scalars["num_slots"])
    if x.variant.rope is not None:
        low, high = thread.read("positions"), thread.read("positions", 1)
        short = z3.Or(as_z3(terms.equal(x.scalars["words"], 1)), as_z3(terms.equal(high, 0)))
        known = both(terms.at_least(low, 0), terms.less(low, x.scalars["num_positions"]), short)
        bad = z3.Or(as_z3(bad), as_z3(both(_stored(x, slot), negate(known))))
    return [("gather_kv" if gathers(x) else "store_kv", both(first, bad))]


def _stored(x: Launch, slot: Sum) -> Condition:
    assert x.variant.fmt is not None
    return both(x.terms.at_least(slot, x.variant.fmt.page_size), x.terms.less(slot, x.scalars["num_slots"]))


def gathers(x: Launch) -> bool:
    return x.variant.op.startswith("gather_kv")


def copy_rows(x: Launch) -> None:
    fmt, dtype = x.variant.fmt, x.variant.dtype
    assert fmt is not None
    assert dtype is not None
    tokens = x.tokens(fmt.num_kv_heads)
    for name, dim in (("k", fmt.head_dim), ("v", fmt.v_head_dim)):
        x.rows(name, tokens, dim, dtype.itemsize, out=gathers(x), heads=fmt.num_kv_heads)
    dims = {"k_cache": ("k", fmt.head_dim), "v_cache": ("v", fmt.v_head_dim)}
    slots = x.caches(dims, fmt.dtype.itemsize, fmt.num_kv_heads)
    x.scales("k_scale", "v_scale")
    _finish_copy(x, tokens, slots, fmt.num_kv_heads)


def copy_flashmla(x: Launch) -> None:
    """A row is a block of a token, or its rope part."""
    fmt, dtype = x.variant.fmt, x.variant.dtype
    assert fmt is not None
    assert dtype is not None
    per_token = x.constants["BLOCKS"] + 1
    tokens = x.tokens(per_token)
    for name, dim in (("k", fmt.head_dim), ("v", fmt.v_head_dim)):
        x.rows(name, tokens, dim, dtype.itemsize, out=gathers(x))
    raw = fmt.raw
    slots = x.caches({"k_cache": ("k", raw.head_dim), "v_cache": ("v", raw.v_head_dim)}, 1, 0)
    _finish_copy(x, tokens, slots, per_token)


def _finish_copy(x: Launch, tokens: Sum, slots: Sum, per_token: int) -> None:
    assert x.variant.fmt is not None
    x.slots("loc", "loc_stride", tokens, None if gathers(x) else (number(x.variant.fmt.page_size), slots))
    if gathers(x):
        x.reserved.clear()
    if x.variant.rope is not None:
        x.angles(tokens, x.variant.fmt.rotated_dim)
    x.faults()
    x.counts = functools.partial(_faults, x, per_token)


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
        x.apart[name] = Relation(as_z3(x.terms.at_least(stride, 1)), "KVWriteLoc, GraphWriteLoc: outputs of their own")
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
    x.apart["out"] = Relation(as_z3(x.terms.at_least(stride, 1)), "cast_write_loc: an output of its own")
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
            x.assume(
                z3.Or(as_z3(terms.equal(count, 0)), as_z3(terms.equal(count, batch))), "launch: all lengths or none"
            )
    line = x.stride("out_stride", out_item)
    if ragged:
        x.tensors["out"] = out_item * places  # a vector that plan_read made, dense
    else:
        x.tensor("out", out_item, [(lines, line), (places, number(1))])
        x.apart["out"] = Relation(as_z3(terms.at_least(line, places)), "plan_read: rows of their own")
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
    # Its first loops take the sequences; those of queries are summed up in one of their own.
    loops = [
        step.op for access in accesses if access.kind == "atomic" for step in access.path if isinstance(step, Loop)
    ]

    # What is wrong with a whole sequence is counted by the first program of the line past the last one: queries that no
    # line is left for, then a row or a length that the table does not have.
    judges = both(terms.equal(line, x.scalars["num_lines"]), terms.equal(split, 0))
    found: list[tuple[str, Condition | None]] = []
    if per_query:
        sequence = _sequence(x, thread, loops[0])
        queries = terms.choose(terms.less(sequence, x.scalars["batch"]), _queries(x, thread, 0, sequence), number(0))
        past = terms.less(x.scalars["num_lines"], _queries_up_to(thread))
        found.append(("build_read", both(judges, past, terms.at_least(queries, 1))))
    sequence = _sequence(x, thread, loops[per_query])
    row = thread.read("rows")
    end = _end(x, thread, 0, sequence)
    known = both(terms.at_least(row, 0), terms.less(row, x.scalars["num_requests"]), terms.at_least(width, end))
    found.append(("build_read", both(judges, terms.less(sequence, x.scalars["batch"]), negate(known))))

    found.append(("build_read", _cut(x, thread, loops[0])))

    # A slot that is read and lies past the end, out of step with its page, or without a peer; a value that is written
    # and does not fit.
    table = next(a for a in accesses if a.kind == "load" and thread.touch(a).pointer.tensor == "table")
    read, slot = thread.touch(table).when, thread.read("table")
    mapped, peer = as_z3(terms.equal(x.scalars["has_mapping"], 1)), thread.read("mapping")
    past, held = as_z3(terms.at_least(slot, slots)), as_z3(terms.at_least(slot, x.scalars["reserved"]))
    has_peer = z3.Or(z3.Not(mapped), as_z3(terms.at_least(peer, 1)))
    value, askew = terms.choose(mapped, peer, slot), z3.BoolVal(False)
    if x.variant.structure is Structure.ROWS:  # pages are rows of every `step`-th slot
        step = x.scalars["step"]
        pages, rest = terms.divide(value, step)
        off = both(negate(terms.equal(step, 1)), terms.at_least(pages, 1), negate(terms.equal(rest, 0)))
        askew = z3.And(as_z3(terms.at_least(slot, 1)), z3.Not(past), has_peer, as_z3(off))
        value = terms.choose(terms.equal(step, 1), value, pages)
    lost = z3.Or(past, askew, z3.And(held, z3.Not(has_peer)))
    found.append(("build_read", both(read, lost)))
    if x.variant.out_index_dtype is torch.int32:
        named = both(terms.at_least(slot, 1), z3.Not(past), z3.Not(askew), has_peer)
        found.append(("cast_loc", both(read, named, negate(terms.fits(value, 32)))))
    return found


def _sequence(x: Launch, thread: Thread, loop: Op) -> Sum:
    """Which sequence a lane of a loop over them takes."""
    return thread.bounds(loop)[3] + thread.lane((x.constants["SEQUENCES"],))[0]


def _length(x: Launch, length: Sum) -> Sum:
    """A length as the kernel takes it: in [0, width + 1]."""
    return x.terms.minimum(x.terms.maximum(length, number(0)), x.scalars["width"] + 1)


def _end(x: Launch, thread: Thread, load: int, sequence: Sum) -> Sum:
    """Where a sequence ends, by its `load`-th loads; past the table too."""
    extra = x.terms.less(sequence, x.scalars["num_extra"])
    end = _length(x, thread.read("seq_lens", load))
    return end + x.terms.choose(extra, _length(x, thread.read("extra_lens", load)), number(0))


def _queries(x: Launch, thread: Thread, load: int, sequence: Sum) -> Sum:
    given = x.terms.less(sequence, x.scalars["num_queries"])
    queries = x.terms.choose(given, _length(x, thread.read("query_lens", load)), number(1))
    return x.terms.minimum(queries, x.scalars["width"])


def _queries_up_to(thread: Thread) -> Sum:
    """Those of all sequences up to a lane's, as the kernel sums them up."""
    ops = list(thread.program.kernel.body.walk())
    (scan,) = (op for op in ops if op.name == "tt.scan")
    (carried,) = (op for op in ops if scan.results[0] in op.operands)
    return thread.integer(carried.results[0], thread.lane(carried.types[-1].shape)).sum


def _cut(x: Launch, thread: Thread, summed: Op) -> Condition:
    """That a line names more than it has room for."""
    terms, scalars = x.terms, x.scalars
    line, split, places = thread.program_id(0), thread.program_id(1), scalars["num_places"]
    # What is summed up of all before the line, by which of the loop's results it is.
    sums = {total.name.rpartition("#")[2]: total.result for total in thread.totals if total.loop is summed}
    per_query, ragged = (x.variant.structure is structure for structure in (Structure.QUERY_ROWS, Structure.RAGGED))
    sequence = sums["0"] if per_query else line
    row = thread.read("rows", 1)
    known = both(terms.at_least(row, 0), terms.less(row, scalars["num_requests"]))
    end = terms.choose(known, terms.minimum(_end(x, thread, 1, sequence), scalars["width"]), number(0))
    queries = _queries(x, thread, per_query or ragged, sequence)
    stop = end - terms.times(scalars["prefix_only"], queries)
    query = end - queries
    if per_query:
        query += line - sums["1"]
        stop = terms.minimum(query + 1, stop)
    start = terms.maximum(query - scalars["window"] + 1, number(0))
    some = terms.less(start, stop)
    room = terms.times(places, scalars["step"])
    if ragged:
        room = places - terms.minimum(sums["0"], places)
    else:
        start -= terms.divide(start, scalars["step"])[1]  # pages begin at a page's first slot
    here = both(terms.less(line, scalars["num_lines"]), terms.less(sequence, scalars["batch"]), terms.equal(split, 0))
    return both(here, some, terms.less(room, stop - start))


LAUNCHES: dict[str, Callable[[Launch], None]] = {
    "translate_loc": translate_loc,
    "cast_loc": cast_loc,
    "patch_map": patch_map,
    "build_read": build_read,
    "move_kv": move_kv,
    **dict.fromkeys(("store_kv", "gather_kv", "store_kv_rope"), copy_rows),
    **dict.fromkeys(("store_kv_flashmla", "gather_kv_flashmla", "store_kv_rope_flashmla"), copy_flashmla),
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
