"""`portakv prove`: what it proves of a few variants of each op, and that it refuses what is broken."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("z3", reason="the extra prove; CI installs it and runs this file again")

from portakv import cli
from portakv.compile import Target
from portakv.conformance import mutations
from portakv.conformance.prove import kernels, mutants, ttir
from portakv.conformance.prove import launch as launch_module
from portakv.conformance.prove.kernels import Subject
from portakv.conformance.prove.launch import Launch
from portakv.conformance.prove.launches import LAUNCHES
from portakv.conformance.prove.program import UnknownOp
from portakv.formats import KVFormat, Structure, Variant
from portakv.kernels._triton import OPS, launch
from portakv.kernels.cuda import kernels as cuda

SM_90 = Target.parse("sm_90")
KINDS = [
    *(op for op in OPS if op != "build_read"),
    *(f"build_read {s.value}" for s in Structure if s.value != "pages"),
]


def variants(kind: str) -> list[Variant]:
    op, _, structure = kind.partition(" ")
    return [v for v in kernels.all_variants() if v.op == op and structure in ("", v.structure and v.structure.value)]


@functools.cache
def subject(kind: str, at: int = 0) -> Subject:
    """The first variant of a kind, or another."""
    return Subject.compile(variants(kind)[at], SM_90)


def problems(of: Subject) -> Iterator[str]:
    return (f"{x.what}: {x.problem}" for x in of.prove() if x.problem)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [0, -1])
def test_a_few_variants_of_each_op_are_proved(kind: str, at: int) -> None:
    assert list(problems(subject(kind, at))) == []


def test_the_list_is_complete() -> None:
    for conformance in (False, True):
        assert set(LAUNCHES) == set(OPS) == {v.op for v in kernels.all_variants(conformance)}


def test_kernels_that_differ_in_data_alone_are_one() -> None:
    def compiled(v_dim: int, dtype: torch.dtype) -> Subject:
        return Subject.compile(Variant("gather_kv", KVFormat(2, 64, v_dim, dtype), dtype, alignment=2), SM_90)

    half = compiled(64, torch.float16)
    assert half.key == compiled(64, torch.bfloat16).key
    assert half.key != compiled(48, torch.float16).key


@pytest.mark.parametrize("kind", ["store_kv", "build_read ragged", "move_kv"])
def test_ttir_is_what_is_compiled(kind: str) -> None:
    (variant, *_), plain = variants(kind), functools.partial(re.sub, r" loc\(.*|#loc.*\n?", "")
    whole = cuda.LAUNCHER.compile(variant, SM_90.triton()).asm["ttir"]
    assert plain(cuda.LAUNCHER.compile_ttir(variant, SM_90.triton())) == plain(whole)


# Controls: what must be refused is.


def relaunched(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[[Launch], None]) -> None:
    """Let a launch of `op` be declared otherwise."""
    declare = LAUNCHES[op]

    def changed(launch: Launch) -> None:
        declare(launch)
        change(launch)

    monkeypatch.setitem(LAUNCHES, op, changed)


SPARE = {("gather_kv_flashmla", "v_cache"): "the last of a token's eight bytes of scales is padding"}
"""Tensors whose last byte nobody touches, beside the fault counter, which has room for every kind."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_one_byte_shorter_is_refuted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = subject(kind)
    for tensor, uses in ((x, re.findall(rf"%{x}\b", of.text)) for x in of.arguments):
        # One that is named once is not used, as the scales of a pool that has none.
        if len(uses) < 2 or f"%{tensor}: !tt.ptr" not in of.text or (kind, tensor) in SPARE or tensor == "faults":
            continue
        with monkeypatch.context() as patch:
            relaunched(patch, of.variant.op, functools.partial(shorten, tensor))
            assert any("stays inside: refuted" in x for x in problems(of)), tensor


def shorten(tensor: str, launch: Launch) -> None:
    launch.tensors[tensor] -= 1


@pytest.mark.parametrize("kind", ["store_kv", "gather_kv", "move_kv", "store_kv_flashmla"])
def test_more_rows_than_the_launchers_take_overflow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "MOST_ROWS", 2 * launch_module.MOST_ROWS)
    assert any("refuted" in x for x in problems(subject(kind)))


