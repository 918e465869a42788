"""`warmup`, and `portakv compile`: every variant for GPUs that need not be here, and what their compilers made of it.

Compiling shows what a kernel asks of a GPU, not that its bytes are right; the interpreter and GPUs show that.
Triton is imported when it is needed, not with this module.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from portakv import dispatch
from portakv.arguments import as_int
from portakv.device import Gpu
from portakv.errors import PortaKVError
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS, VECTOR_BYTES, KVFormat, Layout, Variant, list_variants
from portakv.groups import plan_groups
from portakv.kernels import load
from portakv.layers import LayerSpec
from portakv.memory.layouts import LAYOUTS, find_layout

if TYPE_CHECKING:
    from portakv.pool import HybridKVPool

TARGETS = tuple(name for device in dispatch.DEVICES if device.gpu for name in device.gpu.targets)
"""What CI compiles for. Any other that a device knows and the installed Triton compiles for is taken too."""

FORMATS = (
    KVFormat(6, 192, 128, torch.float8_e4m3fnuz, page_size=16),
    KVFormat(1, 448, 64, torch.float8_e4m3fn, 64, Layout.FLASHMLA),
)
"""What is compiled unless formats are given: K and V dims that differ, two page sizes, FlashMLA's pages, and of the fp8
dialects one whose zeros need a step of their own.

A float pool adds no code: its stores leave out the scale and the clamp, its rows are moved by the same kernels, and
every float is decoded by the stores and encoded by the gathers of an fp8 pool. The tests compile a variant of each of
its kinds."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*FLOAT_DTYPES, *FP8_DIALECTS)}


def warmup(pool: HybridKVPool) -> None:
    """Compile and load every kernel that calls of `pool` can need, so that none compiles while serving.

    A no-op for rows that need no compiling. Raises `NoKernel` for a variant that does not compile.
    """
    if not hasattr(pool, "groups"):
        raise TypeError(f"pool: expected a HybridKVPool, got {type(pool).__name__}")
    for group in pool.groups:
        kernels = {**pool._slot_kernels, **group.kernels}
        for variant in list_variants([group.fmt]):
            kernel = kernels[variant.op]
            # A row that compiles is an op's `launch` with the device's Launcher as its first argument.
            launcher = kernel.args[0] if isinstance(kernel, functools.partial) and kernel.args else None
            warm = getattr(launcher, "warm", None)
            if warm is not None:
                warm(variant, pool.device)


