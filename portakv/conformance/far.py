"""Inputs whose rows lie past 2^32 elements, in memory of which only the touched pages exist."""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from portakv import testing
from portakv.buffers import Buffer, Mismatch
from portakv.formats import INDEX_DTYPES, ReadFormat, Structure
from portakv.kernels.reference import flashmla as reference_flashmla
from portakv.kernels.reference import rows as reference

Tensor = torch.Tensor

AXES = dict.fromkeys(("k", "v", "k_cache", "v_cache", "k_out", "v_out", "table"), 0) | {"k_caches": 1, "v_caches": 1}
"""The axis of each argument whose entries are put far apart."""

FAR = 2**32

NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag, of which Python knows from 3.13 on."""


def reserve(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros `[count]` that take no memory until they are touched."""
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # or each touch takes 2 MiB
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def spread(storage: Tensor, step: int, count: int, apart: int) -> Tensor:
    """A storage in which entry i of an axis, before at `i * step`, is at `i * apart`, with all that follows it."""
    out = reserve((count - 1) * apart + len(storage), storage.dtype)
    for i in range(count):
        out[i * apart :][: len(storage) - i * step].copy_(storage[i * step :])
    return out


def check(op: str, kernel: Callable[..., None], case: testing.Case) -> None:
    """As `testing.check` on the CPU, with the first entry of every cache, row and table far from its last."""
    define = getattr(reference if hasattr(reference, op) else reference_flashmla, op)
    args = testing.build(case)
    names = list(inspect.signature(define).parameters)
    runs: list[list[object]] = []
    far: dict[int, tuple[list[Tensor], int, int, int]] = {}
    for run in (define, kernel):
        own: dict[int, Tensor] = {}
        given: list[object] = []
        for name, arg in zip(names, args, strict=True):
            if not isinstance(arg, Buffer):
                given.append(arg)
                continue
            axis = AXES.get(name)
            key = id(arg.storage)
            if axis is None or arg.size[axis] < 2:
                own.setdefault(key, arg.storage.view(torch.uint8).clone().view(arg.storage.dtype))
                given.append(replace(arg, storage=own[key]).tensor)
                continue
            step, count = arg.stride[axis], arg.size[axis]
            # A multiple of every alignment, so that rows keep theirs.
            apart = -(-FAR // (count - 1) // 1024) * 1024
            if key not in own:
                own[key] = spread(arg.storage, step, count, apart)
                far.setdefault(key, ([], step, count, apart))[0].append(own[key])
            stride = tuple(apart if i == axis else s for i, s in enumerate(arg.stride))
            given.append(replace(arg, storage=own[key], stride=stride).tensor)
        run(*given)
        runs.append(given)
    _compare(f"{case}", names, *runs)
    for (want, have), step, count, apart in far.values():
        length = len(want) - (count - 1) * apart
        for i in range(count):
            a, b = (x[i * apart :][: length - i * step].view(torch.uint8) for x in (want, have))
            if not torch.equal(a, b):
                raise Mismatch(f"{case}: entry {i} of a far axis, or what lies beside it, differs")


def check_mapping(index_dtype: torch.dtype, kernels: dict[str, Callable[..., None]]) -> None:
    """The ops that only know slots, on a mapping of more than 2^31 slots, of which int32 slots reach the first half."""
    length = 2**31 + 8
    last = min(length - 2, torch.iinfo(index_dtype).max)
    slots = torch.tensor([last, 5, last - 1, -1, last - 3])
    loc, values = slots.to(index_dtype), torch.arange(5) + 70
    results = []
    for module in (dict(vars(reference)), kernels):
        mapping = reserve(length, torch.int64)
        outs = [torch.zeros(7, dtype=torch.int64) for _ in "sl"]
        table, lens = loc.clamp(min=0).repeat(2, 1), torch.full((2,), 5)
        read, counts = torch.zeros((2, 6), dtype=torch.int64), [torch.zeros(2, dtype=torch.int64) for _ in "ls"]
        faults = testing.faults().tensor
        module["patch_map"](mapping, slots, values)
        module["translate_loc"](mapping, loc, outs[0], outs[1], None, None, faults)
        fmt = ReadFormat(Structure.ROWS)
        at = torch.tensor([1, 0])
        module["build_read"](mapping, table, at, lens, None, None, read, None, *counts, faults, length - 1, fmt)
        results.append([*outs, read, *counts, faults, mapping[:16], mapping[slots[[0, 2, 4]]]])
    names = ["swa_out", "loc_out", "out", "lens", "starts", "faults", "mapping", "mapping"]
    _compare(f"a mapping of 2^31 slots, {index_dtype}", names, *results)


def choose(cases: Sequence[testing.Case]) -> list[testing.Case]:
    """A few cases with rows and slots that count, each once, for each width of slots."""
    some = [case for case in cases if 2 <= case.tokens <= 33 and not testing.repeats_a_slot(case)]
    out: list[testing.Case] = []
    for dtype in INDEX_DTYPES:
        mine = [case for case in some if case.variant.index_dtype == dtype]
        out += mine[:: max(1, len(mine) // 3)][:3]
    return out


def _compare(what: str, names: list[str], expected: Sequence[object], got: Sequence[object]) -> None:
    for name, want, have in zip(names, expected, got, strict=True):
        if isinstance(want, Tensor) and isinstance(have, Tensor):
            a, b = (x.contiguous().view(torch.uint8) for x in (want, have))
            if not torch.equal(a, b):
                raise Mismatch(f"{what}: {name} differs in {int((a != b).sum())} bytes")
