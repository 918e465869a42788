"""What a device is: a value of class `Device` in `portakv.kernels.<device>.device`, and how it is probed.

Nothing here creates a device context at import: device counts come from the driver's management library
(NVML, amdsmi) where it answers, so a process may still fork after `import portakv`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import importlib.metadata
import mmap
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from portakv import host_memory
from portakv.errors import DeviceUnavailable, OutOfMemory

T = TypeVar("T")


class DeviceKind(enum.Enum):
    """The names of the devices that portakv brings, for callers: each takes a member, a name or a `Device`."""

    CUDA = "cuda"
    HIP = "hip"
    XPU = "xpu"
    CPU = "cpu"
    OTHER = "other"  # any other torch device (NPU, MUSA, MPS, meta), and those that join from outside


@dataclass(frozen=True, slots=True)
class Package:
    """A library that rows can require.

    `version` is None when it is missing or does not tell; `problem` says why it cannot serve.
    """

    version: str | None = None
    problem: str | None = None

    def why_not(self, name: str, oldest: str) -> str | None:
        """Why it cannot serve as package `name` of version `oldest` ("" for any), or None. Unknown is not old."""
        if self.problem is not None:
            return self.problem
        if (own := _version(self.version or "")) and own < _version(oldest):
            return f"{name} {self.version} is older than {oldest}"
        return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of each op on a device: its name, where it is, what it needs, and where it comes from.

    `target` is "module:{op}"; a function is named after its op on every device. `ops` are those that it has (None:
    all), `layouts` the names of those that it stores. `package` is a key of `Device.packages` with its oldest version
    that serves. `refuses` says what else it cannot store: it is given the format and the slots of one layer's cache. A
    row that `checks` refuses bad arguments itself, before it writes. `proof` is how its bytes were shown to be right.
    """

    name: str
    target: str
    origin: str
    package: str | None = None
    ops: tuple[str, ...] | None = None
    layouts: tuple[str, ...] = ("rows", "mla", "flashmla", "flashmla_v32")
    checks: bool = False
    refuses: Callable[[Any, int], str | None] | None = None
    proof: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Gpu:
    """What Triton needs to compile for GPUs of one device.

    `backend` is its `GPUTarget`'s, `targets` the names of GPUs that CI compiles for. `parse` makes an arch, as a
    `GPUTarget` takes it, and the lanes of a warp from the name of any GPU of this device, None from other names.
    `tiles` are a program's (heads, bytes of a head, warps) by lanes, for ever longer rows. `code` names the reader of
    the compiled code and `executor` what executes it, as "module:function" and (module, name of the code).
    """

    backend: str
    targets: tuple[str, ...]
    parse: Callable[[str], tuple[int | str | dict[str, Any], int] | None]
    tiles: Mapping[int, tuple[tuple[int, int, int], ...]]
    code: str
    executor: tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Device:
    """One kind of device, as data. Nothing else knows it by name.

    Attributes:
        name: what `device=`, `PORTAKV_DEVICE` and `--device` call it.
        torch_type: the `torch.device.type` of its tensors; of several devices with one type torch is built for one.
        rows: its kernels in order of preference, without the reference.
        built: what torch was built with for it, such as "CUDA 12.8"; None if it was not.
        count: how many devices there are; must create no context.
        describe: arch ("sm_90", "gfx942"), name and features ("amx", "avx512") of a torch device; may create a context.
        packages: finds each library that `rows` require.
        fp8: the e4m3 dialect that the matrix units of an arch read.
        packed: of features, the names of packed layouts in the order in which `layout="auto"` tries them.
        pinned: whether it copies from pinned host memory without waiting.
        graph: the class of its graphs in torch's module for it.
        gpu: what Triton needs to compile for it.

    Example:
        >>> Device(name="toy", torch_type="cpu", count=lambda: 1)
        Device('toy')
    """

    name: str
    torch_type: str
    rows: tuple[Row, ...] = ()
    built: Callable[[], str | None] = lambda: "any"
    count: Callable[[], int]
    describe: Callable[[torch.device], tuple[str, str, frozenset[str]]] = lambda at: (at.type, at.type, frozenset())
    packages: Mapping[str, Callable[[], Package]] = field(default_factory=dict)
    fp8: Callable[[str], torch.dtype] = lambda arch: torch.float8_e4m3fn
    packed: Callable[[frozenset[str]], tuple[str, ...]] = lambda features: ()
    pinned: bool = False
    graph: str | None = None
    gpu: Gpu | None = None

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @property
    def on_host(self) -> bool:
        """Whether its tensors lie in host memory."""
        return self.torch_type == "cpu"

    @property
    def kind(self) -> DeviceKind:
        """Its member of `DeviceKind`; OTHER for one that joined from outside."""
        return next((kind for kind in DeviceKind if kind.value == self.name), DeviceKind.OTHER)

    def probe(self) -> Probe:
        """What is found of it here. Never raises."""
        built = self.built()
        if built is None:
            return Probe(self, 0, f"this torch ({torch.__version__}) was not built for it")
        try:
            n = self.count()
        except Exception as e:  # a broken driver must not break the import of a CPU user
            return Probe(self, 0, f"torch was built for {built}, but counting its devices failed: {e}")
        return Probe(
            self,
            n,
            f"built for {built}; {n} visible" if n else f"torch was built for {built}, but sees no device",
        )

    def require(self) -> None:
        """Raise `DeviceUnavailable` if there is none."""
        found = self.probe()
        if not found.count:
            raise DeviceUnavailable(f"{self.name}: {found.reason}")

    def facts(self, at: torch.device) -> DeviceFacts:
        """What the torch device `at` can do. May create a context: call it when a pool is built."""
        arch, name, features = self.describe(at)
        return DeviceFacts(self, arch, name, features, {package: find() for package, find in self.packages.items()})

    def upload(self, host: torch.Tensor, at: torch.device) -> torch.Tensor:
        """Copy a CPU tensor to `at` in its stream's order, without waiting where the device reads pinned memory."""
        if self.pinned:
            # Pinned memory of our own: who has pinned `host` already may write to it before the copy has run.
            pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True).copy_(host)
            return pinned.to(at, non_blocking=True)
        return host.to(at)


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found of a device: how many, or why none."""

    device: Device
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Everything `select()` may know about a device.

    `arch` is "sm_90", "gfx942", an Intel GPU's name, or the CPU's machine type; `features` are instruction
    sets ("amx", "avx512", "avx2"); `packages` what is installed.
    """

    device: Device
    arch: str = ""
    name: str = ""
    features: frozenset[str] = frozenset()
    packages: dict[str, Package] = field(default_factory=dict, hash=False)

    @property
    def fp8_dialect(self) -> torch.dtype:
        """The e4m3 dialect that the device's own matrix units read."""
        return self.device.fp8(self.arch)


