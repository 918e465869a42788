"""What Intel GPUs add, as far as a machine without one can tell: which Triton is there, and how IPEX's store is asked.

IPEX's op is not run, nor stood in for: these tests read the arguments it would get.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from portakv import dispatch
from portakv.device import DeviceFacts, Package
from portakv.dispatch import Request, select
from portakv.errors import NoKernel
from portakv.formats import CANONICAL_NAN, FAULT_KINDS, FLOAT_DTYPES, KVFormat
from portakv.kernels.xpu import ipex
from portakv.kernels.xpu.device import find_intels_triton, find_ipex

Tensor = torch.Tensor

FMT = KVFormat(2, 8, 8, torch.bfloat16, page_size=4)
IPEX_ONLY = DeviceFacts(
    dispatch.XPU, packages={"triton": Package(problem="not installed"), "ipex": Package("2.8.10+xpu")}
)


def arguments(fmt: KVFormat = FMT, tokens: int = 3, num_rows: int = 16) -> dict[str, Tensor]:
    rows = (tokens, fmt.num_kv_heads, fmt.head_dim)
    k, v = torch.randn(2, *rows).to(fmt.dtype)
    k_cache, v_cache = (torch.zeros((num_rows, *rows[1:]), dtype=fmt.dtype) for _ in "kv")
    faults = torch.zeros(len(FAULT_KINDS), dtype=torch.int64)
    return {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "loc": torch.tensor([4, 9, 15]), "faults": faults}


def test_ipex_slots() -> None:
    """32-bit, -1 for all that must be skipped, and no slot that narrowing would bring back into the cache."""
    args = arguments()
    odd = [-1, -(2**31), 0, 3, 4, 15, 16, 2**31 - 1]
    for dtype, more, over in ((torch.int32, [], 2), (torch.int64, [2**31, 2**32 + 5, -(2**62)], 4)):
        args["faults"].zero_()
        args["loc"] = torch.tensor([odd + more, [99] * len(odd + more)], dtype=dtype).t()[:, 0]
        *_, slots = ipex.prepare(**args, fmt=FMT)
        assert slots.dtype is torch.int32
        assert slots.is_contiguous()
        assert slots.tolist() == [-1, -1, -1, -1, 4, 15, -1, -1] + [-1] * len(more)
        assert args["faults"].tolist() == [over if kind == "store_kv" else 0 for kind in FAULT_KINDS]


def test_ipex_takes_the_pools_own_memory() -> None:
    args = arguments()
    k, v, k_blocks, v_blocks, _ = ipex.prepare(**args, fmt=FMT)
    assert k_blocks.shape == v_blocks.shape == (16, 1, 2, 8)
    for got, own in ((k, "k"), (v, "v"), (k_blocks, "k_cache"), (v_blocks, "v_cache")):
        assert got.data_ptr() == args[own].data_ptr()


def test_ipex_caches() -> None:
    """Rows any distance apart, and pages with anything between them, are still views."""
    args = arguments()
    apart = [torch.zeros((16, 5, 8), dtype=FMT.dtype)[:, 1:3] for _ in "kv"]
    pages = [torch.zeros((4, 2, 4, 2, 8), dtype=FMT.dtype)[:, 1] for _ in "kv"]
    for caches, shape, stride in ((apart, (16, 1, 2, 8), 40), (pages, (4, 4, 2, 8), 128)):
        args["k_cache"], args["v_cache"] = caches
        _, _, k_blocks, v_blocks, slots = ipex.prepare(**args, fmt=FMT)
        for blocks, cache in ((k_blocks, caches[0]), (v_blocks, caches[1])):
            assert blocks.shape == shape
            assert blocks.stride(0) == stride
            assert blocks.data_ptr() == cache.data_ptr()
        # Slot s is block s // block, position s % block.
        flat = torch.arange(16).view(shape[:2])
        assert [tuple((flat == s).nonzero()[0].tolist()) for s in slots.tolist()] == [
            (s // shape[1], s % shape[1]) for s in (4, 9, 15)
        ]


def test_ipex_rows() -> None:
    """Columns of a fused projection as they lie; head-major rows are copied; other floats are converted by value."""
    args = arguments()
    fused = torch.randn(3, 6, 8).to(FMT.dtype)
    args["k"], args["v"] = fused[:, 2:4], torch.randn(2, 3, 8).to(FMT.dtype).transpose(0, 1)
    k, v, *_ = ipex.prepare(**args, fmt=FMT)
    assert (k.data_ptr(), k.stride()) == (fused[:, 2:4].data_ptr(), (48, 8, 1))
    assert v.stride() == (16, 8, 1)
    assert torch.equal(v, args["v"])

    args["k"] = torch.randn(3, 2, 8)
    args["k"][1, 1, 3:5] = torch.tensor([float("nan"), float("inf")])
    args["k"][2].view(torch.int32)[0, 0] = -1  # a NaN with a sign and a payload
    k, *_ = ipex.prepare(**args, fmt=FMT)
    want = args["k"].to(FMT.dtype).view(torch.int16)
    want[args["k"].isnan()] = CANONICAL_NAN[FMT.dtype]
    assert torch.equal(k.view(torch.int16), want)


def far(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=FMT.dtype, device="meta")


REFUSED: list[tuple[dict[str, Tensor], KVFormat, type[Exception], str]] = [
    ({}, KVFormat(2, 8, 8, torch.float8_e4m3fn), TypeError, "expected an unquantised format, got torch.float8_e4m3fn"),
    ({}, KVFormat(2, 8, 16, torch.bfloat16), ValueError, "v_cache: expected the head dim of K, 8, got 16"),
    ({"k_cache": torch.zeros(16, 2, 9, dtype=FMT.dtype)[..., :8]}, FMT, ValueError, r"k_cache: .*strides \(18, 9, 1\)"),
    (
        {"v_cache": torch.zeros(4, 2, 4, 8, dtype=FMT.dtype).transpose(1, 2)},
        FMT,
        ValueError,
        "v_cache: expected blocks of",
    ),
    (
        {"v_cache": torch.zeros(16, 4, 8, dtype=FMT.dtype)[:, :2]},
        FMT,
        ValueError,
        r"as K's, .* of 16, got .*strides \(32",
    ),
    ({"v_cache": torch.zeros(12, 2, 8, dtype=FMT.dtype)}, FMT, ValueError, r"as K's, \(16, 1, 2, 8\)"),
    ({"k_cache": far((16, 2, 8), (2**28, 8, 1))}, FMT, ValueError, "k_cache: expected at most 2147483647 elements"),
    ({"v": far((3, 2, 8), (2**30, 8, 1))}, FMT, ValueError, "v: expected at most 2147483647 elements"),
]


@pytest.mark.parametrize(("changed", "fmt", "error", "message"), REFUSED)
def test_ipex_refuses_before_anything_changed(
    changed: dict[str, Tensor], fmt: KVFormat, error: type[Exception], message: str
) -> None:
    args = arguments() | {"loc": torch.tensor([4, 99, 15])} | changed
    with pytest.raises(error, match=message):
        ipex.prepare(**args, fmt=fmt)
    assert not args["faults"].any()


def test_ipex_without_tokens_asks_for_nothing() -> None:
    args = arguments(tokens=0) | {"loc": torch.zeros(0, dtype=torch.int64)}
    faults = args.pop("faults")
    ipex.store_kv(*args.values(), torch.ones(2), torch.ones(2), faults, FMT)


def test_ipex_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(ipex, "_load", lambda: lambda *args: calls.append(args))
    args = arguments()
    faults = args.pop("faults")
    ipex.store_kv(*args.values(), torch.ones(2), torch.ones(2), faults, FMT)
    ((*tensors, slots, dtype, k_scale, v_scale),) = calls
    assert [t.data_ptr() for t in tensors if isinstance(t, Tensor)] == [t.data_ptr() for t in list(args.values())[:4]]
    assert isinstance(slots, Tensor)
    assert slots.tolist() == [4, 9, 15]
    assert (dtype, k_scale, v_scale) == ("auto", 1.0, 1.0)


def test_ipex_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from portakv.kernels.xpu import ipex"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ipex_serves_what_it_can_keep() -> None:
    for dtype in FLOAT_DTYPES:
        chosen = select("store_kv", IPEX_ONLY, Request(KVFormat(8, 128, 128, dtype, 16), num_rows=2**20))
        assert chosen.row.name == "ipex"
    for op in dispatch.OPS.keys() - {"store_kv"}:
        assert select(op, IPEX_ONLY).row.name == "reference"


@pytest.mark.parametrize(
    ("fmt", "num_rows", "reason"),
    [
        (KVFormat(8, 128, 128, torch.float8_e5m2), 16, "cannot store torch.float8_e5m2"),
        (KVFormat(8, 192, 128, torch.bfloat16), 16, "needs one head dim of K and V, not 192 and 128"),
        (KVFormat(8, 128, 128, torch.bfloat16), 2**21, "addresses 2147483647 elements of a cache, not 2147483648"),
    ],
)
def test_ipex_is_passed_over(fmt: KVFormat, num_rows: int, reason: str) -> None:
    chosen = select("store_kv", IPEX_ONLY, Request(fmt, num_rows=num_rows))
    assert chosen.row.name == "reference"
    assert {row.name: why for row, why in chosen.rejected}["ipex"] == reason
    with pytest.raises(NoKernel, match=reason):
        select("store_kv", IPEX_ONLY, Request(fmt, "ipex", num_rows=num_rows))
    assert dispatch.select_all(IPEX_ONLY, {}, formats={"store_kv": fmt}, num_rows=num_rows)["store_kv"] == chosen


Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Pretend that exactly these distributions are there."""

    def install(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


@pytest.mark.parametrize(
    ("versions", "lies"), [({"triton-xpu": "3.5.0"}, "over Intel's 3.5.0"), ({}, "where Intel's should be")]
)
def test_stock_triton_in_the_place_of_intels(installed: Installed, versions: dict[str, str], lies: str) -> None:
    """Also where the Intel backend's folder is left over: its library is the stock one, which lacks that backend."""
    installed({"triton": "3.7.1"} | versions)
    found = find_intels_triton()
    assert found.problem is not None
    assert f"the stock 3.7.1 lies {lies}" in found.problem
    chosen = select("store_kv", DeviceFacts(dispatch.XPU, packages={"triton": found}))
    assert chosen.row.name == "reference"
    assert f"the stock 3.7.1 lies {lies}" in chosen.rejected[0][1]


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("2.8.10+xpu", None),
        ("2.8.0", "2.8.0 is not a build for XPU"),
        ("2.7.10+xpu", "2.7.10+xpu needs torch 2.7, not 2.8.0+xpu"),
        (None, "not installed"),
    ],
)
def test_which_ipex(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, version: str | None, problem: str | None
) -> None:
    installed({"intel_extension_for_pytorch": version} if version else {})
    monkeypatch.setattr(torch, "__version__", "2.8.0+xpu")
    assert find_ipex().problem == problem
