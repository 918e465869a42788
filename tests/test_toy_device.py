"""A new device is one value: given as `device=`, or found by an entry point, it is selected and serves. Nothing of
portakv knows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from portakv import DeviceKind, DeviceUnavailable, HybridKVPool, LayerSpec, NoKernel, check, dispatch

TOY_FOLDER = Path(__file__).parent / "toy"
LAYERS = [LayerSpec(None, 2, 8), LayerSpec(4, 2, 8)]
MLA = [LayerSpec(None, 1, 8, 4, mla=True)]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOY_FOLDER))
    import portakv_toy

    portakv_toy.STORED.clear()
    return portakv_toy


def test_it_is_selected_and_stores_the_right_bytes(toy: Any) -> None:
    pool, want = (HybridKVPool(LAYERS, size=16, swa_size=8, device=device) for device in (toy.TOY, "cpu"))
    assert pool.kind is toy.TOY
    assert pool.kernels["store_kv"] == "toy"
    assert pool.kernels["gather_kv"] == "reference"
    k, v = torch.randn(2, 5, 2, 8, dtype=torch.bfloat16)
    for each in (pool, want):
        write_loc = each.plan_write(each.allocator.alloc(5))
        for layer_id in range(2):
            each.set_kv_buffer(layer_id, write_loc, k, v)
            assert torch.equal(each.gather_kv(layer_id, write_loc)[0], k)
    assert toy.STORED == [5, 5]
    for layer_id in range(2):
        for got, expected in zip(pool.get_kv_buffer(layer_id), want.get_kv_buffer(layer_id), strict=True):
            assert torch.equal(got, expected)


def test_it_is_explained_and_asked_for_like_any_other(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = dispatch.explain(toy.TOY)
    assert "store_kv: toy (a test; a test)" in text
    assert "not reference: toy comes first" in text
    pool = HybridKVPool(LAYERS, size=16, device=toy.TOY, kernels={"store_kv": "reference"})
    assert pool.kernels["store_kv"] == "reference"
    monkeypatch.setenv("PORTAKV_KERNELS", "store_kv=toy")
    assert HybridKVPool(LAYERS, size=16, device=toy.TOY).kernels["store_kv"] == "toy"
    with pytest.raises(NoKernel, match="cannot store layout 'mla'"):
        HybridKVPool([LayerSpec(None, 1, 8, 4, mla=True)], size=16, device=toy.TOY)
    monkeypatch.delenv("PORTAKV_KERNELS")
    assert (
        HybridKVPool([LayerSpec(None, 1, 8, 4, mla=True)], size=16, device=toy.TOY).kernels["store_kv"] == "reference"
    )
    assert toy.TOY not in dispatch.DEVICES
    assert toy.TOY.kind is DeviceKind.OTHER
    assert dispatch.device_of(torch.device("cpu")) is dispatch.CPU


def test_it_serves_where_calls_are_traced(toy: Any) -> None:
    """As ops of torch.library, which run kernels that a pool was bound to and no others."""
    pool = HybridKVPool(LAYERS[:1], size=16, device=toy.TOY)
    write_loc = pool.plan_write(pool.allocator.alloc(3))
    k = torch.ones(3, 2, 8, dtype=torch.bfloat16)
    with FlopCounterMode(display=False):
        pool.set_kv_buffer(0, write_loc, k, k)
    assert toy.STORED == [3]
    torch.compile(pool.set_kv_buffer, backend="eager")(0, write_loc, 2 * k, k)
    assert toy.STORED == [3, 3]
    assert (pool.gather_kv(0, write_loc)[0] == 2).all()
    cache, ones = pool.get_kv_buffer(0)[0], torch.ones(2)
    for other in ("portakv_toy:gather_kv", "os:system"):
        with pytest.raises(ValueError, match="kernel: expected one of"):
            torch.ops.portakv.store_kv(k, k, cache, cache, write_loc.loc, ones, ones, pool._faults, "", other)


def test_it_is_checked_by_its_own_rows(toy: Any) -> None:
    assert [row for op, row in check.rows(toy.TOY) if op == "store_kv"] == ["toy", "reference"]
    outcome = check.check_row("store_kv", "toy", toy.TOY)
    assert (outcome.result, outcome.detail) == ("passed", "")
    assert outcome.cases == outcome.total == len(toy.STORED) > 100
    graph = next(iter(check.GRAPH_FILLS))
    assert check.check_graphs(graph, "toy", toy.TOY).result == "passed"


JOINED = """
import portakv, portakv_toy, torch
from portakv import dispatch
pool = portakv.HybridKVPool([portakv.LayerSpec(None, 2, 8)], size=8, **eval({options!r}))
write_loc = pool.plan_write(pool.allocator.alloc(3))
k = torch.ones(3, 2, 8, dtype=torch.bfloat16)
pool.set_kv_buffer(0, write_loc, k, k)
print(dispatch.CHOSEN.name, pool.kind.name, pool.device, portakv_toy.STORED)
"""


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A package as pip leaves it: a module, and what it is entered as."""
    (tmp_path / "portakv_toy.py").write_text((TOY_FOLDER / "portakv_toy.py").read_text())
    info = tmp_path / "portakv_toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: portakv-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[portakv.devices]\ntoy = portakv_toy:TOY\nnone = portakv_toy:STORED\ngone = portakv_toy:GONE\n"
    )
    return tmp_path


