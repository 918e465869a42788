"""S26: one scale per tensor or KV head reaches every store and every read of its layer."""

from __future__ import annotations

import contextlib

import pytest
import torch

from portakv import LayerSpec
from portakv.formats import FP8_DIALECTS
from portakv.kernels.reference import rows as reference

T, H, D, DV = 6, 2, 16, 24
FP8 = torch.float8_e4m3fn


@pytest.fixture
def rows(backend):
    device, _ = backend
    return torch.randn(T, H, D).to(torch.bfloat16).to(device), torch.randn(T, H, DV).to(torch.bfloat16).to(device)


def build(make_pool, dtype=FP8, layers=1):
    pool = make_pool([LayerSpec(None, H, D, DV)] * layers, size=16, dtype=dtype)
    return pool, pool.plan_write(pool.allocator.alloc(T))


def stored(pool, write_loc, layer=0):
    return [x.view(torch.uint8).cpu() for x in pool.gather_kv(layer, write_loc)]


@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_unequal_scales_are_not_swapped(make_pool, rows, dtype):
    pool, write_loc = build(make_pool, dtype)
    pool.set_scales(0, 0.5, 2.0)
    copies = [x.clone() for x in rows]
    pool.set_kv_buffer(0, write_loc, *rows)
    for x, copy in zip(rows, copies, strict=True):
        assert torch.equal(x, copy)
    for got, x, scale in zip(stored(pool, write_loc), rows, (0.5, 2.0), strict=True):
        want = reference.quantise(x.cpu(), FP8_DIALECTS[dtype], torch.full((H,), 1 / scale))
        assert torch.equal(got, want.view(torch.uint8))
    step = 2.0 ** -FP8_DIALECTS[dtype].mantissa_bits
    for got, x in zip(pool.gather_kv(0, write_loc, dtype=torch.float32), rows, strict=True):
        torch.testing.assert_close(got, x.float(), rtol=step / 2, atol=1e-2)


FORMS = {
    "float": 0.75,
    "0-d": torch.tensor(0.75),
    "one element": torch.tensor([0.75]),
    "float64": torch.tensor(0.75, dtype=torch.float64),
    "bfloat16": torch.tensor(0.75, dtype=torch.bfloat16),
    "per head": torch.tensor([0.75, 0.75]),
    "a parameter": torch.nn.Parameter(torch.tensor([0.75])),
}


@pytest.mark.parametrize("scale", FORMS.values(), ids=FORMS)
def test_every_form_of_a_scale_is_the_same(make_pool, rows, scale):
    images = []
    for given in (0.75, scale):
        pool, write_loc = build(make_pool)
        pool.set_scales(0, given, given)
        pool.set_kv_buffer(0, write_loc, *rows)
        images.append(stored(pool, write_loc))
    for a, b in zip(*images, strict=True):
        assert torch.equal(a, b)


def test_none_is_one_and_undoes_what_was_set(make_pool, rows):
    pool, write_loc = build(make_pool)
    pool.set_kv_buffer(0, write_loc, *rows)
    plain = stored(pool, write_loc)
    pool.set_scales(0, 3.0, 5.0)
    pool.set_scales(0, None, None)
    pool.set_kv_buffer(0, write_loc, *rows)
    assert all(torch.equal(a, b) for a, b in zip(stored(pool, write_loc), plain, strict=True))


def test_one_scale_per_kv_head(make_pool, rows):
    pool, write_loc = build(make_pool)
    pool.set_scales(0, torch.tensor([0.5, 4.0]), torch.tensor([2.0, 0.25]))
    pool.set_kv_buffer(0, write_loc, *rows)
    for got, x, scales in zip(stored(pool, write_loc), rows, ([0.5, 4.0], [2.0, 0.25]), strict=True):
        want = reference.quantise(x.cpu(), FP8_DIALECTS[FP8], 1 / torch.tensor(scales))
        assert torch.equal(got, want.view(torch.uint8))