def triton_version() -> str:
    import triton

    return str(triton.__version__)


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to compile for: `arch` is what a `GPUTarget` of Triton takes, `lanes` those of a warp or wave."""

    name: str
    gpu: Gpu
    arch: int | str | dict[str, Any]
    lanes: int

    @classmethod
    def parse(cls, name: str) -> Target:
        """From "sm_90", "gfx942", "pvc" or another name that a device's `Gpu.parse` knows, else a `ValueError`."""
        for device in dispatch.DEVICES:
            if device.gpu is not None and (found := device.gpu.parse(name)):
                return cls(name, device.gpu, *found)
        raise ValueError(f"target: expected one of {list(TARGETS)} or another of their kinds, got {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Target.parse, (self.name,)

    def triton(self) -> Any:
        """As Triton's own `GPUTarget`."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.gpu.backend, self.arch, self.lanes)

    def launcher(self) -> Any:
        """The device's `kernels._triton.launch.Launcher`. Imports Triton."""
        from portakv.kernels import _triton

        return _triton.launcher(self.gpu)

    def unavailable(self) -> str | None:
        """Why the installed Triton cannot compile for it, or `None`."""
        try:
            version = triton_version()
        except ModuleNotFoundError as e:
            if e.name != "triton":
                raise
            return "triton is not installed"
        from triton.backends import backends

        if any(backend.compiler.supports_target(self.triton()) for backend in backends.values()):
            return None
        return f"triton {version} has no backend for {self.gpu.backend}, only {sorted(backends)}"


FORMAT_SYNTAX = "HEADSxDIM[xVDIM]:DTYPE[:PAGE][:LAYOUT]"
_LAYOUTS = [layout.name for layout in LAYOUTS if not layout.packed]


def parse_format(text: str) -> KVFormat:
    """A format from `FORMAT_SYNTAX`, as "6x192x128:float8_e4m3fn:16".

    Dims of the layouts for MLA are those of the latent and of the rope part, as in "1x512x64:bfloat16:mla". Raises
    `ValueError`, also for what no pool can store.
    """
    number = r"([1-9]\d*)"
    match = re.fullmatch(rf"{number}x{number}(?:x{number})?:(\w+)(?::{number})?(?::([a-z]\w*))?", text)
    layout = (match and match[6]) or Layout.ROWS.name
    if match is None or match[4] not in _DTYPES or layout not in _LAYOUTS:
        takes = f"a dtype of {list(_DTYPES)} and a layout of {_LAYOUTS}"
        raise ValueError(f"format: expected {FORMAT_SYNTAX} with {takes}, got {text!r}")
    heads, dim, v_dim, page = (int(match[i] or 0) for i in (1, 2, 3, 5))
    spec = LayerSpec(None, heads, dim, v_dim or None, mla=layout != Layout.ROWS.name)
    (fmt,) = model_formats([spec], match[4], page or 1, find_layout(layout))
    return fmt


def model_formats(
    layers: Sequence[LayerSpec], dtype: str, page_size: int, layout: Layout = Layout.ROWS
) -> tuple[KVFormat, ...]:
    """The formats of a pool of `layers`; raises `ValueError` for what no pool can store."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: expected one of {list(_DTYPES)}, got {dtype!r}")
    groups = plan_groups(layers, True, _DTYPES[dtype], as_int("page_size", page_size), layout)
    return tuple(dict.fromkeys(fmt for _, fmt in groups))


def variant_name(variant: Variant) -> str:
    """What tells a variant from the others of its op."""
    page = f"/p{variant.fmt.page_size}" if variant.fmt else ""
    words = [f"{variant.fmt.tag.removesuffix(page)}{page}"] if variant.fmt else []
    words += [str(dtype).removeprefix("torch.") for dtype in (variant.dtype, variant.index_dtype) if dtype]
    words += [variant.structure.value] if variant.structure else []
    words += [f"to {str(variant.out_index_dtype).removeprefix('torch.')}"] if variant.out_index_dtype else []
    words += [f"{variant.alignment}-byte rows"] if variant.fmt else []
    words += [f"angles in {str(variant.rope).removeprefix('torch.')}"] if variant.rope else []
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class Report:
    """What a compiler made of one variant; it is ok if there are no `problems`.

    Of one lane: `registers` (vector registers on AMD), `spills` of them, `local_bytes` of local or scratch memory, and
    the bytes of its widest load and store of global memory; `instructions` of the machine. None where the target's code
    does not say. `vectors` says whether all rows move in accesses of 16 bytes, None where they need not.
    """

    op: str
    variant: str
    target: str
    problems: tuple[str, ...]
    registers: int | None = None
    spills: int | None = None
    local_bytes: int | None = None
    vectors: bool | None = None
    seconds: float = 0.0
    load_bytes: int | None = None
    store_bytes: int | None = None
    instructions: int | None = None

    @property
    def ok(self) -> bool:
        return not self.problems


def compile_all(
    targets: Sequence[Target],
    formats: Iterable[KVFormat],
    on_report: Callable[[], None] = lambda: None,
    processes: int | None = None,
) -> list[Report]:
    """A report for every variant of `formats` on every target, in order; by default in a process for every core.

    Kernels stay in Triton's cache, where a process on such a GPU finds them. Raises `ValueError` under
    `TRITON_INTERPRET=1`, and `PortaKVError` if a compiler takes its process down.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET: expected it unset, got 1, and the interpreter compiles nothing")
    variants = list_variants(formats)
    jobs = [(variant, target) for target in targets for variant in variants]
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), 1 + len(jobs) // 16)
    reports = []
    for report in _compile_jobs(jobs, processes):
        reports.append(report)
        on_report()
    return reports


