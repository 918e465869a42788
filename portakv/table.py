"""The dispatch table: op x device kind -> kernels in order of preference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portakv.device import DeviceKind
from portakv.formats import FLOAT_DTYPES, Layout

CUDA, HIP, XPU, CPU, OTHER = DeviceKind
ON_GPU = "interpreted, compiled code executed without the hardware; not yet run on a GPU"
ON_XPU = "interpreted, compiled code (SPIR-V) executed without the hardware; not yet run on a GPU"
ON_CPU = "executed on a CPU"


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel: its name, "module:function" in `portakv.kernels`, what it needs, and where it comes from.

    A function is named after its op on every device. `package` is a key of `DeviceFacts.packages` with its oldest
    version that serves, `backend` a compiler backend inside it. Of the caches, `layouts` and `dtypes` are those it can
    store (None: every dtype), `equal_dims` asks for one head dim of K and V, `max_elements` bounds K or V of a layer.
    A row that `checks` refuses bad arguments itself, before it writes. `proof` is how its bytes were shown to be right.
    """

    name: str
    target: str
    origin: str
    package: str | None = None
    backend: str | None = None
    layouts: tuple[Layout, ...] = (Layout.ROWS, Layout.MLA, Layout.FLASHMLA, Layout.FLASHMLA_V32)
    checks: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    equal_dims: bool = False
    max_elements: int | None = None
    proof: str = ON_CPU


REFERENCE = Row("reference", "reference:{op}", "portakv, in torch ops")
REFERENCE_FLASHMLA = Row("reference", "reference_flashmla:{op}", "portakv, in torch ops")
NATIVE = Row("native", "cpu_amx:{op}", "portakv, C++", "native", checks=True)
PACKED = (Layout.CPU_AMX, Layout.CPU_VEC)
REFERENCE_PACKED = Row("reference", "reference_packed:{op}", "portakv, in torch ops", layouts=PACKED)
NATIVE_PACKED = Row("native", "cpu_amx:{op}", "portakv, C++", "native", layouts=PACKED, checks=True)
TRITON_CUDA = Row("triton", "cuda:{op}", "portakv, Triton", "triton>=3.3", "nvidia", proof=ON_GPU)
TRITON_HIP = Row("triton", "hip:{op}", "portakv, Triton", "triton>=3.3", "amd", proof=ON_GPU)
TRITON_XPU = Row("triton", "xpu:{op}", "portakv, Triton", "triton>=3.3", "intel", proof=ON_XPU)
# Its kernel has one stride and one head dim for K and V, and 32-bit offsets; what it converts is rounded otherwise.
IPEX = Row(
    "ipex",
    "ipex:{op}",
    "IPEX",
    "ipex>=2.8",
    layouts=(Layout.ROWS,),
    dtypes=FLOAT_DTYPES,
    equal_dims=True,
    max_elements=2**31 - 1,
    proof="never run",
)
EVERYWHERE: dict[DeviceKind, tuple[Row, ...]] = {
    CUDA: (TRITON_CUDA, REFERENCE),
    HIP: (TRITON_HIP, REFERENCE),
    XPU: (TRITON_XPU, REFERENCE),
    CPU: (NATIVE, REFERENCE),
    OTHER: (REFERENCE,),
}
ON_CPUS: dict[DeviceKind, tuple[Row, ...]] = dict.fromkeys(DeviceKind, (REFERENCE_PACKED,))
ON_CPUS |= {CPU: (NATIVE_PACKED, REFERENCE_PACKED)}
FLASHMLA = {kind: (*rows[:-1], REFERENCE_FLASHMLA) for kind, rows in EVERYWHERE.items()}
TABLE: dict[str, dict[DeviceKind, tuple[Row, ...]]] = {
    "translate_loc": EVERYWHERE,
    "cast_loc": EVERYWHERE,
    "patch_map": EVERYWHERE,
    "build_read": EVERYWHERE,
    "store_kv": EVERYWHERE | {XPU: (TRITON_XPU, IPEX, REFERENCE)},
    "gather_kv": EVERYWHERE,
    "move_kv": EVERYWHERE,
    "store_kv_rope": EVERYWHERE,
    "store_kv_flashmla": FLASHMLA,
    "store_kv_rope_flashmla": FLASHMLA,
    "gather_kv_flashmla": FLASHMLA,
    "store_kv_packed": ON_CPUS,
    "gather_kv_packed": ON_CPUS,
    "move_kv_packed": ON_CPUS,
}
HOST_TABLE: dict[str, dict[DeviceKind, tuple[Row, ...]]] = {"measure_read": {CPU: (NATIVE, REFERENCE)}}
"""What launches nothing and answers a caller: it runs on the host for pools of every device."""
