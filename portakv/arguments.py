"""What an argument must be, whichever call it is for: each rule once.

Integers are whatever has `__index__` but bools: Python's, numpy's, arrays and tensors without dimensions. Tensors are
plain: strided, their numbers in memory as shape and strides say. Every refusal is a `TypeError` or a `ValueError` of
one line, "argument: expected …, got …".
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.compiler import is_dynamo_compiling
from torch.utils import _python_dispatch as modes

from portakv.formats import INDEX_DTYPES

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
IntsLike = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int]
"""What callers pass: a tensor (one on a device costs a sync), an array of any integer dtype, a sequence."""
Member = TypeVar("Member", bound=enum.Enum)

MOST = 2**63 - 1
"""What kernels take for a size."""

_depth = torch._C._len_torch_dispatch_stack
_earlier_depth: Callable[[], int] = _len_torch_dispatch_stack_pre_dispatch
_PLAIN = torch.Tensor.__torch_dispatch__


def tracing() -> bool:
    """Whether a call made now must be an op: torch.compile or torch.export traces it, or a dispatch mode of this thread
    watches."""
    # The flag is of all threads, and only there to save the question: modes before dispatch have a stack of their own.
    return is_dynamo_compiling() or _depth() > 0 or (modes._is_in_torch_dispatch_mode and _earlier_depth() > 0)


def shown(value: object) -> str:
    """A value as an error names it; tensors, arrays and the like, which may be large or on a device, by their type."""
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype, enum.Enum))
    return repr(value) if plain else type(value).__name__


# Numbers and names.


def as_int(name: str, value: SupportsIndex, least: int = 1, most: int | None = MOST) -> int:
    """`value` as a Python int from `least` to `most`."""
    try:
        number = operator.index(value)
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and (value.dim() or value.dtype is torch.bool)):
            raise TypeError
    except (RuntimeError, TypeError, ValueError):  # of a tensor on the meta device, of an array of floats
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    if most is not None and number > most:
        raise ValueError(f"{name}: expected at most {most}, got {number}")
    return number


def as_choice(name: str, value: SupportsIndex, choices: tuple[int, int]) -> int:
    """`value` as the int of two that it is."""
    try:
        number = as_int(name, value, min(choices), max(choices))
    except (TypeError, ValueError):
        number = None
    if number is None or number not in choices:
        raise ValueError(f"{name}: expected {choices[0]} or {choices[1]}, got {shown(value)}")
    return number


def as_layer(value: SupportsIndex, num_layers: int) -> int:
    """The id of one of a model's layers."""
    try:
        return as_int("layer_id", value, 0, num_layers - 1)
    except (TypeError, ValueError):
        raise ValueError(f"layer_id: expected 0 to {num_layers - 1}, got {shown(value)}") from None


def require_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return value


def as_switch(name: str, value: bool | None, variable: str) -> bool:
    """`value`, or where it is None what the environment's `variable` says: 0, the default, or 1."""
    if value is not None:
        return require_bool(name, value)
    given = os.environ.get(variable, "0")
    if given not in ("0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {given!r}")
    return given == "1"


def as_member(name: str, value: Member | str, members: Iterable[Member], where: str = "") -> Member:
    """The one of `members` that is `value` or whose name, its value, that is."""
    allowed = list(members)
    for member in allowed:
        if value is member or (isinstance(value, str) and value == member.value):
            return member
    names = [member.value for member in allowed]
    raise ValueError(f"{name}: expected one of {names}{where}, got {shown(value)}")


def as_dtype(
    name: str, value: torch.dtype | str, dtypes: Iterable[torch.dtype], expected: str = "one of {}"
) -> torch.dtype:
    """The one of `dtypes` that is `value` or that it names, as "bfloat16"."""
    allowed = list(dtypes)
    for dtype in allowed:
        if value is dtype or (isinstance(value, str) and f"torch.{value}" == str(dtype)):
            return dtype
    names = ", ".join(sorted(map(str, allowed)))
    raise TypeError(f"{name}: expected {expected.format(names)}, got {shown(value)}")


def require_index_dtype(name: str, value: object) -> None:
    if value is not torch.int32 and value is not torch.int64:
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {shown(value)}")


