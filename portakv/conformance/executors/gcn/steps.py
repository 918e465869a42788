"""From an instruction to what it does to `Waves`: operands read, an opcode of `arithmetic` applied, results written."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from portakv.conformance.executors.errors import UnknownInstruction
from portakv.conformance.executors.gcn.accesses import access
from portakv.conformance.executors.gcn.arithmetic import PACKED, SATURATED, SCALAR, VECTOR, Op, combine
from portakv.conformance.executors.gcn.assembly import EXEC, VCC, Instruction, Listing, Operand
from portakv.conformance.executors.gcn.lanes import DPP_MODIFIERS, LANES, MODIFIERS, Dpp, merge_sdwa, select_sdwa
from portakv.conformance.executors.gcn.waves import (
    Array,
    Reader,
    Step,
    Waves,
    read_scalar,
    read_vector,
    view,
    write_lanes,
    write_scalar,
    write_vector,
)

IGNORED = {"s_nop", "s_clause", "s_delay_alu", "s_sendmsg", "s_sleep", "s_setprio", "s_set_inst_prefetch_distance"}
IGNORED |= {"buffer_inv", "buffer_wbl2", "buffer_wbinvl1", "buffer_wbinvl1_vol", "buffer_gl0_inv", "buffer_gl1_inv"}
IGNORED |= {"global_inv", "global_wb", "global_wbinv"}
"""Instructions for the hardware's timing and its caches, which this memory has not; waits (s_wait…) are ignored too."""


def compile_step(i: Instruction, listing: Listing) -> Step | None:
    """What the instruction does to the waves in focus; None if it is for timing only."""
    try:
        if i.second is not None:
            return _compile_dual(i, i.second, listing)
        if i.name in IGNORED or i.name.startswith("s_wait") or i.name == "s_barrier_signal":
            return None
        if i.name in LANES:
            _expect(i, MODIFIERS.get(i.name, set()))
            return LANES[i.name](i)
        if i.name in SCALAR:
            return _compile_scalar(i)
        if "saveexec" in i.name:
            return _compile_saveexec(i)
        if i.name in PACKED or i.name == "v_pk_mov_b32":
            return _compile_packed(i)
        if i.name in VECTOR:
            compute, write = _compile_vector(i, listing)
            return lambda m: write(m, compute(m))
        step = access(i)
    except (ValueError, IndexError, KeyError) as e:
        raise UnknownInstruction(f"{i.text}: {e}") from e
    except UnknownInstruction as e:
        raise UnknownInstruction(f"{i.text}: {e}") from None
    if step is None:
        raise UnknownInstruction(i.text)
    return step


def _expect(i: Instruction, allowed: set[str] | frozenset[str]) -> None:
    unknown = set(i.modifiers) - allowed
    if unknown:
        raise UnknownInstruction(f"modifiers {sorted(unknown)}")


def _compile_scalar(i: Instruction) -> Step:
    op = SCALAR[i.name]
    _expect(i, set())
    stored = [kind for kind in op.results if kind != "scc"]
    operands = list(i.operands)
    targets = [operands.pop(0) for _ in stored]
    reads: list[Reader] = []
    for kind in op.sources:
        if kind == "scc":
            reads.append(_read_condition)
        elif kind[0] == "=":
            reads.append(read_scalar(targets[0], kind[1:]))
        else:
            reads.append(read_scalar(operands.pop(0), kind))
    if operands:
        raise UnknownInstruction("too many operands")
    write = write_scalar(targets[0], stored[0]) if stored else None
    name, tested = view(stored[0]) if stored else "", "scc" in op.results

    def step(m: Waves) -> None:
        result = op.compute(*(read(m) for read in reads))
        if not tested:
            assert write is not None
            write(m, result.astype(name, copy=False))
            return
        if write is not None:
            result, scc = result
            write(m, result.astype(name, copy=False))
            m.scc[m.at] = scc
        else:
            m.scc[m.at] = result

    return step


def _read_condition(m: Waves) -> Array:
    return np.asarray(m.scc[m.at])


def _and_not(a: Array, b: Array) -> Array:
    return a & ~b


_SAVEEXEC: dict[str, Callable[[Array, Array], Array]] = {
    "s_and": operator.and_,
    "s_or": operator.or_,
    "s_xor": operator.xor,
    "s_andn2": _and_not,
    "s_and_not1": _and_not,
}


