"""Which devices there are and what they can do: the only file that knows "cuda" may mean HIP.

Nothing here creates a device context at import: device counts come from the driver's management library
(NVML, amdsmi) where it answers, so a process may still fork after `import portakv`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from portakv import host_memory
from portakv.errors import DeviceUnavailable, OutOfMemory

T = TypeVar("T")


class DeviceKind(enum.Enum):
    """A column of the dispatch table."""

    CUDA = "cuda"
    HIP = "hip"
    XPU = "xpu"
    CPU = "cpu"
    OTHER = "other"  # any other torch device (NPU, MUSA, MPS, meta): reference rows only


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found of one kind: how many devices, or why none."""

    kind: DeviceKind
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Package:
    """A library that rows can require. `version` is None when it is missing; `problem` says why it cannot serve."""

    version: str | None = None
    problem: str | None = None
    backends: tuple[str, ...] = ()

    def why_not(self, name: str, oldest: str, backend: str | None) -> str | None:
        """Why it cannot serve as package `name` of version `oldest` ("" for any) with `backend`, or None."""
        if self.problem is not None:
            return self.problem
        if oldest and _version(self.version or "") < _version(oldest):
            return f"{name} {self.version} is older than {oldest}"
        if backend is not None and backend not in self.backends:
            return f"{name} {self.version} has no {backend} backend, only {list(self.backends)}"
        return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Everything `select()` may know about a device.

    `arch` is "sm_90", "gfx942", an Intel GPU's name, or the CPU's machine type; `features` are instruction
    sets ("amx", "avx512", "avx2"); `packages` what is installed.
    """

    kind: DeviceKind
    arch: str = ""
    name: str = ""
    features: frozenset[str] = frozenset()
    packages: dict[str, Package] = field(default_factory=dict, hash=False)


_HUGE_PAGE = 2 << 20

_TORCH_TYPE = {DeviceKind.CUDA: "cuda", DeviceKind.HIP: "cuda", DeviceKind.XPU: "xpu", DeviceKind.CPU: "cpu"}


def kind_of(device: torch.device) -> DeviceKind:
    """The table column that serves tensors on `device`."""
    if device.type == "cuda":
        return DeviceKind.HIP if torch.version.hip else DeviceKind.CUDA
    return {"xpu": DeviceKind.XPU, "cpu": DeviceKind.CPU}.get(device.type, DeviceKind.OTHER)


@functools.cache
def probe() -> tuple[Probe, ...]:
    """Every kind in order of preference, CPU last. Never raises."""
    hip, cuda = torch.version.hip, torch.version.cuda
    return (
        _count(DeviceKind.CUDA, f"CUDA {cuda}" if cuda else None, _cuda_count),
        _count(DeviceKind.HIP, f"ROCm {hip}" if hip else None, _cuda_count),
        _count(DeviceKind.XPU, "XPU" if _built_for_xpu() else None, lambda: torch.xpu.device_count()),
        Probe(DeviceKind.CPU, 1, f"{platform.machine()}, {torch.get_num_threads()} threads"),
    )


def _count(kind: DeviceKind, built: str | None, count: Callable[[], int]) -> Probe:
    if built is None:
        return Probe(kind, 0, f"this torch ({torch.__version__}) was not built for it")
    try:
        n = count()
    except Exception as e:  # a broken driver must not break the import of a CPU user
        return Probe(kind, 0, f"torch was built for {built}, but counting its devices failed: {e}")
    return Probe(
        kind,
        n,
        f"built for {built}; {n} visible" if n else f"torch was built for {built}, but sees no device",
    )


def _cuda_count() -> int:
    # torch counts through NVML or amdsmi first, which create no context.
    return torch.cuda.device_count()


def _built_for_xpu() -> bool:
    return bool(getattr(getattr(torch, "xpu", None), "_is_compiled", lambda: False)())


def choose(requested: str | None) -> DeviceKind:
    """The kind to use: `requested` if given, else the first that has a device.

    Raises `ValueError` for a name that is no kind, `DeviceUnavailable` for one that is not there.
    """
    probes = {p.kind: p for p in probe()}
    if requested is None:
        return next(kind for kind, p in probes.items() if p.count)
    names = [kind.value for kind in probes]
    if requested not in names:
        raise ValueError(f"PORTAKV_DEVICE: expected one of {names}, got {requested!r}")
    kind = DeviceKind(requested)
    if not probes[kind].count:
        raise DeviceUnavailable(f"{requested}: {probes[kind].reason}")
    return kind


DEVICE = choose(os.environ.get("PORTAKV_DEVICE"))


def resolve(device: torch.device | str | DeviceKind | None) -> torch.device:
    """A torch device, with an index where its kind has one, from what a user may pass; `None` is `DEVICE`.

    Raises `ValueError` for an unknown device and `DeviceUnavailable` for one that is not there.
    """
    if device is None:
        device = DEVICE
    if isinstance(device, DeviceKind):
        if device not in _TORCH_TYPE:
            raise ValueError(f"device: expected a kind with a torch device of its own, got {device}")
        choose(device.value)
        device = _TORCH_TYPE[device]
    try:
        wanted = torch.device(device)
    except (OverflowError, RuntimeError, TypeError, ValueError) as e:
        raise ValueError(f"device: expected a torch device or a DeviceKind, got {device!r} ({e})") from None
    kind = kind_of(wanted)
    if kind in (DeviceKind.CPU, DeviceKind.OTHER):
        return torch.device("cpu") if kind is DeviceKind.CPU else wanted
    found = next(p for p in probe() if p.kind is kind)
    if (wanted.index or 0) >= found.count:
        raise DeviceUnavailable(f"{wanted}: {found.reason}")
    if wanted.index is not None:
        return wanted
    return torch.device(wanted.type, torch.get_device_module(wanted).current_device())


def facts(device: torch.device) -> DeviceFacts:
    """What `device` can do. Reads its capabilities, so it may create a context: call it when a pool is built."""
    kind = kind_of(device)
    if kind in (DeviceKind.CUDA, DeviceKind.HIP):
        props = torch.cuda.get_device_properties(device)
        arch = f"sm_{props.major}{props.minor}" if kind is DeviceKind.CUDA else props.gcnArchName.split(":")[0]
        return DeviceFacts(kind, arch, props.name, packages=_packages(kind))
    if kind is DeviceKind.XPU:
        name = torch.xpu.get_device_properties(device).name
        return DeviceFacts(kind, name, name, packages=_packages(kind))
    if kind is DeviceKind.CPU:
        return DeviceFacts(kind, platform.machine(), _cpu_name(), _cpu_features(), _packages(kind))
    return DeviceFacts(kind, device.type, device.type)


def fp8_dialect(facts: DeviceFacts) -> torch.dtype:
    """The e4m3 dialect that the device's own matrix units read: fnuz on CDNA 3, the OCP form elsewhere."""
    return torch.float8_e4m3fnuz if facts.arch in ("gfx940", "gfx941", "gfx942") else torch.float8_e4m3fn


