"""`OutOfMemory`: what is weighed against what, before anything is allocated, and what is left when it fails still."""

from __future__ import annotations

import copy
import errno
import mmap
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from portakv import HybridKVPool, HybridSlotAllocator, LayerSpec, OutOfMemory, PortaKVError, host_memory
from portakv import device as devices

LAYERS = [LayerSpec(None, 2, 16), LayerSpec(8, 2, 16), LayerSpec(None, 1, 24, 8)]
CPU = torch.device("cpu")
GIB = 1 << 30


def make_pool(size: int = 4096, **options: Any) -> HybridKVPool:
    return HybridKVPool(LAYERS, **({"size": size, "swa_size": 1024, "page_size": 16, "device": "cpu"} | options))


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets what the host has left."""
    return lambda value: monkeypatch.setattr(host_memory, "left", lambda: value)


def test_the_error() -> None:
    error = OutOfMemory(10, 7, "cuda:1")
    assert isinstance(error, PortaKVError)
    assert isinstance(error, MemoryError)
    assert str(error) == "cuda:1: asked for 10 bytes, 7 available"
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(same) is OutOfMemory
        assert (same.asked, same.available, same.where, str(same)) == (10, 7, "cuda:1", str(error))
    assert "an unknown number available" in str(OutOfMemory(10, None, "cpu"))


def test_a_pool_asks_for_all_of_it(left: Callable[[int | None], None]) -> None:
    needs = make_pool().nbytes
    left(needs)
    target = make_pool()
    left(needs - 1)
    with pytest.raises(OutOfMemory) as raised:
        make_pool()
    assert (raised.value.asked, raised.value.available, raised.value.where) == (needs, needs - 1, "cpu")
    with pytest.raises(OutOfMemory):
        HybridKVPool.fit(LAYERS, 2 * needs, swa_ratio=0.5, page_size=16, device="cpu")
    # Attached slots are the other pool's.
    draft = target.kv_bytes + target._faults.nbytes + sum(group.scales.nbytes for group in target.groups)
    left(draft)
    assert make_pool(slots_of=target).nbytes == draft
    left(draft - 1)
    with pytest.raises(OutOfMemory):
        make_pool(slots_of=target)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [10**12, 2**62, 2**63 - 1])
@pytest.mark.parametrize("sides", [{}, {"swa_size": 10**12}, {"page_size": 64}])
def test_a_pool_of_absurd_size_is_refused_at_once(size: int, sides: dict[str, int], device: str) -> None:
    """Not even the host's arrays are made. Python's integers do not wrap around."""
    before = peak_bytes()
    with pytest.raises(OutOfMemory) as raised:
        HybridKVPool(LAYERS, size=size, device=device, **sides)
    assert raised.value.asked > 8 * size
    assert raised.value.where == "cpu"
    assert peak_bytes() - before < 1 << 26


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.parametrize("swa_size", [None, 10**11])
def test_an_allocator_on_its_own_asks_too(swa_size: int | None) -> None:
    with pytest.raises(OutOfMemory) as error:
        HybridSlotAllocator(10**11, swa_size)
    assert error.value.asked == HybridSlotAllocator.host_bytes(10**11, swa_size, 1)


def test_plans_and_graph_buffers(left: Callable[[int | None], None]) -> None:
    pool = make_pool()
    table = torch.zeros((512, 1 << 16), dtype=torch.int32)
    batch = table, torch.arange(512), torch.full((512,), 1 << 16)
    left(1 << 20)
    for call, asked in (
        (lambda: pool.graph_write_loc(1 << 20), 2 * 8 << 20),
        (lambda: pool.graph_write_loc(1 << 20, int32_twin=True), 2 * 12 << 20),
        (lambda: pool.graph_write_loc(2**63 - 1), 16 * (2**63 - 1)),
        (lambda: pool.graph_read_plan(512, 1 << 20, consumer="flashmla"), 512 << 18),
        (lambda: pool.graph_read_plan(2**40, 2**40), 2**76),
        (lambda: pool.plan_read(*batch, structure="rows"), 512 << 18),
        (lambda: pool.plan_read(*batch, structure="ragged"), 512 << 18),
    ):
        with pytest.raises(OutOfMemory) as raised:
            call()
        assert raised.value.asked >= asked
        assert (raised.value.available, raised.value.where) == (1 << 20, "cpu")
    left(None)  # where nothing tells, what fits an address is tried
    assert len(pool.graph_write_loc(64)) == 64
    with pytest.raises(OutOfMemory):
        pool.graph_write_loc(2**61)


def test_small_plans_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    monkeypatch.setattr(host_memory, "left", lambda: pytest.fail("asked"))
    table = torch.zeros((4, 512), dtype=torch.int32)
    for structure in ("rows", "ragged", "pages"):
        pool.plan_read(table, torch.arange(4), torch.full((4,), 512), structure=structure)
    pool.graph_read_plan(64, 4096)
    pool.plan_write(torch.arange(16, 32))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: …"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_allocation_that_fails_leaves_nothing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    zeros = devices.zeros

    def some_zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
        if len(made) == 3:
            raise error
        buffer = zeros(num_bytes, device)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(devices, "zeros", some_zeros)
    with pytest.raises(OutOfMemory) as raised:
        make_pool()
    monkeypatch.undo()
    error.__traceback__ = None  # this test's own hold on the frames
    assert raised.value.asked == make_pool().nbytes
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert [ref() for ref in made] == [None] * 3


def test_other_errors_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(errno.EACCES, "Permission denied"), RuntimeError("no such kernel"), OutOfMemory(1, 0, "x")):
        monkeypatch.setattr(devices, "zeros", lambda *_, error=error: exec("raise error", {"error": error}))
        with pytest.raises(type(error)) as raised:
            make_pool()
        assert raised.value is error


def test_a_plan_whose_allocation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is not weighed beforehand; its error has the numbers all the same."""
    pool, error = make_pool(), torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(type(pool._planner), "_allocate", lambda *_: exec("raise error", {"error": error}))
    table = torch.zeros((4, 512), dtype=torch.int32)
    with pytest.raises(OutOfMemory) as raised:
        pool.plan_read(table, torch.arange(4), torch.full((4,), 512), structure="rows")
    assert raised.value.asked >= 4 * 512 * 4


