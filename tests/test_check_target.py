"""`portakv check --target`: compiled code, executed without its hardware, is judged as a device's kernels are.

The whole suite is in `.ci/run`; here is a little of each of its lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from portakv import check, cli, dispatch, testing
from portakv.compile import Target
from portakv.conformance import compiled, far, mutations
from portakv.conformance.executors.errors import OutsideAllocation
from portakv.formats import INDEX_DTYPES
from portakv.kernels import _triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

TARGETS = ("sm_90", "gfx942")


def invoke(*args: str) -> tuple[int, dict, str]:
    result = CliRunner().invoke(cli.app, ["check", "--json", "--jobs", "1", *args])
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {}, result.stderr


def keep(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[compiled.Task], bool]) -> None:
    every = compiled.tasks
    monkeypatch.setattr(compiled, "tasks", lambda *args: [task for task in every(*args) if wanted(task)])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", _triton.OPS)
def test_cases_are_equal(target: str, op: str) -> None:
    cases = [case for case in compiled.cases_of(op) if case.tokens > 1][::40]
    assert compiled.check_cases(target, op, cases) == len(cases) > 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_kernel_broken_on_purpose_is_caught(target: str, mutation: mutations.Mutation) -> None:
    ops = [op for one, op in compiled.broken(Target.parse(target)) if one is mutation]
    assert ops
    for op in ops:
        assert compiled.check_mutation(target, mutation.name, op) == 1


def test_every_op_is_broken() -> None:
    broken = list(compiled.broken(Target.parse("sm_90")))
    assert {op for _, op in broken} == set(_triton.OPS)
    masks = {op for mutation, op in broken if mutation.name == "a missing mask"}
    assert masks == set(_triton.OPS)
    # cast_loc adds no slot to an address.
    offsets = {op for mutation, op in broken if mutation.name == "a 32-bit offset"}
    assert offsets == set(_triton.OPS) - {"cast_loc"}


def test_a_mutation_that_does_nothing_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are right are not said to be caught."""
    same = replace(mutations.find("writes the reserved page"), value=lambda reserved: reserved)
    monkeypatch.setattr(mutations, "MUTATIONS", (same,))
    few = [case for case in testing.cases("store_kv_flashmla") if case.tokens >= 7][:3]
    monkeypatch.setattr(compiled, "cases_of", lambda op: few)
    with pytest.raises(AssertionError, match="store_kv_flashmla writes the reserved page, and none of"):
        compiled.check_mutation("sm_90", same.name, "store_kv_flashmla")
    with pytest.raises(ValueError, match="expected 'no such text'"):
        mutations._rewrite(_triton.cast_loc.kernel, "no such text", "")


def test_lines_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One task of each line passes, and its cases are counted."""
    seen: set[tuple[str, str]] = set()

    def first(task: compiled.Task) -> bool:
        key = (task.target, task.line)
        return "broken" not in task.line and not (key in seen or seen.add(key))

    keep(monkeypatch, first)
    code, shown, _ = invoke("--target", "sm_90")
    assert code == 0
    assert shown["passed"]
    assert shown["unavailable"] == {}
    assert shown["versions"]["triton"]
    lines = [outcome["op"] for outcome in shown["outcomes"]]
    extra = ["every 16-bit pattern", "rows past 2^32", "graph buffers filled inside", "warps in random order"]
    assert lines == [*_triton.OPS, *extra]
    for outcome in shown["outcomes"]:
        assert outcome["row"] == "sm_90"
        assert outcome["cases"] == outcome["total"] > 0


def test_every_case_and_format_is_a_task() -> None:
    cases = {op: len(compiled.cases_of(op)) for op in _triton.OPS}
    for target in TARGETS:
        listed = compiled.tasks(Target.parse(target))
        assert {op: sum(t.cases for t in listed if t.line == op) for op in cases} == cases
        assert sum(t.cases for t in listed if t.line == "every 16-bit pattern") == 7 * 3 * 4
    few = compiled.tasks(Target.parse("sm_90"), every=50)
    assert sum(t.cases for t in few if t.line == "build_read") == cases["build_read"]  # it knows no format
    assert 0 < sum(t.cases for t in few if t.line == "store_kv") <= 4


def test_a_wrong_kernel_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own target and line; the others still run."""

    def wrong(target: str, op: str, cases: object) -> int:
        raise OutsideAllocation("st.global.b32 [%rd1], %r1: 4 bytes at 0x10")

    every = compiled.tasks(Target.parse("sm_90"))
    good = next(task for task in every if task.line == "patch_map")
    bad = replace(good, target="sm_80", line="cast_loc", check=lambda: wrong("sm_80", "cast_loc", ()))
    monkeypatch.setattr(compiled, "tasks", lambda target, _: [good] if target.name == "sm_90" else [bad])
    code, shown, err = invoke("--target", "sm_90,sm_80", "--target", "sm_90")
    assert code == 1
    assert not shown["passed"]
    assert "mismatch" in err
    results = {(o["op"], o["row"]): (o["result"], o["detail"]) for o in shown["outcomes"]}
    assert results == {
        ("patch_map", "sm_90"): ("passed", ""),
        ("cast_loc", "sm_80"): ("failed", "OutsideAllocation: st.global.b32 [%rd1], %r1: 4 bytes at 0x10"),
    }


def test_what_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, lambda task: task.line == "patch_map")
    code, shown, err = invoke("--target", "sm_90,pvc")
    assert code == 1
    assert shown["passed"]
    assert list(shown["unavailable"]) == ["pvc"]
    assert "pvc was not executed: triton" in err
    missing = dataclasses.replace(
        dispatch.HIP.gpu, executor=("portakv.conformance.executors.no_such_executor", "amdgcn")
    )
    monkeypatch.setattr(dispatch, "DEVICES", (dataclasses.replace(dispatch.HIP, gpu=missing),))
    code, _, err = invoke("--target", "gfx942")
    assert code == 2
    assert "gfx942 was not executed: portakv.conformance.executors.no_such_executor is not installed" in err
    monkeypatch.undo()
    assert invoke("--target", "a100")[0] == 2
    assert invoke("--target", "sm_90", "--device", "cpu")[0] == 2


def test_far_rows_are_compared_whole() -> None:
    """A kernel that writes beside its row, or keeps 32 bits of its offset, is noticed."""
    case = far.choose(compiled.cases_of("store_kv"))[0]
    from portakv.kernels.reference import rows as reference

    def beside(*args) -> None:
        reference.store_kv(*args)
        k_cache = args[2]
        k_cache.as_strided((1,), (1,), k_cache.storage_offset() + k_cache.stride(0) * 2 - 1).view(torch.uint8).fill_(3)

    far.check("store_kv", reference.store_kv, case)
    with pytest.raises(check.Mismatch, match="entry"):
        far.check("store_kv", beside, case)
    assert {case.variant.index_dtype for case in far.choose(compiled.cases_of("store_kv"))} == set(INDEX_DTYPES)


def test_the_library_imports_nothing_of_it() -> None:
    import subprocess
    import sys

    code = "import sys, portakv, portakv.check, portakv.cli; print([m for m in sys.modules if 'conformance' in m])"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == "[]"
