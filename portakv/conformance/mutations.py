"""Kernels broken on purpose, one mistake each: whoever checks kernels must find every one."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import inspect
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from portakv.conformance.executors.launcher import ExecutingLauncher
from portakv.formats import FAULT_KINDS, Variant
from portakv.kernels import _triton
from portakv.kernels._triton.launch import Source


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake, and how it gets into the kernels: by a constexpr's value, where that is another, or by op, in its
    module's text, by what stands instead of a pattern. `far` says that only far rows show it, `wild` that it may touch
    what no tensor has."""

    name: str
    constant: str = ""
    value: Callable[[Any], Any] = lambda value: value
    text: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    far: bool = False
    wild: bool = False

    def applies_to(self, op: str, source: Source) -> bool:
        return op in self.text or self.of(source) != source

    def of(self, source: Source) -> Source:
        """`source` with the constexpr's other value."""
        changed = {name: self.value(value) for name, value in source.constants.items() if name == self.constant}
        return replace(source, constants={**source.constants, **changed})


MOVERS = tuple(op for op in _triton.OPS if op.startswith(("store_kv", "gather_kv", "move_kv")))

NARROW = r"(\1).to(tl.int32).to(tl.int64)"  # no other width passes `slots.pointers`
STORE = r"(tl\.store\((?:row_pointers\()?k.*), mask=\w+\)"

MUTATIONS = (
    Mutation("writes the reserved page", "RESERVED", lambda _: 0),
    Mutation("counts faults for another op", "FAULT", lambda index: (index + 1) % len(FAULT_KINDS)),
    Mutation("NaN as zero", "DST", lambda float: replace(float, nan=0)),
    Mutation(
        "another padding in the tail",
        "PAD",
        lambda pad: pad + 1,
        text={"build_read": (r"(named_here, slot, pad)", r"\1 + 1")},
    ),
    Mutation(
        "a 32-bit offset",
        text={
            **dict.fromkeys(MOVERS, (r"(slot_offset\(.*k_slot\))", NARROW)),
            **dict.fromkeys(("translate_loc", "patch_map"), (r"(?<=pointers\(mapping, )(slot)", NARROW)),
            "build_read": (r"(row \* table_stride)", NARROW),
        },
        far=True,
        wild=True,
    ),
    Mutation(
        "a missing mask",
        text={
            **dict.fromkeys(MOVERS, (STORE, r"\1)")),
            "translate_loc": (r"(pointers\(mapping, slot\)), mask=.*, other=-1\)", r"\1)"),
            "patch_map": (r"(tl\.store\(.*), mask=.*\)", r"\1)"),
            "build_read": (r"(tl\.load\(pointers\(slots, place\)), mask=live, other=0\)", r"\1)"),
            "cast_loc": (r"out_len, index", "out_len + 1, index"),
        },
        wild=True,
    ),
)


def find(name: str) -> Mutation:
    return next(mutation for mutation in MUTATIONS if mutation.name == name)


class BrokenLauncher(ExecutingLauncher):
    """Compiles kernels with a mutation in them."""

    def __init__(self, target: Any, mutation: Mutation) -> None:
        super().__init__(target)
        self._mutation = mutation

    def source(self, variant: Variant, warp_size: int) -> Source:
        source = super().source(variant, warp_size)
        if variant.op in self._mutation.text:
            return replace(source, fn=_rewrite(source.fn, *self._mutation.text[variant.op]))
        return self._mutation.of(source)


@functools.cache
def _rewrite(kernel: Any, pattern: str, instead: str) -> Any:
    """The kernel of a copy of its module, which is a file, because Triton reads a kernel's text there."""
    module = sys.modules[kernel.fn.__module__]
    text, count = re.subn(pattern, instead, inspect.getsource(module))
    if count == 0:
        raise ValueError(f"pattern: expected {pattern!r} in {module.__name__}")
    path = Path(_scratch(), f"mutated_{module.__name__.rpartition('.')[2]}_{zlib.crc32(text.encode()):08x}.py")
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return getattr(copy, kernel.fn.__name__)


@functools.cache
def _scratch() -> str:
    """A folder that lives as long as the process: Triton before 3.6 reads a text again when it compiles."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
