"""`portakv check`: every row and captured graph is accounted for, and a wrong kernel fails by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from portakv import check, cli, dispatch
from portakv.device import Row
from portakv.kernels.reference import rows as reference

CPU = torch.device("cpu")


def run(*args: str) -> tuple[int, dict]:
    result = CliRunner().invoke(cli.app, ["check", "--device", "cpu", "--json", *args])
    return result.exit_code, json.loads(result.stdout)


def without_faults(k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt) -> None:
    """A store that counts no fault, as a row of the table."""
    reference.store_kv(k, v, k_cache, v_cache, loc, k_inv, v_inv, faults.clone(), fmt)


def add_row(monkeypatch: pytest.MonkeyPatch, op: str, row: Row) -> None:
    rows = dispatch.rows
    monkeypatch.setattr(dispatch, "rows", lambda of, device: (row, *rows(of, device)) if of == op else rows(of, device))


def add_function(monkeypatch: pytest.MonkeyPatch, op: str, function) -> None:
    monkeypatch.setattr(reference, function.__name__, function, raising=False)
    add_row(monkeypatch, op, Row("wrong", f"portakv.kernels.reference.rows:{function.__name__}", "this test"))


def test_every_row_and_graph_passes() -> None:
    code, shown = run()
    assert code == 0
    assert shown["passed"]
    assert shown["device"] == "cpu"
    rows = [(o["op"], o["row"]) for o in shown["outcomes"]]
    for op in dispatch.OPS:
        assert [row for name, row in rows if name == op] == [row.name for row in dispatch.rows(op, dispatch.CPU)]
    for graph in check.GRAPH_FILLS:
        assert [row for name, row in rows if name == graph] == ["native", "reference"]
    for o in shown["outcomes"]:
        assert o["cases"] == o["total"]
        if o["row"] == "reference" and o["op"] not in check.GRAPH_FILLS:
            assert o["result"] == "definition"
        elif o["result"] == "unavailable":
            assert o["detail"]
        else:
            assert o["result"] == "passed"
            assert o["cases"] > 0


def test_a_wrong_row_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first difference is named, its graphs fail too, and the rows beside it still run."""
    add_function(monkeypatch, "store_kv", without_faults)
    code, shown = run()
    assert code == 1
    assert not shown["passed"]
    failed = {(o["op"], o["row"]): o["detail"] for o in shown["outcomes"] if o["result"] == "failed"}
    assert set(failed) == {("store_kv", "wrong"), *((graph, "wrong") for graph in check.GRAPH_FILLS)}
    assert "expected 0x" in failed["store_kv", "wrong"]
    assert "slots out of range: expected faults" in failed["graph, filled inside", "wrong"]


def test_table_shows_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    add_function(monkeypatch, "cast_loc", without_faults)  # of another op: it cannot even be called
    monkeypatch.setattr(check, "GRAPH_FILLS", {})
    # Its own width: a console takes COLUMNS as it was when it was made, as by a terminal or pytest-xdist.
    monkeypatch.setattr(cli, "_out", Console(width=200))
    result = CliRunner().invoke(cli.app, ["check", "--device", "cpu"])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "TypeError: without_faults() missing" in result.stdout
    assert "mismatch" in result.stderr


def test_a_row_that_cannot_serve_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    add_row(monkeypatch, "patch_map", Row("triton", "portakv.kernels.cuda.kernels:{op}", "portakv", "triton>=99"))
    outcome = check.check_row("patch_map", "triton", CPU)
    assert outcome.result == "unavailable"
    assert outcome.detail == "not installed"  # for kernels of a CPU nobody looks
    assert outcome.cases == 0


def test_a_deadline_shows_in_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves a second a case, and not at all before the first."""
    now = 0.0

    def one_second(*_) -> None:
        nonlocal now
        now += 1

    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(check.testing, "check", one_second)
    outcome = check.check_row("patch_map", "native", CPU, until=4.5)
    assert (outcome.result, outcome.cases) == ("passed", 5)
    assert outcome.total > 5
    outcome = check.check_row("patch_map", "native", CPU, until=4.5)
    assert (outcome.result, outcome.cases) == ("not run", 0)


def test_an_absent_device_is_an_error_of_one_line() -> None:
    result = CliRunner().invoke(cli.app, ["check", "--device", "warp"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("portakv: device: expected")