@pytest.mark.parametrize("kind", ["store_kv", "store_kv_rope", "move_kv", "store_kv_flashmla", "patch_map"])
def test_a_slot_twice_is_written_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = subject(kind)
    relaunched(monkeypatch, of.variant.op, lambda launch: launch.distinct.clear())
    assert any("write different bytes: refuted" in x for x in problems(of))


@pytest.mark.parametrize("op", mutations.find("a 32-bit offset").text)
def test_an_offset_cut_to_32_bits_is_refuted(op: str) -> None:
    """On its way, that is: what reaches a pointer has 64 bits again, or the kernel would not compile."""
    variant = next(v for v in variants(op) if v.index_dtype is torch.int64)
    source = mutations.BrokenLauncher(SM_90, mutations.find("a 32-bit offset")).source(variant, 32)
    of = Subject.of(variant, source, launch.compile_ttir(source, SM_90.triton()))
    assert any("stays inside: refuted" in x for x in problems(of))


ROTATED = "which values are rotated is data: both ways lie inside"
COUNTED = (
    "whose lengths count is data: the places of two lines are apart whatever they are, and those between are padding"
)
SURVIVORS = {
    "store_kv_rope": {"ne, %interleaved, %c0_i64": ROTATED},
    "store_kv_rope_flashmla": {"ne, %interleaved, %rope": ROTATED},
    "build_read ragged": {"sge, %row, %cst": COUNTED, "slt, %row, %known": COUNTED},
    "build_read query_rows": {
        "sle, %ends, %passed": "a line of the sequence before or behind reads inside as well",
        "slt, %block, %queries": "equivalent: one sequence more, behind all; but sums are known by their bounds alone",
    },
}
"""Comparisons that may be weakened and nothing is refuted, though for all the prover knows accesses change, and why."""


@functools.cache
def weakened(kind: str) -> list[mutants.Mutant]:
    return list(mutants.weaken_each(subject(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_weakened_comparisons_are_refuted(kind: str) -> None:
    found = weakened(kind)
    # Compilers number the values that share a name.
    lines = [re.sub(r"_\d+\b", "", x.line.removeprefix("arith.cmpi ").partition(" : ")[0]) for x in found]
    survived = [line for line, x in zip(lines, found, strict=True) if x.outcome == "survived"]
    assert sorted(survived) == sorted(SURVIVORS.get(kind, {}))
    assert sum(x.outcome == "refuted" for x in found) >= 2


def test_of_weakened_comparisons_that_are_not_equivalent_most_are_refuted() -> None:
    found = [x.outcome for kind in KINDS for x in weakened(kind)]
    assert found.count("refuted") >= 0.95 * (len(found) - found.count("equivalent"))


def test_what_is_weakened_holds_in_one_case_more() -> None:
    kernel = ttir.parse(subject("store_kv").text)
    compared = [op for op in kernel.body.walk() if op.name == "arith.cmpi"]
    before = [op.predicate for op in compared]
    for op in compared:
        mutants.weaken(op)
    assert [op.predicate.rstrip(",") for op in compared] == [mutants.WEAKENED[x.rstrip(",")] for x in before]


@pytest.mark.parametrize(
    ("known", "strange"),
    [("arith.muli", "arith.mului"), ("tt.load", "tt.descriptor_load"), ("slt,", "ult,")],
)
def test_an_op_without_a_meaning_is_an_error_by_name(known: str, strange: str) -> None:
    of = subject("store_kv")
    with pytest.raises(UnknownOp, match=strange.rstrip(",")):
        list(Subject.of(of.variant, cuda.LAUNCHER.source(of.variant, 32), of.text.replace(known, strange)).prove())


# The command.


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["prove", *args])
    return result.exit_code, result.output


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [Variant("patch_map"), *variants("cast_loc")]
    monkeypatch.setattr(kernels, "all_variants", lambda _: few)
    code, out = invoke("--json")
    kinds = json.loads(out)["kernels"]
    assert code == 0
    assert [x["op"] for x in kinds] == [v.op for v in few]
    assert all(x["proved"] > 3 and not x["problems"] for x in kinds)


def test_the_command_names_what_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "all_variants", lambda _: [Variant("store_kv_packed")])
    code, out = invoke()
    assert code == 1
    assert "store_kv_packed" in out


def test_without_z3_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [x for x in sys.modules if x.startswith("portakv.conformance.prove")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "z3", None)
    code, out = invoke()
    assert code == 2
    assert "pip install 'portakv[prove]'" in out
