"""S48: each kind is probed with a reason; a request raises with it, an automatic choice ends at the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import portakv
from portakv import DeviceUnavailable, dispatch
from portakv.device import Device, Probe
from portakv.dispatch import CPU, CUDA, DEVICES, HIP, XPU, choose


def fail(message):
    def count():
        raise RuntimeError(message)

    return count


@pytest.mark.parametrize(
    ("built", "count", "expected", "reason"),
    [
        ("CUDA 12.4", lambda: 0, 0, "torch was built for CUDA 12.4, but sees no device"),
        ("CUDA 12.4", lambda: 2, 2, "built for CUDA 12.4; 2 visible"),
        (
            "ROCm 6.2",
            fail("driver too old"),
            0,
            "torch was built for ROCm 6.2, but counting its devices failed: driver too old",
        ),
        (None, fail("must not be asked"), 0, f"this torch ({torch.__version__}) was not built for it"),
    ],
)
def test_a_probe_is_a_count_with_a_reason(built, count, expected, reason):
    device = Device(name="toy", torch_type="cuda", built=lambda: built, count=count)
    assert device.probe() == Probe(device, expected, reason)


def probes(monkeypatch, **counts):
    """Fake what the machine has; `choose` is pure beyond that."""
    counts |= {"cpu": 1}
    monkeypatch.setattr(Device, "probe", lambda self: Probe(self, counts.get(self.name, 0), f"why {self.name}"))
    monkeypatch.setattr(dispatch, "probe", lambda: tuple(device.probe() for device in DEVICES))


@pytest.mark.parametrize(
    ("counts", "device"),
    [({}, CPU), ({"cuda": 1}, CUDA), ({"hip": 8}, HIP), ({"xpu": 1}, XPU), ({"cuda": 1, "xpu": 1}, CUDA)],
    ids=str,
)
def test_automatic_choice(monkeypatch, counts, device):
    """Two platforms at once are no conflict."""
    probes(monkeypatch, **counts)
    assert choose(None) is device


@pytest.mark.parametrize("kind", ["cuda", "hip", "xpu"])
def test_an_explicit_request_raises_with_the_reason(monkeypatch, kind):
    probes(monkeypatch)
    with pytest.raises(DeviceUnavailable, match=f"{kind}: why {kind}") as error:
        choose(kind)
    assert isinstance(error.value, RuntimeError)
    assert choose("cpu") is CPU


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:0", "other", "rocm"])
def test_a_name_that_is_no_kind(monkeypatch, name):
    probes(monkeypatch, cuda=1)
    with pytest.raises(ValueError, match=r"PORTAKV_DEVICE: expected one of \['cuda', 'hip', 'xpu', 'cpu'\], got"):
        choose(name)


def test_the_probe_covers_every_kind_and_tells_why():
    found = dispatch.probe()
    assert [p.device for p in found] == list(DEVICES)
    assert all(p.reason for p in found)
    assert found[-1].count == 1
    text = portakv.explain()
    for p in found:
        assert f"{p.device.name}: {p.reason}" in text


MISSING = [p.device.kind for p in dispatch.probe() if not p.count]  # never empty: no torch is built for CUDA and HIP


@pytest.mark.parametrize("kind", MISSING, ids=str)
def test_a_pool_on_a_device_that_is_missing(kind):
    (reason,) = (p.reason for p in dispatch.probe() if p.device.kind is kind)
    with pytest.raises(DeviceUnavailable) as error:
        portakv.HybridKVPool([portakv.LayerSpec(None, 1, 8)], size=8, device=kind)
    assert reason in str(error.value)


IMPORTS = """
import os, sys

for value in sys.argv[1:]:
    os.environ["PORTAKV_DEVICE"] = value
    for name in [name for name in sys.modules if name.startswith("portakv")]:
        del sys.modules[name]
    try:
        import portakv
        print(portakv.DEVICE.value)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_the_variable_decides_at_import():
    command = [sys.executable, "-P", "-c", IMPORTS, "cpu", "gpu", MISSING[0].value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    good, unknown, missing = done.stdout.splitlines()
    assert good == "cpu"
    assert unknown == "ValueError: PORTAKV_DEVICE: expected one of ['cuda', 'hip', 'xpu', 'cpu'], got 'gpu'"
    assert missing.startswith(f"DeviceUnavailable: {MISSING[0].value}: ")


@pytest.mark.parametrize("device", ["cuda:99", "xpu:99"])
def test_a_torch_device_that_is_missing(device):
    with pytest.raises(DeviceUnavailable, match=f"{device}: .+"):
        dispatch.resolve(device)
