"""What an argument must be, whichever call it is for: a bool, a dtype of indices, a tensor that kernels can read.

Raises `TypeError`.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils import _python_dispatch as modes


def shown(value: object) -> str:
    """A value as an error names it; tensors, arrays and the like, which may be large or on a device, by their type."""
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return repr(value) if plain else type(value).__name__


def require_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return value


def require_index_dtype(name: str, value: object) -> None:
    if value is not torch.int32 and value is not torch.int64:
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {shown(value)}")


def require_plain(name: str, x: object) -> None:
    """Raise unless `x` is a strided tensor whose numbers stand in memory of its own, or is on the meta device.

    While something traces, every tensor passes: what stands for one then has no memory either.
    """
    if is_dynamo_compiling() or modes._is_in_torch_dispatch_mode:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.is_nested:
        got = "a nested one"
    elif x.layout is not torch.strided:
        got = f"one of {x.layout}"
    elif type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # a fake tensor, a DTensor
        got = f"a {type(x).__name__}"
    elif x.is_neg() or x.is_conj():
        got = "a view that negates or conjugates what it reads"
    # A functional tensor, one of zeros that nobody wrote, one whose storage was freed: addresses count from 0.
    elif not x.is_meta and x.numel() and x.data_ptr() == x.storage_offset() * x.itemsize:
        got = "one without memory"
    else:
        return
    raise TypeError(f"{name}: expected a plain tensor, got {got}")