@functools.cache
def _packages(kind: DeviceKind) -> dict[str, Package]:
    if kind is DeviceKind.CPU:
        return {"native": _native()}
    found = {"triton": _triton(kind)}
    if kind is DeviceKind.XPU:
        found["ipex"] = _ipex()
    return found


def _distribution(*names: str) -> Package:
    for name in names:
        try:
            return Package(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Package(problem="not installed")


_VENDOR_TRITON = {
    DeviceKind.HIP: ("triton-rocm", "pytorch-triton-rocm"),
    DeviceKind.XPU: ("triton-xpu", "pytorch-triton-xpu"),
}
"""Distributions that the vendors' builds of torch bring; all of them, and the stock one, install one `triton/`."""


def _triton(kind: DeviceKind) -> Package:
    """Triton's version and the backends in its folder, and why it cannot serve `kind`. Calls Triton's driver."""
    try:
        spec = importlib.util.find_spec("triton")
    except ImportError:  # a finder that blocks it
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return Package(problem="not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "backends"
    backends = tuple(sorted(p.parent.name for p in folder.glob("*/compiler.py")))
    stock, vendor = _distribution("triton").version, _distribution(*_VENDOR_TRITON.get(kind, ())).version
    if kind is DeviceKind.XPU and stock is not None:
        lies = f"over Intel's {vendor}" if vendor else "where Intel's should be"
        problem = f"the stock {stock} lies {lies}: uninstall triton, then reinstall triton-xpu from PyTorch's XPU index"
        return Package(stock, problem, backends)
    return Package(vendor or stock, _triton_problem(kind), backends)


def _triton_problem(kind: DeviceKind) -> str | None:
    """Why Triton has no active driver for devices of `kind`: no C compiler, no such backend, another one before it."""
    try:
        from triton.runtime import driver

        backend = driver.active.get_current_target().backend
    except Exception as e:  # whatever a driver's set-up may meet is a reason to pass over Triton, and is told
        return f"no active driver for {kind.value}: {type(e).__name__}: {e}"
    return None if backend == kind.value else f"its active driver is for {backend}, not {kind.value}"


def _ipex() -> Package:
    """Intel's extension, which ends the process when imported beside a torch of another minor version."""
    found = _distribution("intel_extension_for_pytorch")
    if found.version is None:
        return found
    if "xpu" not in found.version:
        return Package(found.version, f"{found.version} is not a build for XPU")
    torch_minor, own_minor = (v.split(".")[:2] for v in (torch.__version__, found.version))
    if torch_minor != own_minor:
        return Package(found.version, f"{found.version} needs torch {'.'.join(own_minor)}, not {torch.__version__}")
    return found


def _native() -> Package:
    from portakv.kernels import cpu_amx

    return Package(problem=cpu_amx.build_problem())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _cpu_features() -> frozenset[str]:
    """Instruction sets that matter to a store, as torch reports them."""
    level = torch.backends.cpu.get_cpu_capability()
    found = {"AVX512": {"avx512", "avx2"}, "AVX2": {"avx2"}}.get(level, set())
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        found = found | {"amx"}
    return frozenset(found)


def shares_host_memory(device: torch.device) -> bool:
    """Whether a host array and a tensor on `device` can be the same memory."""
    return device.type == "cpu"


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None where nothing tells.

    On the host that is what `host_memory.left` finds, on a GPU what its driver has free and torch keeps for reuse.
    """
    if shares_host_memory(device):
        return host_memory.left()
    module: Any = None if device.type == "meta" else torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    try:
        free = int(module.mem_get_info(device)[0])
    except RuntimeError:  # of Intel's driver without the rights or the library to ask
        return None
    return free + int(module.memory_reserved(device)) - int(module.memory_allocated(device))


def require_memory(asked: int, device: torch.device) -> None:
    """Raise `OutOfMemory` if `device` has not `asked` bytes available, or no address could count them."""
    left = available(device)
    if asked > (sys.maxsize if left is None else left):
        raise OutOfMemory(asked, left, str(device))


def allocate(make: Callable[[], T], asked: Mapping[torch.device, int]) -> T:
    """What `make` returns, once the bytes that it is known to need on each device are found available.

    Raises `OutOfMemory` before anything is allocated, or where an allocation fails still; what was made by then is
    given back.
    """
    for device, num_bytes in asked.items():
        require_memory(num_bytes, device)
    try:
        return make()
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, OutOfMemory) or not _lacks_memory(error):
            raise
        # Only torch's own errors are about another device than the host.
        short = list(asked)[-1] if isinstance(error, torch.OutOfMemoryError) else torch.device("cpu")
    # Not inside the handler: the frames of an error that this one came from would keep what was made.
    raise OutOfMemory(asked.get(short, 0), available(short), str(short))


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = "DefaultCPUAllocator", "out of memory"
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def huge_pages() -> bool:
    """Whether host memory of pools is to lie in huge pages: `PORTAKV_HUGE_PAGES`, by default yes."""
    value = os.environ.get("PORTAKV_HUGE_PAGES", "1")
    if value not in ("0", "1"):
        raise ValueError(f"PORTAKV_HUGE_PAGES: expected 0 or 1, got {value!r}")
    return value == "1"


def zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeroed uint8 `[num_bytes]` on `device`, on the host in huge pages where the system gives them when asked."""
    advice = "MADV_HUGEPAGE" if huge_pages() else "MADV_NOHUGEPAGE"
    if device.type != "cpu" or num_bytes < _HUGE_PAGE or not hasattr(mmap, advice):
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # Rows are scattered over the whole pool, and a page walk for each costs as much as moving it.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without transparent huge pages knows no such advice
        memory.madvise(getattr(mmap, advice))
    # Touched now, not by the first stores.
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device` in its stream's order, without waiting where the device reads pinned memory."""
    if device.type in ("cuda", "xpu"):
        # Pinned memory of our own: who has pinned `host` already may write to it before the copy has run.
        pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True).copy_(host)
        return pinned.to(device, non_blocking=True)
    return host.to(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is recording a graph, when nothing can be read back."""
    if device.type == "meta":  # has no module
        return False
    module = torch.get_device_module(device)
    capturing = getattr(module, "is_current_stream_capturing", None)
    if capturing is None:
        return False
    with module.device(device):
        return bool(capturing())
