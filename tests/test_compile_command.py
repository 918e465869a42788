"""`portakv compile`: what is compiled for which GPU, what the command prints, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import triton
from typer.testing import CliRunner, Result

from portakv import cli, costs, dispatch
from portakv import compile as compilation
from portakv.compile import COLUMNS, FORMATS, TARGETS, Report, Target
from portakv.formats import INDEX_DTYPES, KVFormat, Layout, list_variants
from portakv.layers import LayerSpec

Invoke = Callable[..., Result]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def invoke() -> Invoke:
    return lambda *args: CliRunner().invoke(cli.app, ["compile", *(str(arg) for arg in args)])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Target]]:
    """What is asked of the compiler, which is not run: its every report is fine."""
    asked: list[tuple[Any, Target]] = []

    def compile_all(targets: Any, formats: Any, on_report: Any) -> list[Report]:
        asked.extend((tuple(formats), target) for target in targets)
        return [Report("move_kv", "any", target.name, (), 40, 0, 0, True, 0.5) for target in targets]

    monkeypatch.setattr(compilation, "compile_all", compile_all)
    return asked


def test_compiles_every_variant_in_processes(invoke: Invoke) -> None:
    result = invoke("--target", "sm_90", "--format", "2x20x12:bfloat16:4", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["versions"]["triton"] == triton.__version__
    variants = list_variants([KVFormat(2, 20, 12, torch.bfloat16, 4)])
    assert [kernel["op"] for kernel in shown["kernels"]] == [variant.op for variant in variants]
    assert len({(kernel["op"], kernel["variant"]) for kernel in shown["kernels"]}) == len(variants)
    for kernel in shown["kernels"]:
        assert kernel["ok"]
        assert kernel["target"] == "sm_90"
        assert kernel["spills"] == kernel["local_bytes"] == 0
        assert kernel["registers"] > 0


def test_a_failure_exits_with_1_and_is_named(invoke: Invoke) -> None:
    result = invoke("--target", "sm_35", "--format", "1x1:float32")  # older than any that ptxas knows
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == len(list_variants([KVFormat(1, 1, 1, torch.float32)]))
    assert lines[0].startswith("portakv: sm_35 translate_loc int32 to int32: ")
    assert f"0/{len(lines)}" in result.stdout


def test_a_backend_that_is_missing_is_said_on_one_line(
    invoke: Invoke, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends import backends

    monkeypatch.delitem(backends, "amd")
    result = invoke("--target", "sm_90,gfx942", "--target", "sm_80")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"portakv: gfx942 was not compiled: triton {triton.__version__} has no backend for hip")
    assert [target.name for _, target in compiled] == ["sm_90", "sm_80"]
    assert invoke("--target", "gfx90a").exit_code == 2


def test_without_targets_takes_those_there_are_backends_for(invoke: Invoke, compiled: list[Any]) -> None:
    from triton.backends import backends

    result = invoke("--json")
    assert result.exit_code == 0
    builds = {"cuda": "nvidia", "hip": "amd", "xpu": "intel"}
    expected = [name for name in TARGETS if builds[Target.parse(name).gpu.backend] in backends]
    assert [target.name for _, target in compiled] == expected
    assert set(json.loads(result.stdout)["unavailable"]) == set(TARGETS) - set(expected)
    assert {formats for formats, _ in compiled} == {FORMATS}


def test_the_formats_reach_every_op_under_both_slot_widths_and_are_few() -> None:
    """A core takes 0.4 s for a variant, and `.ci/run` has under two minutes on two for four targets."""
    variants = list_variants(FORMATS)
    assert len(variants) <= 120
    ops = {op for op in dispatch.OPS if dispatch.rows(op, dispatch.CUDA)[0].name == "triton"}
    reached = {(variant.op, variant.index_dtype) for variant in variants}
    assert reached == {(op, dtype) for op in ops for dtype in INDEX_DTYPES} - {("patch_map", torch.int32)}


@pytest.mark.parametrize("bad", ["sm_9", "gfx", "a100", "", "sm_90;"])
def test_refuses_what_is_no_target(bad: str, invoke: Invoke) -> None:
    result = invoke("--target", bad)
    assert result.exit_code == 2
    printed = " ".join(result.stderr.split())
    assert "target: expected one of ['sm_80', " in printed
    assert f"or another of their kinds, got {bad!r}" in printed


@pytest.mark.parametrize(
    "bad",
    [
        *("8x128", "8x128:int8", "0x8:float32", "8x128:float32:0", "8:float32", "8x-1:float32"),
        *("8x128:bfloat16:cpu_vec", "1x512x64:bfloat16:MLA", "1x512x64:bfloat16:mla:16", "8x128:bfloat16:16:"),
    ],
)
def test_refuses_what_is_no_format(bad: str, invoke: Invoke) -> None:
    result = invoke("--format", bad)
    assert result.exit_code == 2
    assert "format: expected HEADSxDIM[xVDIM]:DTYPE[:PAGE][:LAYOUT]" in result.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "fmt"),
    [
        ("8x128:bfloat16", KVFormat(8, 128, 128, torch.bfloat16)),
        ("6x192x128:float8_e5m2:16:rows", KVFormat(6, 192, 128, torch.float8_e5m2, 16)),
        ("1x512x64:bfloat16:mla", KVFormat(1, 512, 64, torch.bfloat16, 1, Layout.MLA)),
        ("1x448x64:float8_e4m3fn:64:flashmla", KVFormat(1, 448, 64, torch.float8_e4m3fn, 64, Layout.FLASHMLA)),
        ("1x512x64:float8_e4m3fn:flashmla_v32", KVFormat(1, 512, 64, torch.float8_e4m3fn, 1, Layout.FLASHMLA_V32)),
    ],
)
def test_takes_the_layouts_that_gpus_read(text: str, fmt: KVFormat, invoke: Invoke, compiled: list[Any]) -> None:
    assert invoke("--target", "sm_90", "--format", text).exit_code == 0
    assert compiled == [((fmt,), Target.parse("sm_90"))]


@pytest.mark.parametrize(
    ("unstorable", "problem"),
    [
        ("2x512x64:bfloat16:mla", "num_kv_heads: expected 1 of an MLA layer, got 2"),
        ("1x512:bfloat16:mla", "v_head_dim: expected the dim of an MLA layer's rope part, got None"),
        ("1x512x64:float8_e4m3fn:64:flashmla", "got dims 512 and 64 instead of (448, 64)"),
        ("1x512x64:bfloat16:flashmla_v32", "got torch.bfloat16 instead of torch.float8_e4m3fn"),
    ],
)
def test_refuses_what_no_pool_can_store(unstorable: str, problem: str, invoke: Invoke) -> None:
    result = invoke("--format", unstorable)
    assert result.exit_code == 2
    assert problem in " ".join(result.stderr.split())


def test_refuses_the_interpreter(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = invoke("--target", "sm_90")
    assert result.exit_code == 2
    assert "TRITON_INTERPRET" in result.stderr


def test_without_triton(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("triton.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    result = invoke("--target", "sm_90")
    assert result.exit_code == 2
    assert result.stderr == "portakv: sm_90 was not compiled: triton is not installed\n"


def test_takes_the_formats_of_a_checkpoint(invoke: Invoke, compiled: list[Any], tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, num_key_value_heads=2, head_dim=16)
    config.save_pretrained(tmp_path)
    options = ("--dtype", "float8_e5m2", "--page-size", 4)
    assert invoke("--target", "sm_90", "--model", tmp_path, *options).exit_code == 0
    ((formats, _),) = compiled
    assert formats == (KVFormat(2, 16, 16, torch.float8_e5m2, 4),)
    assert "dtype: expected" in invoke("--model", tmp_path, "--dtype", "int4").stderr


def test_layers_of_two_shapes_make_two_formats() -> None:
    layers = [LayerSpec(None, 8, 64), LayerSpec(128, 4, 64, 32), LayerSpec(None, 4, 64, 32), LayerSpec(None, 8, 64)]
    formats = compilation.model_formats(layers, "bfloat16", 16)
    assert set(formats) == {KVFormat(8, 64, 64, torch.bfloat16, 16), KVFormat(4, 64, 32, torch.bfloat16, 16)}
    assert len(formats) == 2


def test_waves_are_of_64_lanes_on_cdna_only() -> None:
    lanes = {name: Target.parse(name).lanes for name in TARGETS}
    assert {name for name, count in lanes.items() if count == 64} == {"gfx90a", "gfx942", "gfx950"}
    assert set(lanes.values()) == {64, 32}
    assert {Target.parse(name).gpu for name in TARGETS} == {dispatch.CUDA.gpu, dispatch.HIP.gpu, dispatch.XPU.gpu}


PAGE = f"before\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n{{}}\nafter\n"


def _row(target: str, version: str) -> str:
    return f"| {' | '.join((target, version, *('0',) * (len(COLUMNS) - 2)))} |\n"


def test_updates_only_the_rows_of_its_targets(invoke: Invoke, compiled: list[Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(_row("sm_90", "old") + _row("pvc", "old")))
    assert invoke("--target", "sm_90,gfx942", "--markdown", page).exit_code == 0
    before, _, table = page.read_text().partition(f"|{'---|' * len(COLUMNS)}\n")
    rows = table.removesuffix("\nafter\n").splitlines()
    assert before.startswith("before\n")
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| sm_90", triton.__version__],
        ["| gfx942", triton.__version__],
        ["| pvc", "old"],
    ]
    assert rows[0] == f"| sm_90 | {triton.__version__} | 1/1 | 40 | 0 | 0 | 1/1 |"


def test_refuses_a_page_without_the_table(invoke: Invoke, compiled: list[Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    result = invoke("--target", "sm_90", "--markdown", page)
    assert result.exit_code == 2
    assert page.read_text() == "nothing\n"


def test_summary_takes_the_worst_and_counts_the_failed() -> None:
    good = Report("move_kv", "a", "gfx942", (), 40, 0, 0, True)
    bad = dataclasses.replace(good, problems=("spills",), registers=200, spills=7, local_bytes=64, vectors=False)
    silent = Report("cast_loc", "b", "pvc", ())
    version = triton.__version__
    assert list(compilation.summarize([good, silent, bad])) == [
        ("gfx942", version, "1/2", "200", "7", "64", "1/2"),
        ("pvc", version, "1/1", "–", "–", "–", "0/0"),
    ]


def test_the_page_lists_every_target() -> None:
    page = (ROOT / "docs/kernels.md").read_text()
    header = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    rows = page.partition(header)[2].split("\n\n")[0].splitlines()
    assert tuple(row.split(" | ")[0].strip("| ") for row in rows) == TARGETS
    for row in rows:
        ok, _, total = row.split(" | ")[2].partition("/")
        assert ok == total == str(len(list_variants(FORMATS)))


COSTS = ROOT / "docs/costs.tsv"
SMALL = ("--target", "sm_90,gfx942", "--format", "1x16:float32")
SMALL_FORMATS = [KVFormat(1, 16, 16, torch.float32)]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Of a few variants on two targets, compiled once."""
    return compilation.compile_all([Target.parse("sm_90"), Target.parse("gfx942")], SMALL_FORMATS, processes=1)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch, reports: list[Report]) -> None:
    """What is compiled gives these reports again."""

    def compile_all(targets: Any, formats: Any, on_report: Any) -> list[Report]:
        return [report for report in reports if report.target in {target.name for target in targets}]

    monkeypatch.setattr(compilation, "compile_all", compile_all)


