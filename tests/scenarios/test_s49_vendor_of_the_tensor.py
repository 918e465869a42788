"""S49: the column follows the tensor's device and the torch build, never the machine."""

from __future__ import annotations

import pytest
import torch

import portakv
from portakv import DeviceKind
from portakv import device as devices
from portakv.device import DeviceFacts, Package, kind_of
from portakv.dispatch import Request, select
from portakv.formats import KVFormat
from portakv.table import TABLE

TYPES = ["cpu", "cuda", "xpu", "meta", "mps", "hpu", "mtia", "privateuseone"]


@pytest.mark.parametrize(
    ("hip", "cuda", "kind"),
    [(None, "12.8", DeviceKind.CUDA), ("6.4", None, DeviceKind.HIP), ("6.4", "12.8", DeviceKind.HIP)],
)
def test_cuda_tensors_belong_to_what_torch_was_built_for(monkeypatch, hip, cuda, kind):
    """A folder /opt/rocm, or an Intel GPU beside it, plays no part."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("ROCM_PATH", "/opt/rocm")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert kind_of(torch.device("cuda")) is kind
    assert kind_of(torch.device("cuda:3")) is kind
    assert kind_of(torch.device("xpu")) is DeviceKind.XPU
    assert kind_of(torch.device("cpu")) is DeviceKind.CPU


@pytest.mark.parametrize("name", TYPES)
def test_every_device_type_has_a_column_with_a_row(name):
    kind = kind_of(torch.device(name))
    assert isinstance(kind, DeviceKind)
    for op in TABLE:
        assert select(op, DeviceFacts(kind, "some")).row.name == "reference"


def test_every_op_has_every_column():
    for op, columns in TABLE.items():
        assert set(columns) == set(DeviceKind), op
        for rows in columns.values():
            assert rows[-1].name == "reference"


@pytest.mark.parametrize(
    ("kind", "compiler", "module"),
    [(DeviceKind.CUDA, "nvidia", "cuda"), (DeviceKind.HIP, "amd", "hip"), (DeviceKind.XPU, "intel", "xpu")],
)
def test_a_compiler_without_the_vendors_backend_is_passed_over(kind, compiler, module):
    """Stock Triton over an XPU build has no Intel compiler: said so, and not tried."""
    others = {"nvidia", "amd", "intel"} - {compiler}
    fmt = KVFormat(8, 128, 128, torch.bfloat16)
    found = DeviceFacts(kind, "some", packages={"triton": Package("3.6.0", backends=(compiler,))})
    assert select("store_kv", found, Request(fmt)).row.target.startswith(f"{module}:")
    wrong = DeviceFacts(kind, "some", packages={"triton": Package("3.6.0", backends=tuple(sorted(others)))})
    selection = select("store_kv", wrong, Request(fmt))
    assert selection.row.name == "reference"
    assert selection.rejected[0][1] == f"triton 3.6.0 has no {compiler} backend, only {sorted(others)}"


def test_an_override_wins(monkeypatch):
    found = tuple(devices.Probe(kind, 1, "here") for kind in list(DeviceKind)[:4])
    monkeypatch.setattr(devices, "probe", lambda: found)
    for kind in list(DeviceKind)[:4]:
        assert devices.choose(kind.value) is kind


def test_a_pools_kernels_follow_its_tensors_not_the_default(monkeypatch):
    monkeypatch.setattr(devices, "DEVICE", DeviceKind.CUDA)
    pool = portakv.HybridKVPool([portakv.LayerSpec(None, 1, 8)], size=8, device="cpu")
    assert pool.device == torch.device("cpu")
    assert set(pool.kernels.values()) <= {row.name for row in TABLE["store_kv"][DeviceKind.CPU]}


def test_a_device_of_no_vendor_runs_the_reference():
    pool = portakv.HybridKVPool([portakv.LayerSpec(None, 1, 8)], size=8, device="meta")
    assert set(pool.kernels.values()) == {"reference"}


@pytest.mark.parametrize("device", ["warp", "", 1.5, [], DeviceKind.OTHER], ids=repr)
def test_what_is_no_device_is_a_named_error(device):
    with pytest.raises((ValueError, TypeError), match="device: expected"):
        devices.resolve(device)
