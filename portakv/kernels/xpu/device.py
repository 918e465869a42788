"""Intel GPUs, where Triton has an Intel backend or Intel's extension for PyTorch is installed."""

from __future__ import annotations

from typing import Any

import torch

from portakv.device import Device, Gpu, Package, Row, find_distribution, find_triton

_INTEL = {
    "platform_name": "Intel(R) oneAPI Unified Runtime over Level-Zero",
    "vendor": "Intel(R) Corporation",
    "version": "",
    "max_work_group_size": 1024,
    "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32],
    "has_fp64": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_subgroup_2d_block_io": True,
    "has_bfloat16_conversions": True,
}
# `architecture` is SYCL's number of a GPU: its IP version, 12.60.7 and 20.1.4, from bit 8 up.
_GPUS = {
    "pvc": {
        "name": "Data Center GPU Max 1550",
        "architecture": 0x30F000700,
        "gpu_eu_count": 448,
        "gpu_subslice_count": 56,
    },
    "bmg": {"name": "Arc B580", "architecture": 0x500400400, "gpu_eu_count": 160, "gpu_subslice_count": 20},
}


def _built() -> str | None:
    compiled = getattr(getattr(torch, "xpu", None), "_is_compiled", lambda: False)()
    return "XPU" if compiled else None


def _describe(at: torch.device) -> tuple[str, str, frozenset[str]]:
    name = torch.xpu.get_device_properties(at).name
    return name, name, frozenset()


def find_intels_triton() -> Package:
    """Intel's build and the stock one install one `triton/`, and the stock one serves no Intel GPU."""
    found = find_triton("xpu")
    stock, own = find_distribution("triton").version, find_distribution("triton-xpu", "pytorch-triton-xpu").version
    if stock is None or found.problem == "not installed":
        return found
    lies = f"over Intel's {own}" if own else "where Intel's should be"
    return Package(
        stock,
        f"the stock {stock} lies {lies}: uninstall triton, then reinstall triton-xpu from PyTorch's XPU index",
    )


def find_ipex() -> Package:
    """Intel's extension, which ends the process when imported beside a torch of another minor version."""
    found = find_distribution("intel_extension_for_pytorch")
    if found.version is None:
        return found
    if "xpu" not in found.version:
        return Package(found.version, f"{found.version} is not a build for XPU")
    torch_minor, own_minor = (v.split(".")[:2] for v in (torch.__version__, found.version))
    if torch_minor != own_minor:
        return Package(found.version, f"{found.version} needs torch {'.'.join(own_minor)}, not {torch.__version__}")
    return found


MAX_ELEMENTS = 2**31 - 1


def ipex_refuses(fmt: Any, num_rows: int) -> str | None:
    """Its kernel has one stride and one head dim for K and V, and 32-bit offsets, and rounds otherwise."""
    if fmt.fp8 is not None:
        return f"cannot store {fmt.dtype}"
    if fmt.head_dim != fmt.v_head_dim:
        return f"needs one head dim of K and V, not {fmt.head_dim} and {fmt.v_head_dim}"
    elements = num_rows * fmt.num_kv_heads * fmt.head_dim
    return f"addresses {MAX_ELEMENTS} elements of a cache, not {elements}" if elements > MAX_ELEMENTS else None


XPU = Device(
    name="xpu",
    torch_type="xpu",
    rows=(
        Row(
            "triton",
            "portakv.kernels.xpu.kernels:{op}",
            "portakv, Triton",
            "triton>=3.3",
            proof="interpreted, compiled code (SPIR-V) executed without the hardware; not yet run on a GPU",
        ),
        Row(
            "ipex",
            "portakv.kernels.xpu.ipex:{op}",
            "IPEX",
            "ipex>=2.8",
            ops=("store_kv",),
            layouts=("rows",),
            refuses=ipex_refuses,
            proof="never run",
        ),
    ),
    built=_built,
    count=lambda: torch.xpu.device_count(),
    describe=_describe,
    packages={"triton": find_intels_triton, "ipex": find_ipex},
    pinned=True,
    graph="XPUGraph",
    gpu=Gpu(
        backend="xpu",
        targets=("pvc", "bmg"),
        parse=lambda name: (_INTEL | _GPUS[name], 32) if name in _GPUS else None,
        # Two 16-byte vectors a lane, of K and of V each; the backend compiles for sub-groups of 32.
        tiles={32: ((1 << 20, 4096, 4),)},
        code="portakv.inspection:read_xpu",
        executor=("portakv.conformance.executors.spirv", "spv"),
    ),
)