# Tensors.


def are_plain(*tensors: torch.Tensor) -> bool:
    """Whether the numbers of strided tensors stand in their storage as shapes and strides say."""
    try:
        for x in tensors:
            if type(x).__torch_dispatch__ is not _PLAIN or x.layout is not torch.strided or x.is_nested:
                return False
            if x.is_neg() or x.is_conj():
                return False
            if x.is_meta or not x.numel():
                continue
            # Of a functional tensor, of zeros that nobody wrote, of a storage that was freed, addresses count from 0.
            offset, item = x.storage_offset(), x.element_size()
            end = offset + (x.numel() if x.is_contiguous() else 1 + last_offset(x))
            if x.data_ptr() == offset * item or x.untyped_storage().nbytes() < end * item:
                return False
    except RuntimeError:  # of torch.func
        return False
    return True


def last_offset(x: torch.Tensor) -> int:
    """The offset of the last element from the first."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def require_plain(name: str, x: object) -> None:
    """Raise unless `x` is a strided tensor whose numbers stand in memory of its own, or is on the meta device.

    While something traces, what stands for a tensor passes, which has no memory either.
    """
    if is_dynamo_compiling():
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if are_plain(x):
        return
    if x.is_nested:
        got = "a nested one"
    elif x.layout is not torch.strided:
        got = f"one of {x.layout}"
    elif type(x).__torch_dispatch__ is not _PLAIN:  # a fake tensor, a DTensor
        got = "" if tracing() else f"a {type(x).__name__}"
    elif x.is_neg() or x.is_conj():
        got = "a view that negates or conjugates what it reads"
    elif not _has_memory(x):
        got = "" if tracing() else "one without memory"
    else:
        got = f"one that ends past its storage of {x.untyped_storage().nbytes()} bytes"
    if got:
        raise TypeError(f"{name}: expected a plain tensor, got {got}")


def _has_memory(x: torch.Tensor) -> bool:
    try:
        return x.data_ptr() != x.storage_offset() * x.element_size()
    except RuntimeError:
        return False


def require_slots(name: str, slots: object, ndim: int | None = 1) -> torch.Tensor:
    """Raise unless `slots` is an int32 or int64 tensor of `ndim` dimensions; kernels look at its memory."""
    if not isinstance(slots, torch.Tensor) or slots.dtype not in INDEX_DTYPES:
        got = slots.dtype if isinstance(slots, torch.Tensor) else type(slots).__name__
        raise TypeError(f"{name}: expected an int32 or int64 tensor, got {got}")
    if slots.is_nested or (ndim is not None and slots.dim() != ndim):
        require_plain(name, slots)
        raise ValueError(f"{name}: expected {ndim}-D slots, got shape {tuple(slots.shape)}")
    return slots


def require_shape(name: str, x: torch.Tensor, dtypes: Collection[torch.dtype], *shapes: tuple[int | None, ...]) -> None:
    """Raise unless `x` is of one of `dtypes` and `shapes`, in which None is any length."""
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(map(str, dict.fromkeys(dtypes)))}, got {x.dtype}")
    if not any(
        len(shape) == x.dim() and all(n is None or n == m for n, m in zip(shape, x.shape, strict=True))
        for shape in shapes
    ):
        expected = " or ".join(str(list(shape)).replace("None", "n") for shape in shapes)
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(x.shape)}")


def require_rows(
    names: tuple[str, str, str],
    tails: tuple[tuple[int, ...], tuple[int, ...]],
    loc: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtypes: Collection[torch.dtype],
    device: torch.device,
    mixed: bool = False,
    batched: bool = False,
    plain: bool = True,
) -> None:
    """Raise for K rows, V rows or slots that no store or gather of rows with `tails` for axes can take.

    With `mixed` K and V may be of two dtypes, with `batched` rows of a batch, `[B, S, H, D]`. Without `plain` the
    kernel looks at what memory they have.
    """
    for name, x in ((names[0], k), (names[1], v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    lead: tuple[int, ...] = (loc.shape[0],)
    try:
        if batched and k.dim() == 4 and k.shape[0] * k.shape[1] == lead[0]:
            lead = tuple(k.shape[:2])
        if (
            k.shape == (*lead, *tails[0])
            and v.shape == (*lead, *tails[1])
            and k.dtype in dtypes
            and (v.dtype is k.dtype or (mixed and v.dtype in dtypes))
            and k.device == v.device == loc.device == device
            and (k.is_contiguous() or k.stride(-1) == 1)
            and (v.is_contiguous() or v.stride(-1) == 1)
            and (not plain or are_plain(k, v, loc))
        ):
            return
    except RuntimeError:  # of a nested tensor, which has no shape
        pass
    for name, x, tail in ((names[0], k, tails[0]), (names[1], v, tails[1])):
        require_plain(name, x)
        if x.shape != (*lead, *tail):
            raise ValueError(f"{name}: expected shape {(*lead, *tail)}, got {tuple(x.shape)}")
        if x.dtype not in dtypes:
            raise TypeError(f"{name}: expected a dtype of {sorted(map(str, dtypes))}, got {x.dtype}")
        if x.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got {x.device}")
        if not x.is_contiguous() and x.stride(-1) != 1:
            raise ValueError(f"{name}: expected a dense last axis, got strides {x.stride()}")
    if k.dtype != v.dtype and not mixed:
        raise TypeError(f"{names[1]}: expected {k.dtype} as {names[0]}, got {v.dtype}")
    require_plain(names[2], loc)
    if loc.device != device:
        raise ValueError(f"{names[2]}: expected slots on {device}, got {loc.device}")


Span = tuple[int, int]
"""The addresses of a tensor's first byte and of the one behind its last."""


