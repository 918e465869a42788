"""Rope: the rotary embedding of one forward, applied by the launch that stores its K."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from portakv.arguments import Bools, Ints, require_bool, require_plain
from portakv.formats import FLOAT_DTYPES, INDEX_DTYPES
from portakv.groups import Layer

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Rope:
    """What `set_kv_buffer` rotates K with, or the rope part of MLA layers: one value for all layers of a forward.

    `cos_sin_cache [max_position, dims]` is float32 or of K's dtype and has `dims / 2` cosines, then as many sines, of
    each position, as vLLM and SGLang keep it. `positions [T]`, int32 or int64 and dense, are the tokens'. The first
    `dims` of a head are rotated: dim i with i + dims / 2 (GPT-NeoX), or 2i with 2i + 1 where `interleaved` (GPT-J).
    Raises `ValueError` and `TypeError` for what is not that.
    """

    cos_sin_cache: Tensor
    positions: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        table, positions = self.cos_sin_cache, self.positions
        for name, x in (("cos_sin_cache", table), ("positions", positions)):
            require_plain(name, x)
        if table.dim() != 2 or not table.numel() or table.shape[1] % 2:
            raise ValueError(
                f"cos_sin_cache: expected shape [max_position, an even number of dims], got {tuple(table.shape)}"
            )
        if table.dtype not in FLOAT_DTYPES:
            raise TypeError(f"cos_sin_cache: expected float32, float16 or bfloat16, got {table.dtype}")
        if table.stride(1) != 1:
            raise ValueError(f"cos_sin_cache: expected a dense last axis, got strides {table.stride()}")
        if positions.dim() != 1 or not positions.is_contiguous():
            raise ValueError(f"positions: expected a dense vector, got shape {tuple(positions.shape)}")
        if positions.dtype not in INDEX_DTYPES:
            raise TypeError(f"positions: expected int32 or int64, got {positions.dtype}")
        require_bool("interleaved", self.interleaved)


def store_rotated(
    layer: Layer, rope: Rope, loc: Tensor, k: Tensor, v: Tensor, faults: Tensor, slots: Ints | None
) -> None:
    """The layer's store of rotated rows. Positions are checked where `slots`, those of `loc`, are known on the host."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope: expected a Rope or None, got {type(rope).__name__}")
    if layer.store_rope is None:
        raise ValueError(f"rope: expected None for layers laid out as {layer.fmt.layout.name!r}, got a Rope")
    table, positions = rope.cos_sin_cache, rope.positions
    if k.dtype not in FLOAT_DTYPES:
        raise TypeError(f"k: expected float32, float16 or bfloat16 to rotate, got {k.dtype}")
    if table.dtype is not k.dtype and table.dtype is not torch.float32:
        raise TypeError(f"rope.cos_sin_cache: expected torch.float32 or {k.dtype} as k, got {table.dtype}")
    if table.shape[1] > layer.rotated_dim:
        raise ValueError(f"rope.cos_sin_cache: expected at most {layer.rotated_dim} dims, got {table.shape[1]}")
    if positions.shape[0] != loc.shape[0]:
        raise ValueError(f"rope.positions: expected {loc.shape[0]}, one per token, got {positions.shape[0]}")
    if not table.device == positions.device == loc.device:
        name, x = ("cos_sin_cache", table) if table.device != loc.device else ("positions", positions)
        raise ValueError(f"rope.{name}: expected a tensor on {loc.device}, got {x.device}")
    if slots is not None:
        _check_positions(rope, slots >= layer.fmt.page_size)
    layer.store_rope(
        *(k, v, layer.k_cache, layer.v_cache, loc, layer.k_inv, layer.v_inv),
        *(table, positions, rope.interleaved, faults, layer.fmt),
    )


def _check_positions(rope: Rope, stored: Bools) -> None:
    """Raise `ValueError` for a position without an angle of a token that is `stored`. Waits for the device."""
    positions, most = rope.positions.cpu().numpy(), rope.cos_sin_cache.shape[0] - 1
    lost = ((positions < 0) | (positions > most)) & stored
    if lost.any():
        at = int(lost.argmax())
        raise ValueError(f"rope.positions[{at}]: expected 0 to {most}, got {positions[at]}")
