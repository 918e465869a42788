"""How many bytes of host memory a process can still take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

GROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""By file system: a control group's limit, its usage, and how `memory.stat` names what its descendants count too."""

RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")
"""What the kernel takes back before it ends a process for want of memory: the file cache and its own caches."""


def left(root: Path = Path("/")) -> int | None:
    """The least that the machine, this process's control groups and its address space leave, in bytes.

    The machine leaves what Linux calls MemAvailable, which counts no swap. A control group of either version, and each
    above it, leaves its limit minus its usage without `RECLAIMABLE`. The address space leaves RLIMIT_AS minus what is
    mapped. None where nothing tells, as on other systems. `root` is where /proc and the mounts are found.
    """
    groups = (_of_group(*group) for group in _groups(root))
    every = (_of_machine(root), *groups, _of_address_space(root))
    return min((n for n in every if n is not None), default=None)


def _read(path: Path) -> list[str]:
    """The lines of a file; none where there is no such file, as the root group has no limit."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _of_machine(root: Path) -> int | None:
    lines = (line.split() for line in _read(root / "proc/meminfo"))
    return next((1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:"), None)


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """(file system, folder) of the process's control groups that may limit memory, from the top of each mount down."""
    own = {}
    for line in _read(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            own["cgroup2" if number == "0" else "cgroup"] = Path(path)
    for line in _read(root / "proc/self/mountinfo"):
        mount, _, described = line.partition(" - ")
        kind, _, options = described.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top, folder = (Path(word.replace("\\040", " ")) for word in mount.split()[3:5])
        folder = root / folder.relative_to("/")
        yield kind, folder
        # In a container the mount may be the process's own group, under a path that only the host knows.
        for name in own[kind].relative_to(top).parts if own[kind].is_relative_to(top) else ():
            folder /= name
            yield kind, folder


def _of_group(kind: str, folder: Path) -> int | None:
    most, usage, prefix = GROUP_FILES[kind]
    limit, used = _read(folder / most), _read(folder / usage)
    if not limit or not used or limit[0] == "max":
        return None
    counts = dict(line.split() for line in _read(folder / "memory.stat"))
    reclaimable = sum(int(counts.get(prefix + name, 0)) for name in RECLAIMABLE)
    return max(int(limit[0]) - int(used[0]) + reclaimable, 0)


def _of_address_space(root: Path) -> int | None:
    if resource is None:
        return None
    limit, mapped = resource.getrlimit(resource.RLIMIT_AS)[0], _read(root / "proc/self/statm")
    if limit == resource.RLIM_INFINITY or not mapped:
        return None
    return max(limit - int(mapped[0].split()[0]) * os.sysconf("SC_PAGESIZE"), 0)