@pytest.fixture
def table(again: None, invoke: Invoke, tmp_path: Path) -> str:
    """Their costs, as `--costs` makes them."""
    path = tmp_path / "made.tsv"
    assert invoke(*SMALL, "--costs", path).exit_code == 0
    return path.read_text()


def _change(table: str, column: str, by: int) -> tuple[str, list[str]]:
    """`table` with `by` added to that cell of the line of `move_kv` on sm_90, and that line before."""
    lines = table.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("move_kv\t") and "\tsm_90\t" in line)
    before = lines[at].split("\t")
    column_at = costs.COLUMNS.index(column)
    lines[at] = "\t".join((*before[:column_at], str(int(before[column_at]) + by), *before[column_at + 1 :]))
    return "\n".join((*lines, "")), before


def _check(invoke: Invoke, tmp_path: Path, table: str) -> tuple[int, list[str]]:
    path = tmp_path / "costs.tsv"
    path.write_text(table)
    result = invoke(*SMALL, "--check-costs", path)
    assert path.read_text() == table
    return result.exit_code, [line.removeprefix(f"portakv: {path}") for line in result.stderr.splitlines()]


def test_costs_are_of_every_variant_and_pass_their_own_check(invoke: Invoke, tmp_path: Path, table: str) -> None:
    head, names, *lines = table.splitlines()
    assert head == f"# Triton {triton.__version__}"
    assert names.split("\t") == list(costs.COLUMNS)
    assert len(lines) == 2 * len(list_variants(SMALL_FORMATS))
    assert lines == sorted(lines)
    for line in lines:
        registers, spills, load, store, instructions = map(int, line.split("\t")[3:])
        assert registers > 4
        assert spills == 0
        assert 1 <= load <= 16
        assert 1 <= store <= 16
        assert instructions > 20
    assert _check(invoke, tmp_path, table) == (0, [])