def test_scales_are_their_layers_own(make_pool, rows):
    pool, write_loc = build(make_pool, layers=3)
    pool.set_scales(1, 0.5, 2.0)
    for layer in range(3):
        pool.set_kv_buffer(layer, write_loc, *rows)
    first, second, third = (stored(pool, write_loc, layer) for layer in range(3))
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, c)
        assert not torch.equal(a, b)


def test_scales_are_copied_and_keep_their_address(make_pool, rows, unchanged):
    """A captured graph reads them where they were; the caller's tensor stays the caller's."""
    pool, write_loc = build(make_pool)
    address = pool.groups[0].scales.data_ptr()
    scale = torch.tensor([0.5])
    pool.set_scales(0, scale, scale)
    with unchanged(pool):
        scale.fill_(9)
    pool.set_kv_buffer(0, write_loc, *rows)
    assert pool.groups[0].scales.data_ptr() == address
    torch.testing.assert_close(
        pool.gather_kv(0, write_loc, dtype=torch.float32)[0], rows[0].float(), rtol=0.07, atol=1e-2
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scales_are_inert_where_nothing_is_quantised(make_pool, rows, dtype):
    pool, write_loc = build(make_pool, dtype)
    pool.set_scales(0, 0.5, 2.0)
    pool.set_kv_buffer(0, write_loc, *rows)
    for out in (None, torch.float32, torch.float16):
        for got, x in zip(pool.gather_kv(0, write_loc, dtype=out), rows, strict=True):
            assert torch.equal(got, x.to(dtype).to(out or dtype))


BAD = [0.0, -1.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-42, 1e39, 1e-50, [1.0, 0.0], [torch.nan, 1.0]]


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", BAD, ids=str)
def test_a_scale_that_is_none(make_pool, scale, which, unchanged):
    """Zero, negative, NaN, infinite, or with a reciprocal that overflows; a bad V leaves K's alone too."""
    pool, _ = build(make_pool)
    pool.set_scales(0, 0.5, 2.0)
    scale = torch.tensor(scale) if isinstance(scale, list) else scale
    with unchanged(pool), pytest.raises(ValueError, match=f"{which}: expected finite positive scales"):
        pool.set_scales(0, **{"k_scale": 7.0, "v_scale": 7.0, which: scale})


@pytest.mark.parametrize("scale", [torch.ones(3), torch.ones(0), torch.ones(2, 2)], ids=lambda x: str(tuple(x.shape)))
def test_a_scale_of_another_shape(make_pool, scale, unchanged):
    pool, _ = build(make_pool)
    with unchanged(pool), pytest.raises(ValueError, match=f"v_scale: expected 1 value or {H}"):
        pool.set_scales(0, 7.0, scale)


@pytest.mark.parametrize("scale", ["2.0", object(), torch.tensor(1 + 2j)], ids=["str", "object", "complex"])
def test_a_scale_of_another_type(make_pool, scale, unchanged):
    pool, _ = build(make_pool)
    with unchanged(pool), pytest.raises((TypeError, ValueError), match="v_scale: expected"):
        pool.set_scales(0, 7.0, scale)


def test_scales_that_are_set_in_part_are_not_set(make_pool, monkeypatch):
    """A scale and its reciprocal belong together, whatever interrupts the call that sets them."""
    pool = make_pool([LayerSpec(None, 2, 16)], size=8, dtype=torch.float8_e4m3fn)
    write_loc, ones = pool.plan_write(pool.allocator.alloc(4)), torch.ones(4, 2, 16, device=pool.device)
    copy, left = torch.Tensor.copy_, 0

    def interrupted(*args):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return copy(*args)

    for count in range(1, 6):
        left = count
        monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            pool.set_scales(0, 2.0, 4.0)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        pool.set_kv_buffer(0, write_loc, ones, ones)
        for x in pool.gather_kv(0, write_loc, dtype=torch.float32):
            assert torch.equal(x, ones)
    assert left < count
