"""Compiles a kernel once per `Variant` and device, and launches it with little Python in between.

`fn[grid](...)` would specialise on what each call brings: alignment, ones, int32 or int64 sizes. Here the
signature is explicit, so a call can only ever ask for a variant that `list_variants` names.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from portakv.errors import NoKernel
from portakv.formats import VECTOR_BYTES, KVFormat, Structure, Variant
from portakv.kernels._triton.driver import driving
from portakv.kernels._triton.rows import Tile, Tiles

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """One variant's kernel before compilation.

    A kernel takes pointers, then int64 scalars, then constexprs. `tensors` maps the op's own names of the pointers, in
    the kernel's order, to element types: "u8" for rows, which the kernel casts to its own unit. The last pointers and
    the last scalars may be `constants` too, None, in a variant that does without them. `chunks` programs together cover
    `rows` rows.
    """

    fn: Any
    tensors: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    rows: int
    chunks: int = 1

    @property
    def arguments(self) -> tuple[str, ...]:
        """The kernel's own names of what a launch passes."""
        return tuple(name for name in self.fn.arg_names if name not in self.constants)


SourceOf = Callable[[Variant, tuple[Tile, ...], int], Source]
"""Makes the source of a variant from a device's tiles and its lanes per warp."""


class Op(NamedTuple):
    """How an op's variants become kernels, and the function that launches them: a Launcher, then the op's arguments."""

    source: SourceOf
    launch: Callable[..., None]


def gathering(launch: Callable[..., None], op: str) -> Callable[..., None]:
    """A layout's `launch` of stores as one of gathers, whose outputs stand where a store's rows do."""

    def launch_gather(
        launcher: Launcher,
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
        launch(launcher, k_out, v_out, k_cache, v_cache, loc, k_scale, v_scale, faults, fmt, op)

    return launch_gather


def compile_source(source: Source, target: GPUTarget) -> Any:
    """Triton's compiled kernel for `target`; needs no device.

    Its `asm` has "ttir", "ttgir" and "llir", and "ptx" and "cubin", "amdgcn" and "hsaco", or "spv".
    """
    ast, options = _ast(source)
    return triton.compile(ast, target=target, options=options)


def compile_ttir(source: Source, target: GPUTarget) -> str:
    """The "ttir" of `compile_source`, in a fifth of the time where this Triton's stages are those known here."""
    ast, options = _ast(source)
    try:
        backend = make_backend(target)
        parsed = backend.parse_options(options | ast.parse_options())
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed, ast.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        made = ast.make_ir(
            target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
        )
        return str(stages["ttir"](made, {}))
    except (AttributeError, TypeError):  # an older Triton
        return str(compile_source(source, target).asm["ttir"])


def _ast(source: Source) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton compiles, and with which options."""
    signature = dict.fromkeys(source.fn.arg_names, "i64")
    signature |= {name: f"*{kind}" for name, kind in zip(source.fn.arg_names, source.tensors.values(), strict=False)}
    signature |= dict.fromkeys(source.constants, "constexpr")
    attrs = {}
    if source.constants.get("ALIGNED"):
        rows = (i for i, kind in enumerate(source.tensors.values()) if kind == "u8")
        attrs = {(i,): [["tt.divisibility", VECTOR_BYTES]] for i in rows}
    # Fusing a multiply and an add would round once where the definition rounds twice.
    options = {"num_warps": source.num_warps, "enable_fp_fusion": False}
    return ASTSource(source.fn, signature, dict(source.constants), attrs), options


class NotLoaded(Exception):
    """A device did not take a compiled kernel, which it may at another time: it was full, or recorded a graph."""


def addresses(names: Iterable[str], tensors: Sequence[Tensor]) -> list[int]:
    """Where `tensors` begin. Raises `ValueError` for one that lies between its elements, which no GPU can read."""
    found = [x.data_ptr() for x in tensors]
    if functools.reduce(operator.or_, found) & 7:  # narrow elements, or a fault
        for name, x, address in zip(names, tensors, found, strict=True):
            if past := address % x.element_size():
                multiple = x.element_size()
                raise ValueError(
                    f"{name}: expected an address that is a multiple of {multiple}, got one {past} past it"
                )
    return found


class Kernel:
    """A variant that is ready to run on one device. Call it with a grid, the tensors and the int scalars."""

    def __init__(self, source: Source, device: torch.device, target: GPUTarget) -> None:
        self.rows, self.chunks = source.rows, source.chunks
        self._names = tuple(source.tensors)
        module = torch.get_device_module(device)
        self._device, self._guard, self._current = device.index, module.device, module.current_device
        with self._guard(self._device), driving(target.backend) as driver:
            compiled = compile_source(source, target)
            self._compiled = compiled
            # Loads the binary, so it comes before `function`. What Triton 3.3 to 3.9 have; elsewhere the ordinary way.
            try:
                self._run = getattr(compiled, "run", None) if hasattr(compiled, "packed_metadata") else None
            except Exception as e:
                hint = "portakv.warmup(pool) loads all that a pool needs, before any capture"
                raise NotLoaded(f"{type(e).__name__}: {e}; {hint}") from e
        # The function and its metadata, launch metadata, and what a profiler runs before and after.
        self._head = (*(getattr(compiled, x, None) for x in ("function", "packed_metadata")), None, None, None)
        self._stream = driver.get_current_stream
        # The launcher takes a place for every constexpr: of pointers that there are not, and behind the scalars.
        after = source.fn.arg_names[len(source.tensors) :]
        self._absent = tuple(None for _ in itertools.takewhile(source.constants.__contains__, after))
        self._tail = (None,) * (len(source.constants) - len(self._absent))

    def __call__(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], scalars: Sequence[int]) -> None:
        device = self._device
        if self._current() != device:
            with self._guard(device):
                self._launch(grid, tensors, scalars)
        else:
            self._launch(grid, tensors, scalars)

    def _launch(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], scalars: Sequence[int]) -> None:
        # Addresses instead of tensors: the launcher would look each one up in the driver.
        pointers = addresses(self._names, tensors)
        if self._run is None:
            self._compiled[grid](*tensors, *self._absent, *scalars, *self._tail)
            return
        stream = self._stream(self._device)
        self._run(*grid, stream, *self._head, *pointers, *self._absent, *scalars, *self._tail)


INTERPRETER_TILES = (Tile(1 << 20, 1 << 16, 256),)
"""The interpreter's time is per program: a larger tile, still small enough that tests have several."""


class InterpretedKernel:
    """The same under `TRITON_INTERPRET=1`, for tensors on a CPU."""

    def __init__(self, source: Source) -> None:
        self.rows, self.chunks = source.rows, source.chunks
        self._source = source

    def __call__(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], scalars: Sequence[int]) -> None:
        addresses(self._source.tensors, tensors)
        kinds = self._source.tensors.values()
        views = [t.view(torch.uint8) if kind == "u8" else t for t, kind in zip(tensors, kinds, strict=True)]
        given = dict(zip(self._source.arguments, (*views, *scalars), strict=True))
        self._source.fn[grid](**given, **self._source.constants)