@pytest.mark.parametrize(
    ("column", "by", "problem"),
    [
        ("registers", -5, "registers: expected {old} + 4 at most, got {was}"),
        ("load bytes", 1, "widest load: expected {old} bytes at least, got {was}"),
        ("store bytes", 1, "widest store: expected {old} bytes at least, got {was}"),
        ("spills", 1, "spills of the table: expected 0, got 1"),
    ],
)
def test_what_costs_more_is_named(
    column: str, by: int, problem: str, invoke: Invoke, tmp_path: Path, table: str
) -> None:
    changed, line = _change(table, column, by)
    was = int(line[costs.COLUMNS.index(column)])
    expected = f": sm_90 move_kv {line[1]}: {problem.format(old=was + by, was=was)}"
    assert _check(invoke, tmp_path, changed) == (1, [expected])


@pytest.mark.parametrize(
    ("column", "by"), [("registers", -4), ("registers", 9), ("store bytes", -1), ("instructions", -9)]
)
def test_what_may_change_passes(column: str, by: int, invoke: Invoke, tmp_path: Path, table: str) -> None:
    assert _check(invoke, tmp_path, _change(table, column, by)[0]) == (0, [])


def test_variants_are_those_of_the_table(invoke: Invoke, tmp_path: Path, table: str) -> None:
    line = next(line for line in table.splitlines() if line.startswith("gather_kv\t"))
    op, variant, target, *_ = line.split("\t")
    name = f": {target} {op} {variant}: variant: expected"
    assert _check(invoke, tmp_path, table.replace(f"{line}\n", "")) == (1, [f"{name} in the table, got none"])
    renamed = table.replace(f"{line}\n", f"{line}\n{line.replace(variant, 'another')}\n")
    name = name.replace(variant, "another")
    assert _check(invoke, tmp_path, renamed) == (1, [f"{name} compiled, got none"])
    # A target that is not compiled now is not asked about.
    assert _check(invoke, tmp_path, table + line.replace(target, "sm_86") + "\n") == (0, [])