def _compile_jobs(jobs: Sequence[tuple[Variant, Target]], processes: int) -> Iterator[Report]:
    if processes <= 1:
        yield from (compile_variant(*job) for job in jobs)
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # Not by fork: torch's threads and the command's progress bar hold locks.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(compile_variant, *zip(*jobs, strict=True))
        except BrokenProcessPool as e:
            raise PortaKVError(f"a compiling process died, of memory or of a fault in the compiler ({e})") from e


def compile_variant(variant: Variant, target: Target) -> Report:
    """Compile and inspect one variant; a compiler's error is a problem of the report."""
    start = time.perf_counter()
    launcher = target.launcher()
    names = (variant.op, variant_name(variant), target.name)
    try:
        compiled = launcher.compile(variant, target.triton())
        code = load(target.gpu.code)(compiled)
    except Exception as e:
        return Report(*names, (f"{type(e).__name__}: {' '.join(str(e).split())}",), seconds=time.perf_counter() - start)
    problems = [*code.problems]
    if code.spills or code.local_bytes or compiled.metadata.shared > EXCHANGED_BYTES.get(variant.op, 0):
        problems.append(f"{code.spills} spills, {code.local_bytes} bytes local, {compiled.metadata.shared} shared")
    vectors = code.moves_vectors if needs_vectors(variant) else None
    if vectors is False:
        problems.append(f"rows are not moved by 16 bytes: loads {dict(code.loads)}, stores {dict(code.stores)}")
    return Report(
        *(*names, tuple(problems), code.registers, code.spills, code.local_bytes, vectors),
        *(time.perf_counter() - start, max(code.loads, default=0), max(code.stores, default=0), code.instructions),
    )


def needs_vectors(variant: Variant) -> bool:
    """Whether rows only move, are aligned, and have 256 bytes or more."""
    fmt = variant.fmt
    if fmt is None or variant.dtype != fmt.dtype or variant.alignment < VECTOR_BYTES:
        return False
    return min(fmt.k_row_bytes, fmt.v_row_bytes) >= 256


EXCHANGED_BYTES = {"store_kv_flashmla": 64, "store_kv_rope": 8192, "store_kv_rope_flashmla": 8192}
"""Shared memory that a kernel may use: the scales of a program's blocks go from the lanes that made them to others;
Triton before 3.9 lays an element and its partner out differently, and brings them together there."""

COLUMNS = ("target", "Triton", "ok", "regs", "spills", "local B", "by 16 B")


def summarize(reports: Sequence[Report]) -> Iterator[tuple[str, ...]]:
    """`COLUMNS` of each target: the most registers, spills and local bytes of any variant, and how many of the row
    movers that must move 16 bytes at a time do."""
    version = triton_version()
    for target in dict.fromkeys(report.target for report in reports):
        mine = [report for report in reports if report.target == target]
        largest = [
            str(max(known)) if (known := [x for r in mine if (x := getattr(r, name)) is not None]) else "–"
            for name in ("registers", "spills", "local_bytes")
        ]
        moved = [r.vectors for r in mine if r.vectors is not None]
        yield target, version, f"{sum(r.ok for r in mine)}/{len(mine)}", *largest, f"{sum(moved)}/{len(moved)}"


def update_table(page: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown page with a table of `COLUMNS`, whose rows for these targets are replaced; the others stay.

    Raises `ValueError` for a page without such a table.
    """
    header = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    before, found, after = page.partition(header)
    if not found:
        raise ValueError(f"markdown: expected a page with the table {header.splitlines()[0]!r}")
    table = re.match(r"(?:\|.*\n)*", after)
    assert table is not None
    kept = {line.split(" | ")[0].strip("| "): line for line in table[0].splitlines()}
    kept |= {row[0]: f"| {' | '.join(row)} |" for row in rows}
    order = {name: i for i, name in enumerate(TARGETS)}
    lines = sorted(kept.items(), key=lambda item: order.get(item[0], len(order)))
    return before + header + "".join(f"{line}\n" for _, line in lines) + after[table.end() :]
