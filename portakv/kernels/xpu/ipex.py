"""Intel GPUs without Triton: store_kv through the Intel Extension for PyTorch, if it is installed.

Its NHD store, `torch_ipex::reshape_and_cache_flash` (csrc/gpu/aten/operators/CacheOps.cpp of IPEX 2.8), takes keys and
values `[T, H, D]`, caches `[blocks, block, H, D]` and slots, and skips negative ones. It checks no bound, computes
slots and offsets in 32 bits, and takes the rows of a token, and the tokens of a block, to be dense. `prepare` keeps
the contract of slots around it. The op itself has not been run here: it exists only beside an Intel GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from portakv.formats import CANONICAL_NAN, FAULT_KINDS, KVFormat

Tensor = torch.Tensor

MAX_OFFSET = 2**31 - 1


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_inv: Tensor,
    v_inv: Tensor,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`portakv.kernels.reference.rows.store_kv` has the contract; here for unquantised formats of one head dim only."""
    if loc.shape[0] == 0:
        return
    # "auto" is the caches' own dtype; the scales of K and V are for fp8.
    _load()(*prepare(k, v, k_cache, v_cache, loc, faults, fmt), "auto", 1.0, 1.0)


@functools.cache
def _load() -> Callable[..., None]:
    importlib.import_module("intel_extension_for_pytorch")  # registers the op
    op: Callable[..., None] = torch.ops.torch_ipex.reshape_and_cache_flash
    return op


def prepare(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc: Tensor, faults: Tensor, fmt: KVFormat
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, caches and int32 slots as the op takes them; counts the slots out of range.

    Rows that lie otherwise or are of another float dtype are copied, the caches never. Nothing waits for the device.
    Raises `TypeError` and `ValueError` for what the op cannot store; nothing was counted then.
    """
    if fmt.fp8 is not None:
        raise TypeError(f"k_cache: expected an unquantised format, got {fmt.dtype}")
    if fmt.head_dim != fmt.v_head_dim:
        raise ValueError(f"v_cache: expected the head dim of K, {fmt.head_dim}, got {fmt.v_head_dim}")
    k_blocks, v_blocks = _blocks("k_cache", k_cache, fmt), _blocks("v_cache", v_cache, fmt)
    if k_blocks.shape[:2] != v_blocks.shape[:2] or k_blocks.stride(0) != v_blocks.stride(0):
        got = f"{tuple(v_blocks.shape)} with strides {v_blocks.stride()}"
        raise ValueError(f"v_cache: expected blocks as K's, {tuple(k_blocks.shape)} of {k_blocks.stride(0)}, got {got}")
    rows = _rows("k", k, fmt), _rows("v", v, fmt)
    num_slots = k_blocks.shape[0] * k_blocks.shape[1]
    over = loc >= num_slots
    faults[FAULT_KINDS.index("store_kv")] += over.sum()
    # Before the op narrows them: -2^62 would become slot 0.
    slots = torch.where(over | (loc < fmt.page_size), -1, loc).to(torch.int32)
    return *rows, k_blocks, v_blocks, slots


def _blocks(name: str, cache: Tensor, fmt: KVFormat) -> Tensor:
    """A cache as `[blocks, block, H, D]`; a row cache is one of blocks of one slot, whose stride may be any."""
    blocks = cache.unsqueeze(1) if cache.dim() == 3 else cache
    _, block, heads, dim = blocks.shape
    _, slot_stride, head_stride, _ = blocks.stride()
    if (heads > 1 and head_stride != dim) or (block > 1 and slot_stride != heads * dim):
        raise ValueError(f"{name}: expected blocks of dense [slot, head, dim], got strides {cache.stride()}")
    _check_span(name, blocks)
    return blocks


def _rows(name: str, x: Tensor, fmt: KVFormat) -> Tensor:
    """`x` by value in the storage dtype, with the heads of a token side by side."""
    if x.dtype != fmt.dtype:
        bits = {2: torch.int16, 4: torch.int32}[fmt.dtype.itemsize]
        x = torch.where(x.isnan(), CANONICAL_NAN[fmt.dtype], x.to(fmt.dtype).view(bits)).to(bits).view(fmt.dtype)
    _, heads, dim = x.shape
    if heads > 1 and x.stride(1) != dim:
        x = x.contiguous()
    _check_span(name, x)
    return x


def _check_span(name: str, x: Tensor) -> None:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if last > MAX_OFFSET:
        raise ValueError(f"{name}: expected at most {MAX_OFFSET} elements from its first to its last, got {last}")