def test_code_that_spills_is_named() -> None:
    report = Report("move_kv", "a", "sm_90", ("3 spills",), 40, 3, 12, True, 0.5, 16, 16, 99)
    limits = {("move_kv", "a", "sm_90"): costs.Cost(40, 0, 16, 16, 99)}
    for same_triton in (True, False):
        assert list(costs.check_costs(limits, [report], same_triton)) == ["sm_90 move_kv a: spills: expected 0, got 3"]


def test_another_tritons_table_is_asked_for_spills_only(invoke: Invoke, tmp_path: Path, table: str) -> None:
    other = _change(table, "registers", -5)[0].replace(triton.__version__, "3.0.0")
    code, (line,) = _check(invoke, tmp_path, other)
    assert code == 0
    assert line == f" is Triton 3.0.0's, this is {triton.__version__}: only that nothing spills was checked"
    code, lines = _check(invoke, tmp_path, _change(other, "spills", 1)[0])
    assert code == 1
    assert [line for line in lines if line.endswith("spills of the table: expected 0, got 1")] == lines[1:]


@pytest.mark.parametrize("damage", ["\t", "0", "head", "twice", "empty"])
def test_refuses_what_is_no_table_of_costs(damage: str, invoke: Invoke, tmp_path: Path, table: str) -> None:
    line = table.splitlines()[-1]
    bad = {
        "head": table.replace("# Triton", "Triton"),
        "twice": f"{table}{line}\n",
        "empty": "",
    }.get(damage, table.replace(line, line.replace(damage, "x")))
    path = tmp_path / "costs.tsv"
    path.write_text(bad)
    for option in ("--check-costs", "--costs") if bad else ("--check-costs",):
        result = invoke(*SMALL, option, path)
        assert result.exit_code == 2
        assert result.stderr.startswith("portakv: costs: expected ")
        assert path.read_text() == bad


