"""What the ops mean on FlashMLA's packed pages and rows, in plain torch; as in `reference`, nothing waits.

Layouts: FlashMLA's `tests/quant.py`; the scales are those of SGLang's and vLLM's CUDA kernels.
"""

from __future__ import annotations

import torch

from portakv.formats import FP8_DIALECTS, KVFormat, Layout
from portakv.kernels.reference.rows import (
    as_bytes,
    by_value,
    count_rows,
    gather_kv,
    quantise,
    readable_slots,
    rope_angles,
    rotate,
    store_kv,
)

Tensor = torch.Tensor


def store_kv_flashmla(
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
    """Quantise `k [T, 1, D]` in blocks and write it, its scales and `v [T, 1, Dv]` as bfloat16 to slot `loc[t]`.

    The caches are those of `KVFormat.caches`, as `store_kv` takes them; `k_inv` and `v_inv` are not used.
    """
    values, exponents = quantise_blocks(k[:, 0], fmt.block)
    rope = as_bytes(v[:, 0] if v.dtype == torch.bfloat16 else by_value(v[:, 0], torch.bfloat16))
    if fmt.layout is Layout.FLASHMLA:
        rows = torch.cat((values, rope), -1), torch.nn.functional.pad(exponents, (0, 1)).to(torch.uint8)
    else:
        rows = torch.cat((values, as_bytes(_power_of_two(exponents))), -1), rope
    first, second = (x[:, None].view(fmt.dtype) for x in rows)
    store_kv(first, second, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt.raw)


def gather_kv_flashmla(
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """Read slot `loc[t]` into row t of `k_out [T, 1, D]`, times the scales stored with it, and `v_out [T, 1, Dv]`, as
    their float dtype; skipped rows stay as they are."""
    _, ok = readable_slots(loc, count_rows(k_cache), faults, "gather_kv")
    raw, dim = fmt.raw, fmt.head_dim
    first, second = (
        torch.zeros((len(loc), 1, n), dtype=fmt.dtype, device=loc.device) for n in (raw.head_dim, raw.v_head_dim)
    )
    gather_kv(k_cache, v_cache, loc, first, second, k_scale, v_scale, torch.zeros_like(faults), raw)
    if fmt.layout is Layout.FLASHMLA:
        rope, scales = first[..., dim:], _power_of_two(as_bytes(second)[..., :-1].int())
    else:
        rope, scales = second, first[..., dim:].view(torch.float32)
    values = first[..., :dim].to(torch.float32) * scales.repeat_interleave(fmt.block, -1)
    rope = rope.view(torch.bfloat16)
    for out, x in ((k_out, values), (v_out, rope)):
        fresh = x if x.dtype == out.dtype and x is rope else by_value(x, out.dtype)
        as_bytes(out).copy_(torch.where(ok[:, None, None], as_bytes(fresh.contiguous()), as_bytes(out)))


def store_kv_rope_flashmla(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    loc: Tensor,
    k_inv: Tensor,
    v_inv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    interleaved: bool,
    faults: Tensor,
    fmt: KVFormat,
) -> None:
    """`store_kv_flashmla` of the rope part rotated as `store_kv_rope` does it."""
    loc, angles = rope_angles(cos_sin, positions, loc, k_cache, fmt, faults)
    store_kv_flashmla(k, rotate(v, angles, interleaved), k_cache, v_cache, loc, k_inv, v_inv, faults, fmt)


def quantise_blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """`x [T, D]` as e4m3fn bytes, and the scales of its blocks `[T, D / block]` as int32 exponents of two plus 127.

    A scale is 2**ceil(log2(max(amax, 1e-4) / 448)), with 448 = 1.75 * 2**8 the largest e4m3fn and amax the largest
    finite magnitude of the block.
    """
    values = x.to(torch.float32).view(x.shape[0], x.shape[1] // block, block)
    magnitudes = torch.where(values.isfinite(), values.abs(), 0.0).amax(-1).clamp(min=1e-4).view(torch.int32)
    # One exponent more for a mantissa above 1.75.
    exponents = ((magnitudes + 0x1FFFFF) >> 23) - 8
    inv = _power_of_two(254 - exponents).flatten(0, 1)
    fp8 = FP8_DIALECTS[torch.float8_e4m3fn]
    return as_bytes(quantise(values.reshape(1, -1, block), fp8, inv)).view(x.shape), exponents


def _power_of_two(exponents: Tensor) -> Tensor:
    """float32 with the biased exponents, int32, and no mantissa."""
    return (exponents << 23).view(torch.float32)
