"""The pure choice among rows, for devices of every kind, on any machine."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch

import portakv
from portakv import dispatch
from portakv.device import Device, DeviceFacts, DeviceKind, Package, Row
from portakv.dispatch import Request, parse_kernels, select, select_all
from portakv.errors import NoKernel
from portakv.formats import KVFormat, Layout

NVIDIA = {"triton": Package("3.9.0")}
INTEL = {"triton": Package("3.3.0"), "ipex": Package(problem="not installed")}
NATIVE = {"native": Package()}
UNBUILT = {"native": Package(problem="not built: no C++ compiler")}

SERVED = [
    (DeviceFacts(dispatch.CUDA, "sm_80", packages=NVIDIA), "triton"),
    (DeviceFacts(dispatch.CUDA, "sm_90", packages=NVIDIA), "triton"),
    (DeviceFacts(dispatch.HIP, "gfx942", packages=NVIDIA), "triton"),
    (DeviceFacts(dispatch.HIP, "gfx1100", packages=NVIDIA), "triton"),
    (DeviceFacts(dispatch.XPU, "Intel(R) Data Center GPU Max 1550", packages=INTEL), "triton"),
    (DeviceFacts(dispatch.CPU, "x86_64", features=frozenset({"amx", "avx512", "avx2"}), packages=NATIVE), "native"),
    (DeviceFacts(dispatch.CPU, "x86_64", features=frozenset({"avx512", "avx2"}), packages=NATIVE), "native"),
    (DeviceFacts(dispatch.CPU, "x86_64", features=frozenset({"avx2"}), packages=NATIVE), "native"),
    (DeviceFacts(dispatch.CPU, "riscv64", packages=NATIVE), "native"),
    (DeviceFacts(dispatch.CPU, "x86_64", packages=UNBUILT), "reference"),
    (DeviceFacts(dispatch.OTHER, "npu"), "reference"),
]


@pytest.mark.parametrize(("facts", "row"), SERVED, ids=lambda x: getattr(x, "arch", x))
@pytest.mark.parametrize("op", dispatch.OPS)
def test_automatic_choice(op: str, facts: DeviceFacts, row: str) -> None:
    if op.endswith("_packed") and row == "triton":
        row = "reference"  # pages that CPUs read
    selection = select(op, facts)
    assert selection.row.name == row
    column = dispatch.rows(op, facts.device)
    assert {r.name for r in column} == {row, *(r.name for r, _ in selection.rejected)}
    assert all(why for _, why in selection.rejected)


REJECTED = [
    (dispatch.CUDA, {}, "not installed"),
    (dispatch.CUDA, {"triton": Package("3.1.0")}, "triton 3.1.0 is older than 3.3"),
    (dispatch.CUDA, {"triton": Package("3.9.0", problem="no active driver")}, "no active driver"),
    (dispatch.HIP, {"triton": Package("3.1.0", "no active driver")}, "no active driver"),
    (dispatch.XPU, {"ipex": Package(problem="not installed")}, "not installed"),
    (dispatch.CPU, UNBUILT, "not built: no C++ compiler"),
]


@pytest.mark.parametrize(("device", "packages", "reason"), REJECTED)
def test_reason_of_a_rejection(device: Device, packages: dict[str, Package], reason: str) -> None:
    facts = DeviceFacts(device, "arch", packages=packages)
    selection = select("store_kv", facts)
    assert selection.row.name == "reference"
    assert reason in selection.rejected[0][1]
    name = selection.rejected[0][0].name
    for request in (Request(wanted=name), Request(strict=True)):
        with pytest.raises(NoKernel) as error:
            select("store_kv", facts, request)
        assert [row for row, _ in error.value.rejected] == [row.name for row in dispatch.rows("store_kv", device)]
        assert reason in str(error.value)


def test_explicit_request_never_falls_back() -> None:
    facts = SERVED[0][0]
    assert select("store_kv", facts, Request(wanted="reference")).row.name == "reference"
    assert select("store_kv", facts, Request(wanted="reference", strict=True)).row.name == "reference"
    with pytest.raises(NoKernel, match="'native' was requested"):
        select("store_kv", facts, Request(wanted="native"))


def test_a_layout_no_row_stores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Row(name, f"x:{name}", "test", layouts=()) for name in ("a", "b"))
    monkeypatch.setattr(dispatch, "rows", lambda op, device: rows)
    with pytest.raises(NoKernel, match="cannot store layout 'rows'"):
        select("store_kv", SERVED[5][0], Request(KVFormat(1, 8, 8, torch.bfloat16)))


def test_every_row_names_a_function() -> None:
    """Every op ends at the reference on every device, and each target is "module:{op}"."""
    for op in dispatch.OPS:
        for device in (*dispatch.DEVICES, dispatch.OTHER):
            rows = dispatch.rows(op, device)
            assert rows[-1].name == "reference"
            assert len({row.name for row in rows}) == len(rows)
            assert all(row.target.endswith(":{op}") and row.origin and row.proof for row in rows)


def test_all_reasons_of_a_row_are_told() -> None:
    """An old Triton is no better where the layout is wrong too, and another row was asked for."""
    facts = DeviceFacts(dispatch.CUDA, packages={"triton": Package("3.1.0")})
    fmt = KVFormat(1, 32, 32, torch.bfloat16, 32, Layout.CPU_VEC)
    with pytest.raises(NoKernel) as error:
        select("store_kv", facts, Request(fmt, "native"))
    reasons = dict(error.value.rejected)
    for reason in ("'native' was requested", "cannot store layout 'cpu_vec'", "triton 3.1.0 is older than 3.3"):
        assert reason in reasons["triton"]


def test_parse_kernels() -> None:
    assert parse_kernels("") == {}
    assert parse_kernels(" store_kv=native, gather_kv=reference,") == {"store_kv": "native", "gather_kv": "reference"}
    for bad, expected in (
        ("store=native", "an op of"),
        ("store_kv", "a row of store_kv"),
        ("store_kv=cuda", "'native', 'reference', 'triton'"),
    ):
        with pytest.raises(ValueError, match=expected):
            select_all(SERVED[5][0], parse_kernels(bad))


def test_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTAKV_KERNELS", "store_kv=reference,move_kv=reference")
    facts = SERVED[5][0]
    chosen = select_all(facts, {"store_kv": "native"})
    assert chosen["store_kv"].row.name == "native"
    assert chosen["move_kv"].row.name == "reference"
    assert chosen["gather_kv"].row.name == "native"


def test_reference_is_logged_once_and_only_when_automatic(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._warn_once.cache_clear()
    facts = DeviceFacts(dispatch.CPU, "x86_64", packages=UNBUILT)
    with caplog.at_level(logging.WARNING, "portakv"):
        dispatch.load("store_kv", select("store_kv", facts, Request(wanted="reference")))
        assert not caplog.records
        for _ in range(3):
            dispatch.load("store_kv", select("store_kv", facts))
            dispatch.load("store_kv", select("store_kv", DeviceFacts(dispatch.OTHER)))
    assert len(caplog.records) == 2
    assert "no C++ compiler" in caplog.records[0].message
    assert "this device has no other row" in caplog.records[1].message


def test_explain_names_every_probe_and_row() -> None:
    text = portakv.explain("cpu")
    for kind in ("cuda", "hip", "xpu", "cpu"):
        assert f"  {kind}: " in text
    for op in (*dispatch.OPS, *dispatch.HOST_OPS):
        assert f"{op}: native (portakv, C++; executed on a CPU)" in text
    assert text.count("not reference: native comes first") == len(dispatch.OPS) + len(dispatch.HOST_OPS)
    assert "measure_read: native" in portakv.explain("meta")


def test_the_hosts_ops_are_chosen_apart_from_a_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names in the environment, and as `kernels=` is of one pool, not by it."""
    assert not dispatch.OPS.keys() & set(dispatch.HOST_OPS)
    layers = [portakv.LayerSpec(None, 1, 8)]
    for device in ("cpu", "meta"):
        for row in ("native", "reference"):
            monkeypatch.setenv("PORTAKV_KERNELS", f"measure_read={row}")
            assert dispatch.select_host()["measure_read"].row.name == row
            pool = portakv.HybridKVPool(layers, size=8, device=device)
            want = dispatch.load("measure_read", dispatch.select_host()["measure_read"])
            assert pool._planner._measure is want
    for row, problem in (("triton", "a row of measure_read among"), ("", "a row of measure_read among")):
        monkeypatch.setenv("PORTAKV_KERNELS", f"measure_read={row}")
        with pytest.raises(ValueError, match=problem):
            portakv.HybridKVPool(layers, size=8, device="cpu")
    monkeypatch.delenv("PORTAKV_KERNELS")
    with pytest.raises(ValueError, match="kernels: expected ops that this pool runs"):
        portakv.HybridKVPool(layers, size=8, device="cpu", kernels={"measure_read": "native"})


def test_what_lists_the_devices_lists_all_of_them() -> None:
    """CI's matrix has a row for each, and the page on variables, `--device` of the commands and scripts their names."""
    names = [device.name for device in dispatch.DEVICES]
    root = Path(__file__).parents[1]
    matrix = json.loads((root / ".github" / "matrix.json").read_text())["include"]
    assert {row["device"] for row in matrix} - {""} == set(names)
    (variable,) = re.findall(
        r"^\| `PORTAKV_DEVICE` \| (.*?), or ", (root / "docs" / "environment.md").read_text(), re.M
    )
    assert re.findall(r"`(\w+)`", variable) == names
    assert set(names) | {"other"} == {kind.value for kind in DeviceKind}
    (targets,) = re.findall(r'^TARGETS = "(.*)"$', (root / "noxfile.py").read_text(), re.MULTILINE)
    stock = [device.gpu.targets for device in (dispatch.CUDA, dispatch.HIP) if device.gpu]
    assert targets.split(",") == [name for of in stock for name in of]