def test_updates_the_costs_of_its_targets_only(invoke: Invoke, tmp_path: Path, table: str) -> None:
    path = tmp_path / "costs.tsv"
    line = next(line for line in table.splitlines() if "\tsm_90\t" in line)
    kept = line.replace("sm_90", "sm_86")
    path.write_text(f"{_change(table, 'registers', -5)[0]}{kept}\n{line.replace(line.split(chr(9))[1], 'gone')}\n")
    assert invoke(*SMALL, "--costs", path).exit_code == 0
    head, names, *lines = table.splitlines()
    assert path.read_text().splitlines() == [head, names, *sorted((*lines, kept))]


def test_a_table_is_of_one_triton(invoke: Invoke, tmp_path: Path, table: str) -> None:
    path = tmp_path / "costs.tsv"
    other = table.replace(triton.__version__, "3.0.0")
    path.write_text(other)
    result = invoke("--target", "sm_90", "--format", "1x16:float32", "--costs", path)
    assert result.exit_code == 2
    assert "costs: expected gfx942 too, to replace Triton 3.0.0's" in " ".join(result.stderr.split())
    assert path.read_text() == other
    assert invoke(*SMALL, "--costs", path).exit_code == 0
    assert path.read_text() == table


def test_costs_are_not_written_where_a_variant_failed(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, table: str, reports: list[Report], tmp_path: Path
) -> None:
    failed = [dataclasses.replace(reports[0], problems=("spills",), registers=999), *reports[1:]]
    monkeypatch.setattr(compilation, "compile_all", lambda *_: failed)
    path = tmp_path / "costs.tsv"
    path.write_text(table)
    assert invoke(*SMALL, "--costs", path).exit_code == 1
    assert path.read_text() == table


def test_the_committed_costs_are_of_every_variant_that_ci_compiles() -> None:
    _, lines = costs.read_costs(COSTS.read_text())
    variants = {(variant.op, compilation.variant_name(variant)) for variant in list_variants(FORMATS)}
    (command,) = [
        line for line in (ROOT / ".ci/run").read_text().splitlines() if "--check-costs docs/costs.tsv" in line
    ]
    targets = command.split("--target ")[1].split()[0].split(",")
    assert {(op, variant, target) for op, variant in variants for target in targets} <= set(lines)
    assert {(op, variant) for op, variant, _ in lines} == variants
    assert not any(cost.spills for cost in lines.values())
