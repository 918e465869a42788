"""S23: out of range goes to the largest finite value, NaN stays NaN, on every row of the table.

The oracle knows the formats from their definition, and nothing of any cast.
"""

from __future__ import annotations

import math

import pytest
import torch

from portakv import LayerSpec
from portakv.formats import FLOAT_DTYPES, FP8_DIALECTS

# Exponent bits, mantissa bits, bias, largest finite value: OCP 8-bit floating point, and the fnuz forms.
DEFINITIONS = {
    torch.float8_e4m3fn: (4, 3, 7, 448.0),
    torch.float8_e4m3fnuz: (4, 3, 8, 240.0),
    torch.float8_e5m2: (5, 2, 15, 57344.0),
    torch.float8_e5m2fnuz: (5, 2, 16, 57344.0),
}


def finite_values(dtype):
    """The finite positive value of each byte, in ascending order: index = byte."""
    _, mantissa, bias, largest = DEFINITIONS[dtype]
    values = []
    for byte in range(128):
        exponent, fraction = byte >> mantissa, byte & (1 << mantissa) - 1
        significand = fraction / (1 << mantissa) + (exponent > 0)
        value = significand * 2.0 ** (max(exponent, 1) - bias)
        if value > largest:
            break
        values.append(value)
    assert values[-1] == largest
    return values


def oracle(x, dtype):
    """The byte of the nearest value to float `x`, ties to the even byte, by a search over all values."""
    fnuz = dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    if math.isnan(x):
        return 0x80 if fnuz else 0x7F
    values = finite_values(dtype)
    magnitude = min(abs(x), values[-1])
    byte = min(range(len(values)), key=lambda b: (abs(values[b] - magnitude), b % 2))
    return byte if math.copysign(1, x) > 0 or (fnuz and byte == 0) else byte | 0x80


def stored_bytes(make_pool, dtype, x, scale=1.0):
    pool = make_pool([LayerSpec(None, 1, len(x))], size=4, dtype=dtype)
    pool.set_scales(0, scale, scale)
    rows = x.reshape(1, 1, -1).to(pool.device)
    write_loc = pool.plan_write(pool.allocator.alloc(1))
    pool.set_kv_buffer(0, write_loc, rows, rows)
    k, v = pool.gather_kv(0, write_loc)
    assert torch.equal(k.view(torch.uint8), v.view(torch.uint8))
    return k.flatten().view(torch.uint8).cpu(), pool.gather_kv(0, write_loc, dtype=torch.float32)[0].flatten().cpu()


@pytest.mark.parametrize("source", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_out_of_range_saturates(make_pool, dtype, source):
    largest = DEFINITIONS[dtype][3]
    x = torch.tensor([465.0, 1000.0, -1e4, 6e4, -6e4, torch.inf, -torch.inf, 448.0, torch.nan, -torch.nan]).to(source)
    got, values = stored_bytes(make_pool, dtype, x)
    assert got.tolist() == [oracle(float(value), dtype) for value in x]
    beyond = x.abs() > largest
    assert torch.equal(values[beyond], (x[beyond].sign() * largest).float())
    assert values.isnan().tolist() == x.isnan().tolist()


@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_every_value_and_every_tie(make_pool, dtype):
    """Each representable value, each midpoint of two, and the floats next to the midpoint, in both signs."""
    values = torch.tensor(finite_values(dtype), dtype=torch.float64)
    middles = ((values[1:] + values[:-1]) / 2).float()
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (torch.inf, 0.0))
    x = torch.cat((values.float(), middles, up, down, torch.tensor([1e-45, 1e-30])))
    x = torch.cat((x, -x))
    got, _ = stored_bytes(make_pool, dtype, x)
    assert got.tolist() == [oracle(float(value), dtype) for value in x]


@pytest.mark.parametrize("scale", [0.5, 3.0, 1e-3, 2.0**-120])
@pytest.mark.parametrize("dtype", FP8_DIALECTS, ids=str)
def test_the_limit_is_that_of_the_scaled_value(make_pool, dtype, scale):
    """`q = clamp(float32(x) * (float32(1) / float32(scale)))`: one multiply, overflow included."""
    x = torch.tensor([1.0, -3.5, 0.017, 200.0, -1e20, 3e38, 0.0, -0.0, torch.nan])
    inv = torch.tensor(1.0) / torch.tensor(scale, dtype=torch.float32)
    got, _ = stored_bytes(make_pool, dtype, x, scale)
    assert got.tolist() == [oracle(float(value), dtype) for value in x * inv]