def span_of(x: torch.Tensor) -> Span:
    begin = x.data_ptr()
    return begin, begin + (x.nbytes if x.is_contiguous() or not x.numel() else (last_offset(x) + 1) * x.element_size())


def require_apart(name: str, x: torch.Tensor, spans: Iterable[Span]) -> None:
    """Raise for rows that lie between the first and the last byte of a cache."""
    begin, end = span_of(x)
    if any(begin < last and first < end for first, last in spans):
        raise ValueError(f"{name}: expected memory apart from the cache, got a part of it")


def require_disjoint(**tensors: torch.Tensor) -> None:
    """Raise for tensors to be written that have a byte in common, or one that has one twice, as `expand` makes."""
    for name, x in tensors.items():
        require_plain(name, x)
    for name, x in tensors.items():
        if not x.is_contiguous() and not _steps_apart(x) and _overlap(_runs(x)):
            raise ValueError(f"{name}: expected rows with memory of their own, got strides {x.stride()}")
    spans = sorted(map(span_of, tensors.values()))
    meet = any(one[1] > other[0] for one, other in itertools.pairwise(spans))
    if meet and _overlap(np.concatenate([_runs(x) for x in tensors.values()])):
        *first, last = tensors
        raise ValueError(f"{last}: expected memory apart from {', '.join(first)}, got a part of it")


def _axes(x: torch.Tensor) -> list[tuple[int, int]]:
    """(bytes from one to the next, how many) along each axis of several, the shortest first."""
    item = x.element_size()
    return sorted((stride * item, n) for n, stride in zip(x.shape, x.stride(), strict=True) if n != 1)


def _steps_apart(x: torch.Tensor) -> bool:
    """Whether each axis steps past all that shorter steps reach, so that no element lies on another."""
    reach = x.element_size()
    for stride, n in _axes(x):
        if stride < reach:
            return False
        reach += stride * (n - 1)
    return True


def _runs(x: torch.Tensor) -> Ints:
    """The addresses `[n, 2]` at which runs of bytes begin and end, as long as they can be."""
    length, axes = x.element_size(), _axes(x)
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]
    starts = np.array([x.data_ptr()] if x.numel() else [], np.int64)
    for stride, n in axes:
        starts = (starts[:, None] + np.arange(n) * stride).ravel()
    return np.stack((starts, starts + length), 1)


def _overlap(runs: Ints) -> bool:
    ordered = runs[runs[:, 0].argsort()]
    return bool((ordered[1:, 0] < ordered[:-1, 1]).any())


