"""S9: slot times row bytes past 2**31 and 2**32, in every op that moves rows, by slot and by stride.

The caches are uninitialised: on a CPU, memory that no test touches costs none.
"""

from __future__ import annotations

import pytest
import torch

from portakv.formats import FAULT_KINDS, KVFormat

SLOTS = (1, 3_728_270, 3_728_271, 4_000_000, 7_456_541, 7_500_000)
"""Around 2**31 and 2**32 bytes in rows of 576: slots 3_728_271 and 7_456_541 begin behind them."""


@pytest.fixture
def faults(backend):
    return torch.zeros(len(FAULT_KINDS), dtype=torch.int64, device=backend[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=str)
def test_rows_past_2_32_bytes(kernel, backend, faults, dtype, width):
    device, _ = backend
    fmt = KVFormat(1, 576 // dtype.itemsize, 16, dtype)
    assert fmt.k_row_bytes == 576
    k_cache, v_cache = (
        torch.empty((1, SLOTS[-1] + 1, 1, dim), dtype=dtype, device=device) for dim in (fmt.head_dim, 16)
    )
    assert k_cache.nbytes > 2**32
    loc, one = torch.tensor(SLOTS, dtype=width, device=device), torch.ones(1, device=device)
    k, v = (torch.randn(len(SLOTS), 1, dim).to(dtype).to(device) for dim in (fmt.head_dim, 16))

    kernel("store_kv")(k, v, k_cache[0], v_cache[0], loc, one, one, faults, fmt)
    for i, slot in enumerate(SLOTS):
        assert torch.equal(k_cache[0, slot].view(torch.uint8), k[i].view(torch.uint8)), slot
        assert torch.equal(v_cache[0, slot].view(torch.uint8), v[i].view(torch.uint8)), slot
    outs = torch.zeros_like(k), torch.zeros_like(v)
    kernel("gather_kv")(k_cache[0], v_cache[0], loc, *outs, one, one, faults, fmt)
    for got, want in zip(outs, (k, v), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    kernel("move_kv")(k_cache, v_cache, loc[:3], loc[3:], faults, fmt)
    for i, slot in enumerate(SLOTS[:3]):
        assert torch.equal(k_cache[0, slot].view(torch.uint8), k[3 + i].view(torch.uint8)), slot
    assert not faults.any()


@pytest.mark.parametrize(
    ("size", "stride", "row"),
    [((4, 2, 8), (8, 2**31 + 64, 1), (3,)), ((2, 2, 2, 8), (2**31 + 64, 16, 8, 1), (1, 1))],
    ids=["head", "page"],
)
def test_strides_past_2_32_bytes(kernel, backend, faults, size, stride, row):
    device, _ = backend
    fmt = KVFormat(2, 8, 8, torch.bfloat16, page_size=2)
    storage = torch.empty(2**31 + 2048, dtype=torch.bfloat16, device=device)
    caches = [storage.as_strided(size, stride, offset) for offset in (0, 1024)]
    k, v = (torch.randn(1, 2, 8).to(torch.bfloat16).to(device) for _ in range(2))
    loc, one = torch.tensor([3], device=device), torch.ones(2, device=device)
    kernel("store_kv")(k, v, *caches, loc, one, one, faults, fmt)
    assert torch.equal(caches[0][row], k[0])
    assert torch.equal(caches[1][row], v[0])
    outs = torch.zeros_like(k), torch.zeros_like(v)
    kernel("gather_kv")(*caches, loc, *outs, one, one, faults, fmt)
    assert torch.equal(outs[0], k)
    assert torch.equal(outs[1], v)
