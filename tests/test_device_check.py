"""`scripts/device_check.py` rehearsed without a GPU: interpreted Triton rows on the CPU, at tiny sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from portakv import check, dispatch
from portakv.device import Device, DeviceFacts, Package
from portakv.errors import NoKernel

ROOT = Path(__file__).parents[1]
TINY = ["--device", "cpu", "--budget", "40", "--slots", "256", "--tokens", "1,16", "--rounds", "3"]

SETUP = f"""
import sys
sys.modules.update(dict.fromkeys(("pytest", "hypothesis", "typer", "rich", "transformers")))
sys.path.insert(0, {str(ROOT / "scripts")!r})
import device_check
import torch
torch.set_num_threads(1)
device_check.store_gpu.STORES_PER_GRAPH = device_check.store_gpu.EAGER_CALLS = 2
"""

# What the budget is counted in: a busy machine, or one that stops the process, cuts nothing short.
OWN_TIME = """
import time
time.monotonic = time.process_time
device_check.START = time.monotonic()
"""

INTERPRETED = """
from portakv import dispatch
from portakv.device import Row
CUDA, rows = dispatch.CUDA, dispatch.rows
interpreted = Row("triton", "portakv.kernels.cuda.kernels:{op}", "interpreted")
dispatch.rows = lambda op, device: tuple(interpreted if row.name == "triton" else row for row in rows(op, CUDA))
"""

WRONG_STORE = """
from portakv import dispatch
from portakv.device import Row
from portakv.kernels.reference import rows as reference
def wrong(k, v, k_cache, v_cache, loc, *rest):
    reference.store_kv(k[:-1], v[:-1], k_cache, v_cache, loc[:-1], *rest)
