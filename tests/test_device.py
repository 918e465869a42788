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
from portakv.device import DeviceFacts, DeviceKind, Probe
from portakv.errors import DeviceUnavailable


def test_count_reports_why_there_is_none() -> None:
    def broken() -> int:
        raise RuntimeError("driver too old")

    assert devices._count(DeviceKind.CUDA, None, lambda: 1).count == 0
    assert "was not built for it" in devices._count(DeviceKind.CUDA, None, lambda: 1).reason
    assert "sees no device" in devices._count(DeviceKind.CUDA, "CUDA 12.4", lambda: 0).reason
    assert devices._count(DeviceKind.CUDA, "CUDA 12.4", lambda: 2) == Probe(
        DeviceKind.CUDA, 2, "built for CUDA 12.4; 2 visible"
    )
    found = devices._count(DeviceKind.XPU, "XPU", broken)
    assert found.count == 0
    assert "driver too old" in found.reason


def test_probe_order_and_cpu_last() -> None:
    kinds = [p.kind for p in devices.probe()]
    assert kinds == [DeviceKind.CUDA, DeviceKind.HIP, DeviceKind.XPU, DeviceKind.CPU]
    assert devices.probe()[-1].count == 1


def test_choose() -> None:
    assert devices.choose("cpu") is DeviceKind.CPU
    with pytest.raises(ValueError, match=r"expected one of .*'cpu'.*got 'tpu'"):
        devices.choose("tpu")
    missing = next((p for p in devices.probe() if not p.count), None)
    if missing is None:
        pytest.fail("a machine with every kind of device cannot test a missing one")
    with pytest.raises(DeviceUnavailable, match=missing.kind.value):
        devices.choose(missing.kind.value)


def test_resolve() -> None:
    assert devices.resolve("cpu") == torch.device("cpu")
    assert devices.resolve(torch.device("cpu", 0)) == torch.device("cpu")
    assert devices.resolve(DeviceKind.CPU) == torch.device("cpu")
    assert devices.resolve("meta") == torch.device("meta")
    for bad in ("gpu", 3.5, DeviceKind.OTHER):
        with pytest.raises(ValueError, match="device: expected"):
            devices.resolve(bad)


def test_kind_of_follows_the_tensor() -> None:
    cuda = DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA
    for name, kind in (("cpu", DeviceKind.CPU), ("xpu", DeviceKind.XPU), ("cuda", cuda), ("meta", DeviceKind.OTHER)):
        assert devices.kind_of(torch.device(name)) is kind


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
        assert devices.fp8_dialect(DeviceFacts(DeviceKind.HIP, arch)) is dialect


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu"])
def test_an_upload_waits_only_where_no_pinned_memory_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
        devices.upload(host, SimpleNamespace(type=kind))
    on_gpu = kind != "npu"
    assert moved == [(not on_gpu, on_gpu, [0, 1, 2], kind, on_gpu)]


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
    if value == "xpu" and devices.probe()[2].count:
        pytest.fail("run the device tests of a machine with an Intel GPU with another missing kind")
    done = run("import portakv", PORTAKV_DEVICE=value)
    assert done.returncode == 1
    assert error in done.stderr


def test_environment_chooses() -> None:
    done = run("import portakv; print(portakv.DEVICE)", PORTAKV_DEVICE="cpu")
    assert done.stdout.strip() == "DeviceKind.CPU", done.stderr
