"""NVIDIA GPUs, sm_80 and newer."""

from __future__ import annotations

import functools
import re

import torch

from portakv.device import Device, Gpu, Row, find_triton


def _built() -> str | None:
    # torch for ROCm calls AMD's GPUs "cuda".
    return f"CUDA {torch.version.cuda}" if torch.version.cuda and not torch.version.hip else None


def _describe(at: torch.device) -> tuple[str, str, frozenset[str]]:
    found = torch.cuda.get_device_properties(at)
    return f"sm_{found.major}{found.minor}", found.name, frozenset()


def _parse(name: str) -> tuple[int, int] | None:
    return (int(name.removeprefix("sm_")), 32) if re.fullmatch(r"sm_\d{2,3}", name) else None


CUDA = Device(
    name="cuda",
    torch_type="cuda",
    rows=(
        Row(
            "triton",
            "portakv.kernels.cuda.kernels:{op}",
            "portakv, Triton",
            "triton>=3.3",
            proof="interpreted, compiled code executed without the hardware; not yet run on a GPU",
        ),
    ),
    built=_built,
    count=lambda: torch.cuda.device_count(),  # through NVML first, which creates no context
    describe=_describe,
    packages={"triton": functools.partial(find_triton, "cuda")},
    pinned=True,
    graph="CUDAGraph",
    gpu=Gpu(
        backend="cuda",
        targets=("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"),
        parse=_parse,
        # Two 16-byte vectors a lane, of K and of V each. Heads of 32 bytes and less are rare and mostly tests.
        tiles={32: ((32, 1024, 2), (1 << 20, 4096, 4))},
        code="portakv.inspection:read_cuda",
        executor=("portakv.conformance.executors.ptx", "ptx"),
    ),
)