def as_scales(name: str, scale: float | torch.Tensor | None, num_kv_heads: int) -> torch.Tensor:
    """A scale, or one per KV head, as float32 on the host: `[1]` or `[H]`."""
    if scale is None:
        scale = 1.0
    if isinstance(scale, torch.Tensor):
        require_plain(name, scale)
        good, got = scale.is_floating_point() and not scale.is_meta, f"{scale.dtype} on {scale.device}"
    else:
        good = isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool)
        got = type(scale).__name__
    if not good:
        raise TypeError(f"{name}: expected a number or a tensor of floats, got {got}")
    if isinstance(scale, (int, np.integer)):  # as a float where it is one: torch takes ints of 64 bits only
        scale = float(scale) if int(scale).bit_length() <= 128 else math.inf
    if not isinstance(scale, torch.Tensor):
        scale = torch.tensor(float(scale), dtype=torch.float32, device="cpu")
    value = scale.detach().to("cpu", torch.float32).reshape(-1)
    if value.numel() not in (1, num_kv_heads):
        raise ValueError(f"{name}: expected 1 value or {num_kv_heads}, one per KV head, got {value.numel()}")
    if not (value.isfinite() & (value > 0) & (1 / value).isfinite()).all():
        raise ValueError(f"{name}: expected finite positive scales with a finite reciprocal, got {value.tolist()}")
    return value


# Integers from outside as numpy arrays on the host.


def as_array(name: str, value: IntsLike, ndim: tuple[int, ...], kinds: str = "iu") -> npt.NDArray[np.integer[Any]]:
    """Integers on the host, in their own dtype; a CPU tensor or an array is not copied. `kinds` are numpy's."""
    if isinstance(value, torch.Tensor):
        require_plain(name, value)
        if value.is_meta or value.requires_grad:
            got = "one on meta" if value.is_meta else "one with a gradient"
            raise TypeError(f"{name}: expected a plain tensor, got {got}")
        array = _to_numpy(name, value)
    else:
        try:
            array = np.asarray(value)
        except (OverflowError, RuntimeError, TypeError, ValueError):  # rows of several lengths
            expected = "a plain tensor, an array or a sequence of integers"
            raise TypeError(f"{name}: expected {expected}, got {shown(value)}") from None
    if array.dtype.kind not in kinds and array.size:  # numpy takes an empty list for floats
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    if array.ndim not in ndim:
        expected = " or ".join(map(str, ndim))
        raise ValueError(f"{name}: expected {expected} dimensions, got shape {array.shape}")
    return array


def _to_numpy(name: str, value: torch.Tensor) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = value.numpy() if value.is_cpu else value.cpu().numpy()
    except (RuntimeError, TypeError) as error:  # a dtype that numpy does not have, as float8's
        raise TypeError(f"{name}: expected integers, got {value.dtype}") from error
    return array


def as_ints(name: str, value: IntsLike) -> Ints:
    """1-D int64 on the host; not a copy where `value` is that already."""
    array = as_array(name, value, (1,))
    if array.dtype.kind == "u" and array.size and array.max() > MOST:
        raise ValueError(f"{name}: expected at most {MOST}, got {array.max()}")
    return array.astype(np.int64, copy=False)


def as_batch(**columns: IntsLike) -> list[Ints]:
    """1-D arguments, by name, that must be of one length."""
    arrays = [as_ints(name, value) for name, value in columns.items()]
    sizes = [array.size for array in arrays]
    if min(sizes) != max(sizes):
        raise ValueError(f"{', '.join(columns)}: expected equal lengths, got {', '.join(map(str, sizes))}")
    return arrays


def as_table(name: str, value: IntsLike) -> torch.Tensor | npt.NDArray[np.integer[Any]]:
    """A 2-D table of integers: a tensor on a device stays there, anything else is an array on the host."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.is_cpu:
        return as_array(name, value, (2,))
    require_plain(name, value)
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool:
        raise TypeError(f"{name}: expected integers, got {value.dtype}")
    if value.dim() != 2:
        raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(value.shape)}")
    return value


def require(good: Bools, name: str, expected: str, values: Ints) -> None:
    """Raise `ValueError` for the first of `values` that is not `good`."""
    if not good.all():
        i = int(np.argmin(good))
        raise ValueError(f"{name}[{i}]: expected {expected}, got {values[i]}")