class Launcher:
    """One device folder's compiled kernels: its `backend`, its tiles, and what each variant became."""

    def __init__(self, backend: str, ops: Mapping[str, Op], tiles: Tiles) -> None:
        self.backend = backend
        self.tiles = tiles
        self._ops = ops
        self._kernels: dict[tuple[Variant, int], Kernel | InterpretedKernel | NoKernel] = {}
        self._hot: dict[tuple[object, ...], tuple[Kernel | InterpretedKernel, KVFormat | None]] = {}

    @property
    def variants(self) -> frozenset[Variant]:
        """Every variant that was asked for so far, on any device."""
        return frozenset(variant for variant, _ in self._kernels)

    def bind(self, op: str) -> Callable[..., None]:
        """The op's `launch` on this launcher: the kernel that the dispatch table names.

        Raises `AttributeError` for what is no op.
        """
        if op not in self._ops:
            raise AttributeError(f"{self.backend} has no op {op!r}")
        return functools.partial(self._ops[op].launch, self)

    def source(self, variant: Variant, warp_size: int) -> Source:
        """What `variant` compiles from on a device with `warp_size` lanes per warp."""
        return self._ops[variant.op].source(variant, self.tiles[warp_size], warp_size)

    def compile(self, variant: Variant, target: GPUTarget) -> Any:
        """`variant` for `target`, without a device (see `compile_source`)."""
        return compile_source(self.source(variant, target.warp_size), target)

    def compile_ttir(self, variant: Variant, target: GPUTarget) -> str:
        """What `compile` has as "ttir" (see `compile_ttir`)."""
        return compile_ttir(self.source(variant, target.warp_size), target)

    def find(
        self,
        op: str,
        on: Tensor,
        fmt: KVFormat | None = None,
        dtype: torch.dtype | None = None,
        index_dtype: torch.dtype = torch.int64,
        out_index_dtype: torch.dtype | None = None,
        alignment: int = VECTOR_BYTES,
        rope: torch.dtype | None = None,
        structure: Structure | None = None,
    ) -> Kernel | InterpretedKernel:
        """The kernel of a variant for the device of tensor `on`; compiled at its first use."""
        # Hashing a KVFormat costs as much as the rest of a launch; its id is safe while the value holds it.
        key = (op, id(fmt), dtype, index_dtype, out_index_dtype, alignment, rope, structure, on.get_device())
        hit = self._hot.get(key)
        if hit is None:
            variant = Variant(op, fmt, dtype, index_dtype, out_index_dtype, alignment, rope=rope, structure=structure)
            hit = self._hot[key] = (self.warm(variant, on.device), fmt)
        return hit[0]

    def warm(self, variant: Variant, device: torch.device) -> Kernel | InterpretedKernel:
        """Load `variant` for `device`. What does not compile is remembered: each call raises that `NoKernel`."""
        key = (variant, -1 if device.index is None else device.index)
        found = self._kernels.get(key)
        if found is None:
            try:
                found = self._build(variant, device)
            except Exception as e:
                reason = f"triton {triton.__version__}", f"{type(e).__name__}: {e}"
                found = NoKernel(variant.op, str(device), [reason])
                if isinstance(e, NotLoaded):
                    raise found from e
                found.__cause__ = e
            self._kernels[key] = found
        if isinstance(found, NoKernel):
            raise found.with_traceback(None)
        return found

    def _build(self, variant: Variant, device: torch.device) -> Kernel | InterpretedKernel:
        source = self._ops[variant.op].source(variant, INTERPRETER_TILES, 32)
        if not isinstance(source.fn, triton.JITFunction):  # TRITON_INTERPRET=1 replaced it
            return InterpretedKernel(source)
        if device.index is None:
            raise ValueError(f"expected tensors on a {self.backend} device, got {device}")
        with torch.get_device_module(device).device(device), driving(self.backend) as driver:
            target = driver.get_current_target()
        return Kernel(self.source(variant, target.warp_size), device, target)
