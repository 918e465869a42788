"""CPUs. The C++ kernels beside this are built per instruction set: AVX-512, AVX2, NEON and a baseline.

No kernel multiplies, so none needs AMX: the folder is named after the pages that AMX attention reads.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from portakv.device import Device, Package, Row


def build_problem() -> str | None:
    """Why this installation has no CPU extension, or None. Does not load it."""
    try:
        from portakv.kernels.cpu_amx._build import PROBLEM
    except ModuleNotFoundError:
        return "not built: Python imported a source tree; run it elsewhere, or install with `pip install -e .`"
    return PROBLEM


def _describe(at: torch.device) -> tuple[str, str, frozenset[str]]:
    return platform.machine(), _name(), _features()


def _name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _features() -> frozenset[str]:
    """Instruction sets that matter to a store, as torch reports them."""
    level = torch.backends.cpu.get_cpu_capability()
    found = {"AVX512": {"avx512", "avx2"}, "AVX2": {"avx2"}}.get(level, set())
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        found = found | {"amx"}
    return frozenset(found)


CPU = Device(
    name="cpu",
    torch_type="cpu",
    rows=(
        Row(
            "native",
            "portakv.kernels.cpu_amx.kernels:{op}",
            "portakv, C++",
            "native",
            layouts=("rows", "mla", "flashmla", "flashmla_v32", "cpu_amx", "cpu_vec"),
            checks=True,
            proof="executed on a CPU",
        ),
    ),
    built=lambda: f"{platform.machine()} with {torch.get_num_threads()} threads",
    count=lambda: 1,
    describe=_describe,
    packages={"native": lambda: Package(problem=build_problem())},
    packed=lambda features: ("cpu_amx", "cpu_vec")["amx" not in features :],
)