reference.wrong = wrong
rows = dispatch.rows
broken = Row("wrong", "portakv.kernels.reference.rows:wrong", "this test")
dispatch.rows = lambda op, device: (*([broken] if op == "store_kv" else []), rows(op, device)[-1])
"""


def run(code: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PORTAKV_")} | environment
    return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, check=False)


def rehearse(out: Path, table: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    code = SETUP + OWN_TIME + table + "sys.exit(device_check.main(sys.argv[1:]))"
    done = run(code, *TINY, "--out", str(out), TRITON_INTERPRET="1", PYTHONWARNINGS="ignore")
    assert done.returncode in (0, 1), done.stderr
    return done, json.loads((out / "device_check.json").read_text())


@pytest.mark.parametrize("device", [device for device in dispatch.DEVICES if device.gpu], ids=repr)
def test_a_gpu_that_triton_serves_is_checked(device: Device) -> None:
    """By its Triton rows alone; without Triton there is nothing to check."""
    check_script = importlib.util.spec_from_file_location("device_check", ROOT / "scripts" / "device_check.py")
    assert check_script is not None and check_script.loader is not None
    module = importlib.util.module_from_spec(check_script)
    check_script.loader.exec_module(module)
    chosen = module.choose_rows(DeviceFacts(device, packages={"triton": Package("3.6.0")}))
    assert {op: selection.row.name for op, selection in chosen.items()} == {
        op: "triton" for op in dispatch.OPS if not op.endswith("_packed")
    }
    with pytest.raises(NoKernel):
        module.choose_rows(DeviceFacts(device))


def test_one_round_has_no_quartiles(tmp_path: Path) -> None:
    """Refused at once, before anything of the device is measured."""
    done = run(SETUP + "device_check.parse(sys.argv[1:])", *TINY, "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--rounds: expected at least 2, got 1" in done.stderr


def test_rehearsal(tmp_path: Path) -> None:
    done, report = rehearse(tmp_path / "made" / "for it", INTERPRETED)
    assert done.returncode == 0, done.stdout
    assert report["seconds"] < 80
    # Of packed CPU pages GPUs have reference rows only.
    assert report["kernels"] == {op: "triton" for op in dispatch.OPS if not op.endswith("_packed")}
    rows = {(row["op"], row["row"]): row for row in report["rows"]}
    for op in dispatch.OPS:
        if not op.endswith("_packed"):
            assert rows[op, "triton"]["result"] == "passed"
            # The interpreter is slow: the budget cuts the suite, and the count says so.
            assert 0 < rows[op, "triton"]["cases"] <= rows[op, "triton"]["total"]
        assert rows[op, "reference"]["result"] == "definition"
    for graph in report["graphs"]:
        assert graph["op"] in check.GRAPH_FILLS
        assert graph["result"] == "passed"
        assert graph["cases"] == graph["total"] == 18
    assert len(report["graphs"]) == 4
    bench = report["benchmark"]
    assert [row["tokens"] for row in bench["stores"]] == [1, 16]
    for row in bench["stores"]:
        assert set(row["us"]) >= {"set_kv_buffer", "set_kv_buffer fp8", "copy_", "index_put"}
        assert set(row["us"]) | set(bench["notes"]) >= {"vLLM", "SGLang", "FlashInfer"}
        for median, low, high in row["us"].values():
            assert 0 < low <= median <= high
        assert row["of_copy_time"]["copy_"] == 1
    assert bench["copy_gb_per_s"] > 0
    assert bench["targets"] == []  # a CPU reaches and misses none of them
    # The table is the last that is printed.
    table = done.stdout.splitlines()[-len(report["rows"]) - len(report["graphs"]) - 3 :]
    assert table[0].startswith("| op | row |")
    assert re.fullmatch(rf"0 of {len(table) - 3} rows failed; [\d.]+ s", table[-1])


def test_a_wrong_kernel_fails_the_run(tmp_path: Path) -> None:
    """In its row, in the graphs, and as a candidate of the benchmark, which then has no figures."""
    done, report = rehearse(tmp_path, WRONG_STORE)
    assert done.returncode == 1
    failed = {(o["op"], o["row"]) for o in report["rows"] + report["graphs"] if o["result"] == "failed"}
    assert failed == {("store_kv", "wrong"), *((graph, "wrong") for graph in check.GRAPH_FILLS)}
    assert "wrote other bytes" in report["benchmark"]["error"]
    assert "FAILED" in done.stdout


@pytest.mark.parametrize("kind", ["cuda", "hip", "xpu"])
def test_an_absent_device_is_said(kind: str, tmp_path: Path) -> None:
    done = run(SETUP + "sys.exit(device_check.main(sys.argv[1:]))", "--device", kind, "--out", str(tmp_path))
    if done.returncode == 0:
        pytest.skip(f"there is a device of kind {kind}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"device_check: {kind}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def store_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("store_gpu")


def test_targets_take_the_worst_size(store_gpu: ModuleType) -> None:
    ours, fp8 = store_gpu.OURS, store_gpu.FP8
    stores = [
        {"tokens": n, "of_copy_bandwidth": {ours: rate, fp8: 0.8}, "of_copy_time": {ours: slower}}
        for n, rate, slower in (
            (1, 0.01, 1.1),
            (256, 0.5, 1.19),
            (1024, 0.2, 9.0),
            (16384, 0.95, 9.0),
            (65536, 0.91, 9.0),
        )
    ]
    eager = [{"us": {ours: (microseconds, 1.0, 9.0)}} for microseconds in (5.0, 8.5)]
    found = list(store_gpu.targets({"stores": stores, "eager": eager}))
    assert [(t["worst"], t["reached"]) for t in found] == [(0.91, True), (0.8, False), (1.19, True), (8.5, False)]
    found = list(store_gpu.targets({"stores": [], "eager": []}))
    assert [(t["worst"], t["reached"]) for t in found] == [(None, False)] * 4


def test_a_device_is_timed_by_its_own_events(store_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("synchronize")

        def elapsed_time(self, end: Event) -> float:
            return 0.25  # ms

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event))
    assert store_gpu.stopwatch(torch.device("cuda"))(lambda: log.append("call")) == 250
    assert log == ["record", "call", "record", "synchronize"]


def test_compiling_ahead_fills_the_cache(tmp_path: Path) -> None:
    """What worker processes compile is what this one would: then it finds every variant in Triton's cache."""
    code = (
        SETUP
        + """
import time
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from portakv import dispatch, testing

def main():
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    device_check.shares_host_memory = lambda device: False
    variants = [case.variant for op in ("cast_loc", "patch_map") for case in testing.cases(op)]
    device_check.compile_ahead(variants, torch.device("cuda"), time.monotonic() + 60)
    cached = set(CACHE.iterdir())
    for variant in variants:
        device_check.compile_one("cuda", variant, target)
    print(len(cached), set(CACHE.iterdir()) == cached)

from pathlib import Path
CACHE = Path(sys.argv[1])
main()
"""
    )
    done = run(code, str(tmp_path), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    cached, complete = done.stdout.split()
    assert int(cached) >= 3
    assert complete == "True"