def find_distribution(*names: str) -> Package:
    """The first of `names` that is installed."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Package(importlib.metadata.version(name))
    return Package(problem="not installed")


def find_triton(backend: str) -> Package:
    """The Triton of this process, whatever its distribution is called, and why it cannot serve `backend`.

    Imports it, and asks its drivers: the active one, or, where that is another vendor's or none, the backend's own.
    """
    try:
        import triton
    except ModuleNotFoundError as e:
        return Package(problem="not installed" if e.name == "triton" else f"not usable: {e}")
    except Exception as e:  # whatever its import may meet is a reason to pass it over, and is told
        return Package(problem=f"not usable: {type(e).__name__}: {e}")
    version = getattr(triton, "__version__", None)
    version = version if isinstance(version, str) else None
    try:
        return Package(version, _triton_problem(f"triton {version}", backend))
    except Exception as e:
        return Package(version, f"no active driver for {backend}: {type(e).__name__}: {e}")


def _triton_problem(name: str, backend: str) -> str | None:
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    able = [x for x in backends.values() if x.compiler.supports_target(GPUTarget(backend, 0, 32))]
    if not able:
        return f"{name} has no backend for {backend}, only {sorted(backends)}"
    if any(x.driver.is_active() for x in able):
        return None
    active = driver.active.get_current_target().backend  # raises where there is none
    return None if active == backend else f"its active driver is for {active}, not {backend}"


_HUGE_PAGE = 2 << 20


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