def _compile_saveexec(i: Instruction) -> Step:
    """The result gets exec; exec becomes source OP exec."""
    verb, _, bits = i.name.partition("_saveexec_")
    target, source = i.operands
    if verb not in _SAVEEXEC or i.modifiers:
        raise UnknownInstruction("unknown")
    combine, kind = _SAVEEXEC[verb], f"b{bits[1:]}"
    read, write = read_scalar(source, kind), write_scalar(target, kind)

    def step(m: Waves) -> None:
        old = m.mask(EXEC).copy()
        new = combine(read(m), old)
        write(m, old)
        m.set_mask(EXEC, new)
        m.scc[m.at] = new != 0

    return step


Values = tuple[Array, ...]


def _compile_vector(
    i: Instruction, listing: Listing
) -> tuple[Callable[[Waves], Values], Callable[[Waves, Values], None]]:
    """What computes the results, and what writes them."""
    op = VECTOR[i.name]
    allowed: set[str] = {"clamp"} if i.name in SATURATED else set()
    compute: Callable[..., Any] = SATURATED[i.name] if "clamp" in i.modifiers and i.name in SATURATED else op.compute
    dpp = None
    if i.encoding.endswith("dpp"):
        allowed |= DPP_MODIFIERS
        dpp = Dpp(i.modifiers, listing.lanes)
    if i.encoding == "sdwa":
        allowed |= {"dst_sel", "dst_unused", "src0_sel", "src1_sel"}
    if i.name.startswith("v_bitop3"):
        allowed.add("bitop3")
        compute = functools.partial(combine, table=int(i.modifiers["bitop3"], 0))
    halves = _halves(i, op)
    allowed |= {"op_sel"} if halves else set()
    _expect(i, allowed)
    operands = list(i.operands)
    targets = [operands.pop(0) if kind != "exec" else Operand("s", EXEC, listing.lanes // 32) for kind in op.results]
    if i.name == "v_cndmask_b32" and i.encoding == "dual":
        operands.append(Operand("s", VCC, listing.lanes // 32))  # RDNA's dual form names it not
    reads = []
    for n, kind in enumerate(op.sources):
        operand = targets[0] if kind[0] == "=" else operands.pop(0)
        if halves and kind != "mask":
            operand = _with_half(operand, halves[n])
        reads.append(_read_source(operand, kind.removeprefix("="), n, i, dpp))
    if operands:
        raise UnknownInstruction("too many operands")
    if halves:
        targets[0] = _with_half(targets[0], halves[-1])
    # A VOP3 instruction with op_sel keeps the other half on CDNA too.
    keep = listing.generation > 9 or bool(halves) or i.name == "v_bitop3_b16"
    write_each = [_write_result(target, kind, keep, i, dpp) for target, kind in zip(targets, op.results, strict=True)]
    names = ["" if kind in ("mask", "exec") else view(kind) for kind in op.results]
    single = len(write_each) == 1

    def values(m: Waves) -> Values:
        results = compute(*(read(m) for read in reads))
        results = (results,) if single else results
        return tuple(x.astype(name, copy=False) if name else x for x, name in zip(results, names, strict=True))

    def write(m: Waves, results: Values) -> None:
        for put, result in zip(write_each, results, strict=True):
            put(m, result)

    return values, write


def _halves(i: Instruction, op: Op) -> list[str]:
    """`op_sel`: which half each 16-bit source, and last the result, means."""
    if "op_sel" not in i.modifiers:
        return []
    if op.results[0][1:] != "16" or any(kind[1:] != "16" for kind in op.sources):
        raise UnknownInstruction("op_sel of operands that have no halves")
    bits = i.modifiers["op_sel"].strip("[]").split(",")
    if len(bits) != len(op.sources) + 1:
        raise UnknownInstruction("op_sel")
    return ["h" if bit == "1" else "l" for bit in bits]


def _with_half(x: Operand, half: str) -> Operand:
    return x if x.kind not in ("v", "s") else Operand(x.kind, x.index, x.count, 0, "", half, x.negate, x.absolute)


def _read_source(operand: Operand, kind: str, n: int, i: Instruction, dpp: Dpp | None) -> Reader:
    if kind == "mask":
        return read_vector(operand, kind)
    if dpp is not None and n == 0:
        if kind[1:] != "32" or operand.negate or operand.absolute:
            raise UnknownInstruction(f"DPP of {kind}")
        raw, name = dpp.read(read_vector(operand, "u32")), view(kind)
        return lambda m: raw(m).view(name)
    if i.encoding == "sdwa":
        plain = Operand(operand.kind, operand.index, operand.count, operand.value)
        if operand.negate or operand.absolute:
            raise UnknownInstruction("sign modifier with SDWA")
        raw, name = select_sdwa(read_vector(plain, "u32"), i.modifiers[f"src{n}_sel"], operand), view(kind)
        if kind[1:] == "16":
            return lambda m: raw(m).astype(np.uint16).view(name)
        return lambda m: raw(m).view(name)
    if operand.extend:
        raise UnknownInstruction("sext() without SDWA")
    return read_vector(operand, kind)


def _write_result(
    target: Operand, kind: str, keep: bool, i: Instruction, dpp: Dpp | None
) -> Callable[[Waves, Array], None]:
    if kind in ("mask", "exec"):
        if dpp is not None and not (i.modifiers.get("bound_ctrl") == "1" and i.modifiers.get("row_mask") == "0xf"):
            raise UnknownInstruction("DPP that leaves bits of a mask out")
        return write_lanes(target)
    write = write_vector(target, kind, keep)
    if dpp is not None:
        return lambda m, value: write(m, value, dpp.writes(m))
    select = i.modifiers.get("dst_sel", "DWORD")
    if select != "DWORD":
        whole, unused = write_vector(target, "u32", True), i.modifiers["dst_unused"]

        def merged(m: Waves, value: Array) -> None:
            bits = value.view(f"u{value.itemsize}").astype(np.uint32)
            whole(m, merge_sdwa(bits, m.v[target.index][m.at], select, unused), m.active)

        return merged
    return lambda m, value: write(m, value, m.active)


def _compile_dual(x: Instruction, y: Instruction, listing: Listing) -> Step:
    """VOPD of RDNA: both read before either writes."""
    if x.name not in VECTOR or y.name not in VECTOR:
        raise UnknownInstruction("dual form")
    first, put_first = _compile_vector(x, listing)
    second, put_second = _compile_vector(Instruction(y.name, "dual", y.operands, y.modifiers, y.text), listing)

    def step(m: Waves) -> None:
        a, b = first(m), tuple(value.copy() for value in second(m))
        put_first(m, a)
        put_second(m, b)

    return step


def _bits(i: Instruction, name: str, default: int) -> list[int]:
    """A modifier with a bit for each source."""
    given = i.modifiers.get(name)
    return [default] * (len(i.operands) - 1) if given is None else [int(x) for x in given.strip("[]").split(",")]


def _compile_packed(i: Instruction) -> Step:
    """VOP3P on pairs: `op_sel` says which half of each source makes the low result, `op_sel_hi` the high one."""
    target, *sources = i.operands
    if target.kind != "v" or target.count != 2:
        raise UnknownInstruction("result")
    if i.name == "v_pk_mov_b32":
        return _compile_packed_move(i)
    _expect(i, {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"})
    halves = [
        [_read_half(*x, "f32") for x in zip(sources, _bits(i, select, n), _bits(i, negate, 0), strict=True)]
        for n, (select, negate) in enumerate((("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi")))
    ]
    compute = PACKED[i.name]

    def step(m: Waves) -> None:
        results = [compute(*(read(m) for read in half)) for half in halves]
        for n, result in enumerate(results):
            m.put(target.index + n, result.view(np.uint32), m.active)

    return step


def _compile_packed_move(i: Instruction) -> Step:
    """Each source makes one result, of the half that its bit of `op_sel` says."""
    _expect(i, {"op_sel"})
    target, *sources = i.operands
    chosen = [_read_half(x, half, 0, "u32") for x, half in zip(sources, _bits(i, "op_sel", 0), strict=True)]

    def step(m: Waves) -> None:
        for n, value in enumerate([half(m).copy() for half in chosen]):
            m.put(target.index + n, value, m.active)

    return step


def _read_half(operand: Operand, half: int, negate: int, kind: str) -> Reader:
    if operand.kind in ("v", "s"):
        if operand.count != 2 or operand.negate or operand.absolute:
            raise UnknownInstruction("source that is no pair")
        return read_vector(Operand(operand.kind, operand.index + half, 1, negate=bool(negate)), kind)
    if half:
        raise UnknownInstruction("high half of a constant")
    return read_vector(operand, kind)
