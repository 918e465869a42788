"""Probes, the choice of a device, and what a pool may be asked to live on."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from portakv import device as devices
from portakv import dispatch
from portakv.device import Device, DeviceKind
from portakv.errors import DeviceUnavailable


def test_count_reports_why_there_is_none() -> None:
    def broken() -> int:
        raise RuntimeError("driver too old")

    found = Device(name="toy", torch_type="toy", built=lambda: "toys", count=broken).probe()
    assert found.count == 0
    assert "driver too old" in found.reason


def test_probe_order_and_cpu_last() -> None:
    assert [p.device for p in dispatch.probe()] == list(dispatch.DEVICES)
    assert [device.kind for device in dispatch.DEVICES] == list(DeviceKind)[:-1]
    assert dispatch.probe()[-1].count == 1


def test_choose() -> None:
    assert dispatch.choose("cpu") is dispatch.CPU
    with pytest.raises(ValueError, match=r"expected one of .*'cpu'.*got 'tpu'"):
        dispatch.choose("tpu")
    missing = next((p for p in dispatch.probe() if not p.count), None)
    if missing is None:
        pytest.fail("a machine with every kind of device cannot test a missing one")
    with pytest.raises(DeviceUnavailable, match=missing.device.name):
        dispatch.choose(missing.device.name)


def test_resolve() -> None:
    for cpu in ("cpu", "cpu:1", torch.device("cpu", 0), DeviceKind.CPU, dispatch.CPU):
        assert dispatch.resolve(cpu) == (dispatch.CPU, torch.device("cpu"))
    assert dispatch.resolve("meta") == (dispatch.OTHER, torch.device("meta"))
    for bad in ("gpu", 3.5, DeviceKind.OTHER):
        with pytest.raises(ValueError, match="device: expected"):
            dispatch.resolve(bad)


def test_a_torch_device_belongs_to_what_torch_was_built_for() -> None:
    for device in dispatch.DEVICES:
        of = dispatch.device_of(torch.device(device.torch_type))
        assert of.torch_type == device.torch_type
        assert of is device or not device.built()
    assert dispatch.device_of(torch.device("meta")) is dispatch.OTHER


def test_memory_on_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the advice is refused; the memory serves as well without."""
    refused = []

    class Memory(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            refused.append(advice)
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    memory = devices.zeros(4 << 20, torch.device("cpu"))
    assert refused
    assert memory.shape == (4 << 20,) and not memory.any()


def test_fp8_dialect_follows_the_arch() -> None:
    for arch, dialect in (
        ("gfx940", torch.float8_e4m3fnuz),
        ("gfx941", torch.float8_e4m3fnuz),
        ("gfx942", torch.float8_e4m3fnuz),
        ("gfx950", torch.float8_e4m3fn),
        ("sm_90", torch.float8_e4m3fn),
    ):
        assert dispatch.HIP.fp8(arch) is dialect


@pytest.mark.parametrize("device", [*dispatch.DEVICES, dispatch.OTHER], ids=repr)
def test_an_upload_waits_only_where_no_pinned_memory_is_read(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs get pinned memory that is the call's own: who has pinned the source may write to it at once."""
    host, empty, moved = torch.arange(3), torch.empty, []

    class Pinned(torch.Tensor):
        pass

    def to(x: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        moved.append((x.data_ptr() == host.data_ptr(), type(x) is Pinned, x.tolist(), device.type, non_blocking))
        return x

    def pinned_empty(*args, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.as_subclass(Pinned) if pin_memory else made

    monkeypatch.setattr(torch, "empty", pinned_empty)
    monkeypatch.setattr(torch.Tensor, "to", to)
    with torch.device("meta"):  # as where torch.set_default_device was called
        device.upload(host, SimpleNamespace(type=device.torch_type))
    on_gpu = device.gpu is not None
    assert moved == [(not on_gpu, on_gpu, [0, 1, 2], device.torch_type, on_gpu)]


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("tpu", "ValueError: PORTAKV_DEVICE: expected one of"),
        ("", "ValueError: PORTAKV_DEVICE"),
        ("xpu", "DeviceUnavailable: xpu"),
    ],
)
def test_environment_that_names_no_device(value: str, error: str) -> None:
    if value == "xpu" and dispatch.probe()[2].count:
        pytest.fail("run the device tests of a machine with an Intel GPU with another missing kind")
    done = run("import portakv", PORTAKV_DEVICE=value)
    assert done.returncode == 1
    assert error in done.stderr


def test_environment_chooses() -> None:
    done = run("import portakv; print(portakv.DEVICE)", PORTAKV_DEVICE="cpu")
    assert done.stdout.strip() == "DeviceKind.CPU", done.stderr