def run(folder: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PORTAKV_")}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-c", code]
    env = clean | {"PYTHONPATH": path} | env
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("options", "env", "printed"),
    [
        ("dict(device='toy')", {}, "cpu toy cpu [3]"),
        ("dict(device='toy:0')", {}, "cpu toy cpu [3]"),
        ("{}", {"PORTAKV_DEVICE": "toy"}, "toy toy cpu [3]"),
        ("dict(device='cpu')", {"PORTAKV_DEVICE": "toy"}, "toy cpu cpu []"),
        ("{}", {}, "cpu cpu cpu []"),  # never chosen on its own
    ],
)
def test_it_joins_through_an_entry_point(entry_point: Path, options: str, env: dict[str, str], printed: str) -> None:
    done = run(entry_point, JOINED.format(options=options), PORTAKV_DEVICE=env.get("PORTAKV_DEVICE", "cpu"))
    assert done.stdout.strip() == printed, done.stderr


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", "DeviceUnavailable: none: expected portakv_toy:STORED to be a Device of that name, got []"),
        ("gone", "DeviceUnavailable: gone: portakv_toy:GONE failed: AttributeError"),
        ("else", "ValueError: device: expected a torch device, a Device or one of"),
    ],
)
def test_what_an_entry_point_may_bring_instead(entry_point: Path, name: str, problem: str) -> None:
    code = f"import portakv; portakv.HybridKVPool([portakv.LayerSpec(None, 2, 8)], size=8, device={name!r})"
    assert problem in run(entry_point, code).stderr


def test_the_command_line_takes_it(entry_point: Path) -> None:
    code = (
        "from portakv import check, cli; from typer.testing import CliRunner\n"
        "check.rows = lambda on: [('store_kv', row) for row in ('toy', 'reference')]\n"
        "done = CliRunner().invoke(cli.app, ['check', '--device', 'toy', '--json'])\n"
        "print(done.exit_code, done.stdout)"
    )
    code, _, shown = run(entry_point, code).stdout.partition(" ")
    assert code == "0"
    assert json.loads(shown)["device"] == "toy"
    assert [o["result"] for o in json.loads(shown)["outcomes"]] == ["passed", "definition"]


def test_one_that_is_not_there_is_refused(toy: Any) -> None:
    import dataclasses

    away = dataclasses.replace(toy.TOY, count=lambda: 0)
    with pytest.raises(DeviceUnavailable, match="torch was built for any, but sees no device"):
        HybridKVPool(LAYERS, size=16, device=away)
