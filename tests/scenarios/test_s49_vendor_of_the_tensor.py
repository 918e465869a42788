"""S49: the column follows the tensor's device and the torch build, never the machine."""

from __future__ import annotations

import pytest
import torch

import portakv
from portakv import DeviceKind, dispatch
from portakv.device import Device, DeviceFacts, Package, Probe
from portakv.dispatch import CPU, CUDA, DEVICES, HIP, XPU, Request, device_of, select
from portakv.formats import KVFormat

TYPES = ["cpu", "cuda", "xpu", "meta", "mps", "hpu", "mtia", "privateuseone"]


@pytest.mark.parametrize(
    ("hip", "cuda", "device"),
    [(None, "12.8", CUDA), ("6.4", None, HIP), ("6.4", "12.8", HIP)],
)
def test_cuda_tensors_belong_to_what_torch_was_built_for(monkeypatch, hip, cuda, device):
    """A folder /opt/rocm, or an Intel GPU beside it, plays no part."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("ROCM_PATH", "/opt/rocm")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert device_of(torch.device("cuda")) is device
    assert device_of(torch.device("cuda:3")) is device
    assert device_of(torch.device("xpu")) is XPU
    assert device_of(torch.device("cpu")) is CPU


@pytest.mark.parametrize("name", TYPES)
def test_every_device_type_has_a_column_with_a_row(name):
    device = device_of(torch.device(name))
    for op in dispatch.OPS:
        assert select(op, DeviceFacts(device, "some")).row.name == "reference"


@pytest.mark.parametrize("device", [device for device in DEVICES if device.gpu], ids=repr)
def test_a_compiler_without_the_vendors_backend_is_passed_over(device):
    """Stock Triton over an XPU build has no Intel compiler: said so, and not tried."""
    fmt = KVFormat(8, 128, 128, torch.bfloat16)
    found = DeviceFacts(device, "some", packages={"triton": Package("3.6.0")})
    assert select("store_kv", found, Request(fmt)).row.target.startswith(f"portakv.kernels.{device.name}.")
    wrong = DeviceFacts(device, "some", packages={"triton": Package("3.6.0", "triton 3.6.0 has no such backend")})
    selection = select("store_kv", wrong, Request(fmt))
    assert selection.row.name == "reference"
    assert selection.rejected[0][1] == "triton 3.6.0 has no such backend"


def test_an_override_wins(monkeypatch):
    monkeypatch.setattr(Device, "probe", lambda self: Probe(self, 1, "here"))
    for device in DEVICES:
        assert dispatch.choose(device.name) is device


def test_a_pools_kernels_follow_its_tensors_not_the_default(monkeypatch):
    monkeypatch.setattr(dispatch, "CHOSEN", CUDA)
    pool = portakv.HybridKVPool([portakv.LayerSpec(None, 1, 8)], size=8, device="cpu")
    assert pool.device == torch.device("cpu")
    assert set(pool.kernels.values()) <= {row.name for row in dispatch.rows("store_kv", CPU)}


def test_a_device_of_no_vendor_runs_the_reference():
    pool = portakv.HybridKVPool([portakv.LayerSpec(None, 1, 8)], size=8, device="meta")
    assert set(pool.kernels.values()) == {"reference"}


@pytest.mark.parametrize("device", ["warp", "", 1.5, [], DeviceKind.OTHER], ids=repr)
def test_what_is_no_device_is_a_named_error(device):
    with pytest.raises((ValueError, TypeError), match="device: expected"):
        dispatch.resolve(device)
