# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the rope stores of every layout share: angles, and rows rotated by them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from portakv.formats import KVFormat, Variant
from portakv.kernels._triton.floats import FLOATS, decode, encode
from portakv.kernels._triton.launch import Launcher
from portakv.kernels._triton.rows import row_pointers

Tensor = torch.Tensor

ROPE_TENSORS = {"cos_sin": "u8", "positions": "i32"}
ROPE_SCALARS = ("words", "num_positions", "dims", "angle_stride", "interleaved")


def rope_constants(variant: Variant) -> dict[str, object]:
    """`ROPE`, the float of the angles. Without rope it is None, and so are the arguments that only rope takes."""
    if variant.rope is None:
        return dict.fromkeys((*ROPE_TENSORS, *ROPE_SCALARS, "ROPE"))
    return {"ROPE": FLOATS[variant.rope]}


def rope_arguments(
    cos_sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...]]:
    """The tensors and scalars of a rope store. int64 positions are read as pairs of 32-bit words."""
    words = positions.element_size() // 4
    if positions.dtype != torch.int32:
        positions = positions.view(torch.int32)
    return (cos_sin, positions), (words, *cos_sin.shape, cos_sin.stride(0), int(interleaved))


def rotating(launch: Callable[..., None], op: str) -> Callable[..., None]:
    """A layout's `launch` as a store that rotates; here positions are dense."""

    def launch_rope(
        launcher: Launcher,
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
        angles = rope_arguments(cos_sin, positions, interleaved)
        launch(launcher, k, v, k_cache, v_cache, loc, k_inv, v_inv, faults, fmt, op, *angles)

    return launch_rope


@triton.jit
def load_positions(positions, words, token, num_tokens, num_positions):
    """Positions as int64, and which of them have an angle. int64 ones, of two words, have none past 2^31."""
    inside = token < num_tokens
    low = tl.load(positions + token * words, mask=inside, other=-1).to(tl.int64)
    high = tl.load(positions + token * words + words - 1, mask=inside, other=-1).to(tl.int64)
    known = (low >= 0) & (low < num_positions) & (high * (words - 1) == 0)
    return tl.where(known, low, 0), known


@triton.jit
def load_rotated(
    base,
    offset,
    column,
    mask,
    position,
    cos_sin,
    dims,
    angle_stride,
    interleaved,
    FLOAT: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Rows of `FLOAT`, their first `dims` columns rotated."""
    column = column.to(tl.int64)
    half = dims // 2
    first = tl.where(interleaved != 0, column % 2 == 0, column < half)
    apart = tl.where(interleaved != 0, 1, half)
    partner = tl.where(first, column + apart, column - apart)
    angle = tl.where(interleaved != 0, column // 2, column % half)
    turned = mask & (column < dims)[None, :]
    raw = tl.load(row_pointers(base, offset, column, FLOAT, False), mask=mask)
    other = tl.load(row_pointers(base, offset, partner, FLOAT, False), mask=turned)
    angles = row_pointers(cos_sin, position * angle_stride, angle, ROPE, False)
    cos = decode(tl.load(angles, mask=turned), ROPE)
    sin = decode(tl.load(angles + half, mask=turned), ROPE)
    x = decode(raw, FLOAT) * cos
    y = decode(other, FLOAT) * sin
    return tl.where(turned, encode(tl.where(first[None, :], x - y, x + y), FLOAT), raw)
