"""S19: every call that moves rows works in all four fp8 dialects, whatever torch has for them."""

from __future__ import annotations

import pytest
import torch

from portakv import LayerSpec
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS
from portakv.kernels.reference import rows as reference

T, H, D, DV = 12, 2, 24, 16
LAYERS = [LayerSpec(None, H, D, DV), LayerSpec(8, H, D, DV)]


def raw(x):
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("source", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_store_gather_move_and_host_copies(make_pool, dtype, source, page):
    pool = make_pool(LAYERS, size=48, swa_size=32, page_size=page, dtype=dtype)
    k, v = (torch.randn(T, H, dim).mul(50).to(source) for dim in (D, DV))
    loc = pool.allocator.alloc(T)
    for layer in (0, 1):
        pool.set_scales(layer, [0.5, 3.0][layer], torch.tensor([2.0, 0.1]))
        pool.set_kv_buffer(layer, pool.plan_write(loc), k.to(pool.device), v.to(pool.device))

    target = pool.allocator.alloc(T)
    pool.move_kv_cache(target, loc)
    copied = pool.load_from_host(pool.copy_to_host(loc[:8]))
    for layer, k_scale in ((0, 0.5), (1, 3.0)):
        expected = []
        for x, scale in ((k, torch.full((H,), k_scale)), (v, torch.tensor([2.0, 0.1]))):
            expected.append(reference.quantise(x, FP8_DIALECTS[dtype], 1 / scale))
        for slots, n in ((loc, T), (target, T), (copied, 8)):
            where = pool.plan_write(slots)
            for got, want in zip(pool.gather_kv(layer, where), expected, strict=True):
                assert torch.equal(raw(got), raw(want[:n]))
            for out in FLOAT_DTYPES:
                got, _ = pool.gather_kv(layer, where, dtype=out)
                want = (expected[0][:n].float() * k_scale).to(out)
                assert torch.equal(raw(got), raw(want))
    assert not any(pool.faults().values())
    pool.check_integrity()
