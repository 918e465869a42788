"""S15: head dims and head counts that are no powers of two: exact rows, and not a byte beside them."""

from __future__ import annotations

import pytest
import torch

from portakv import testing
from portakv.formats import KVFormat
from portakv.kernels.reference import rows as reference

ROWS, TOKENS = 23, 7


def cache(heads, dim, dtype, device):
    """A row cache between canary bytes, all of its rows canaries too."""
    return testing.canary((ROWS, heads, dim), dtype).to(device)


def bytes_of(buffer):
    return buffer.storage.view(torch.uint8).cpu()


@pytest.mark.parametrize("heads", [1, 3, 6])
@pytest.mark.parametrize("dim", [1, 5, 80, 96, 192, 576])
@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.float8_e5m2),
    ],
    ids=str,
)
def test_rows_and_nothing_beside_them(kernel, backend, heads, dim, source, dtype):
    device, _ = backend
    v_dim = dim // 2 + 1
    fmt = KVFormat(heads, dim, v_dim, dtype)
    loc = torch.randperm(ROWS - 1)[:TOKENS].to(device) + 1
    inv, faults = torch.full((heads,), 2.0, device=device), testing.faults().to(device)
    rows = [torch.randn(TOKENS, heads, d).to(source).to(device) for d in (dim, v_dim)]
    caches = [cache(heads, d, dtype, device) for d in (dim, v_dim)]
    kernel("store_kv")(*rows, *(c.tensor for c in caches), loc, inv, inv, faults.tensor, fmt)

    expected = [cache(heads, d, dtype, torch.device("cpu")) for d in (dim, v_dim)]
    for image, x in zip(expected, rows, strict=True):
        stored = reference.convert(x.cpu(), fmt, inv.cpu())
        image.tensor.view(torch.uint8)[loc.cpu()] = stored.view(torch.uint8)
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(bytes_of(got), bytes_of(want))

    outs = [testing.canary((TOKENS, heads, d), dtype).to(device) for d in (dim, v_dim)]
    scale = 1 / inv
    kernel("gather_kv")(*(c.tensor for c in caches), loc, *(o.tensor for o in outs), scale, scale, faults.tensor, fmt)
    for out, c, d in zip(outs, caches, (dim, v_dim), strict=True):
        want = testing.canary((TOKENS, heads, d), dtype)
        want.tensor.view(torch.uint8)[:] = c.tensor.view(torch.uint8)[loc].cpu()
        assert torch.equal(bytes_of(out), bytes_of(want))
    assert not faults.tensor.any()
