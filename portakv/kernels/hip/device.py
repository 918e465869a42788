"""AMD GPUs: CDNA with waves of 64 lanes, RDNA with waves of 32."""

from __future__ import annotations

import functools
import re

import torch

from portakv.device import Device, Gpu, Row, find_triton


def _describe(at: torch.device) -> tuple[str, str, frozenset[str]]:
    found = torch.cuda.get_device_properties(at)
    return found.gcnArchName.split(":")[0], found.name, frozenset()


def _fp8(arch: str) -> torch.dtype:
    """CDNA 3 reads the fnuz form, all others the OCP form."""
    return torch.float8_e4m3fnuz if arch in ("gfx940", "gfx941", "gfx942") else torch.float8_e4m3fn


def _parse(name: str) -> tuple[str, int] | None:
    if not re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
        return None
    return name, 64 if name.startswith("gfx9") else 32


HIP = Device(
    name="hip",
    torch_type="cuda",
    rows=(
        Row(
            "triton",
            "portakv.kernels.hip.kernels:{op}",
            "portakv, Triton",
            "triton>=3.3",
            proof="interpreted, compiled code executed without the hardware; not yet run on a GPU",
        ),
    ),
    built=lambda: f"ROCm {torch.version.hip}" if torch.version.hip else None,
    count=lambda: torch.cuda.device_count(),  # through amdsmi first, which creates no context
    describe=_describe,
    packages={"triton": functools.partial(find_triton, "hip")},
    fp8=_fp8,
    pinned=True,
    graph="CUDAGraph",
    gpu=Gpu(
        backend="hip",
        targets=("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"),
        parse=_parse,
        # One 16-byte vector a lane of a wave64, two of a wave32. A smaller tile leaves 8-byte accesses on CDNA.
        tiles={64: ((1 << 20, 4096, 4),), 32: ((1 << 20, 4096, 4),)},
        code="portakv.inspection:read_hip",
        executor=("portakv.conformance.executors.gcn", "amdgcn"),
    ),
)