def test_what_a_gpu_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's free memory, and what torch's allocator keeps without using it."""
    device, asked = torch.device("cuda", 1), []

    def tell(number: Any) -> Callable[[torch.device], Any]:
        return lambda of: asked.append(of) or number

    module = SimpleNamespace(
        mem_get_info=tell((100, 1000)), memory_reserved=tell(70), memory_allocated=tell(30), device=lambda _: None
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert devices.available(device) == 140
    assert asked == [device] * 3
    devices.require_memory(140, device)
    with pytest.raises(OutOfMemory, match="cuda:1: asked for 141 bytes, 140 available"):
        devices.require_memory(141, device)

    def refuse(_: torch.device) -> None:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    module.mem_get_info = refuse
    assert devices.available(device) is None
    del module.mem_get_info  # as of torch's modules for other devices
    assert devices.available(device) is None
    devices.require_memory(2**60, device)
    assert devices.available(torch.device("meta")) is None


def test_both_memories_of_a_gpu_pool_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's arrays against the host, the rest against the device; torch's own error is about the device."""
    device = torch.device("xpu", 0)
    has = {CPU: 10, device: 20}
    monkeypatch.setattr(devices, "available", has.__getitem__)
    assert devices.allocate(lambda: "made", {CPU: 10, device: 20}) == "made"
    for needs, where in (({CPU: 11, device: 20}, "cpu"), ({CPU: 10, device: 21}, "xpu:0")):
        with pytest.raises(OutOfMemory) as raised:
            devices.allocate(lambda: pytest.fail("touched"), needs)
        assert raised.value.where == where
    for error, where in ((torch.OutOfMemoryError("XPU out of memory"), "xpu:0"), (MemoryError(), "cpu")):
        with pytest.raises(OutOfMemory) as raised:
            devices.allocate(lambda error=error: exec("raise error", {"error": error}), {CPU: 1, device: 2})
        assert (raised.value.where, raised.value.asked) == (where, {"cpu": 1, "xpu:0": 2}[where])


MEMINFO = "MemTotal: 64 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\nSwapFree: 99999999 kB\n"
V1, V2 = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"
V1_MOUNT = f"35 31 0:32 {{top}} {V1} rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = f"31 23 0:28 {{top}} {V2} rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER_MOUNTS = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n23 1 0:5 / /proc rw - proc proc rw\n"


def v1_group(limit: int, usage: int, **stat: int) -> dict[str, str]:
    counts = "".join(f"{name} {n}\n" for name, n in stat.items())
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": counts}


def v2_group(limit: int | str, usage: int, **stat: int) -> dict[str, str]:
    counts = "".join(f"{name} {n}\n" for name, n in stat.items())
    return {"memory.max": f"{limit}\n", "memory.current": f"{usage}\n", "memory.stat": counts}


@pytest.mark.parametrize(
    ("own", "mounts", "groups", "expected"),
    [
        ("", "", {}, 32 * GIB),
        ("0::/\n", V2_MOUNT.format(top="/"), {V2: {}}, 32 * GIB),
        ("0::/a/b\n", V2_MOUNT.format(top="/"), {f"{V2}/a/b": v2_group("max", 5)}, 32 * GIB),
        ("0::/a/b\n", V2_MOUNT.format(top="/"), {f"{V2}/a/b": v2_group(8 * GIB, GIB)}, 7 * GIB),
        # A group above, tighter than one's own.
        (
            "0::/a/b\n",
            V2_MOUNT.format(top="/"),
            {f"{V2}/a/b": v2_group(8 * GIB, GIB), f"{V2}/a": v2_group(9 * GIB, 6 * GIB)},
            3 * GIB,
        ),
        # The file cache and reclaimable slabs go before anything is refused; anonymous and shared memory does not.
        (
            "0::/a\n",
            V2_MOUNT.format(top="/"),
            {f"{V2}/a": v2_group(8, 7, anon=1, shmem=1, file=3, active_file=1, inactive_file=1, slab_reclaimable=2)},
            5,
        ),
        ("0::/a\n", V2_MOUNT.format(top="/"), {f"{V2}/a": v2_group(4, 9)}, 0),
        # A container that sees its group as the root of the mount, or by a path that only the host has.
        ("0::/\n", V2_MOUNT.format(top="/"), {V2: v2_group(8, 1)}, 7),
        ("0::/docker/x\n", V2_MOUNT.format(top="/docker/x"), {V2: v2_group(8, 2)}, 6),
        ("0::/docker/x/y\n", V2_MOUNT.format(top="/docker/x"), {V2: {}, f"{V2}/y": v2_group(8, 3)}, 5),
        ("0::/../other\n", V2_MOUNT.format(top="/"), {V2: v2_group(8, 4)}, 4),
        # Version 1, where no limit is a number, and both at once.
        (
            "4:memory:/a\n1:cpu:/\n0::/\n",
            V1_MOUNT.format(top="/") + OTHER_MOUNTS,
            {f"{V1}/a": v1_group(9223372036854771712, 5)},
            32 * GIB,
        ),
        (
            "4:hugetlb,memory:/a/b\n",
            OTHER_MOUNTS + V1_MOUNT.format(top="/"),
            {
                V1: v1_group(2**62, 0),
                f"{V1}/a": v1_group(20, 9, active_file=9, total_active_file=1, total_inactive_file=1),
                f"{V1}/a/b": v1_group(90, 9),
            },
            13,
        ),
        ("4:memory:/docker/x\n0::/\n", V1_MOUNT.format(top="/docker/x"), {V1: v1_group(8, 5)}, 3),
    ],
)
def test_what_the_host_has_left(
    own: str, mounts: str, groups: dict[str, dict[str, str]], expected: int, tmp_path: Path
) -> None:
    files = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": own, "/proc/self/mountinfo": mounts}
    files |= {f"{folder}/{name}": text for folder, of in groups.items() for name, text in of.items()}
    for name, text in files.items():
        path = tmp_path / name.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert host_memory.left(tmp_path) == expected


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert host_memory.left(tmp_path) is None


def test_this_machine_has_memory_left() -> None:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < host_memory.left() <= 1024 * int(meminfo["MemTotal"].split()[0])


LIMITED = """
import resource
from portakv import HybridKVPool, LayerSpec, OutOfMemory
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
HybridKVPool([LayerSpec(None, 8, 64)], size=1 << 15, device="cpu")
try:
    HybridKVPool([LayerSpec(None, 8, 64)], size=1 << 18, device="cpu")
except OutOfMemory as error:
    assert error.asked > 512 << 20
    assert (64 << 20) < error.available <= 256 << 20, error
    print("refused")
"""


def test_an_address_space_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LIMITED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "refused\n", done.stderr


@pytest.mark.parametrize(
    ("value", "advice"), [(None, "MADV_HUGEPAGE"), ("1", "MADV_HUGEPAGE"), ("0", "MADV_NOHUGEPAGE")]
)
def test_huge_pages_can_be_switched_off(value: str | None, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Memory(mmap.mmap):
        def madvise(self, *args: int) -> None:
            given.append(args)
            super().madvise(*args)

    monkeypatch.setattr(mmap, "mmap", Memory)
    monkeypatch.delenv("PORTAKV_HUGE_PAGES", raising=False)
    if value is not None:
        monkeypatch.setenv("PORTAKV_HUGE_PAGES", value)
    assert not devices.zeros(4 << 20, CPU).any()
    assert given == [(getattr(mmap, advice),)]


@pytest.mark.parametrize("value", ["", "2", "yes", "00"])
@pytest.mark.parametrize("size", [16, 1 << 20])
def test_huge_pages_are_on_or_off(value: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTAKV_HUGE_PAGES", value)
    with pytest.raises(ValueError, match=f"PORTAKV_HUGE_PAGES: expected 0 or 1, got {value!r}"):
        make_pool(size, swa_size=16, page_size=1)
