"""A device's own launch functions on its compiled kernels, executed without the device on CPU tensors.

kernel = ExecutingLauncher(Target.parse("sm_90")).bind("store_kv")
testing.check("store_kv", kernel, case, torch.device("cpu"))
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from portakv.compile import Target
from portakv.conformance.executors.memory import Memory
from portakv.device import Gpu
from portakv.formats import Variant
from portakv.kernels import _triton
from portakv.kernels._triton.launch import Launcher, Source, compile_source

Tensor = torch.Tensor


def load_executor(gpu: Gpu) -> tuple[ModuleType, str]:
    """The module that executes code for `gpu`, prepared, and the code's name. Raises `ModuleNotFoundError`."""
    module, code = gpu.executor
    executor = importlib.import_module(module)
    if hasattr(executor, "prepare"):
        executor.prepare()
    return executor, code


class ExecutedKernel:
    """Stands where `launch.Kernel` does: called with a grid, CPU tensors and the int scalars."""

    def __init__(self, source: Source, target: Target, launcher: ExecutingLauncher) -> None:
        self.rows, self.chunks = source.rows, source.chunks
        # Before it compiles: Intel's executor tells Triton what it must leave out.
        self._executor, code = load_executor(target.gpu)
        compiled = compile_source(source, target.triton())
        self._program = self._executor.parse(compiled.asm[code])
        self._threads = compiled.metadata.num_warps * target.lanes
        self._shared = compiled.metadata.shared
        self._launcher = launcher

    def __call__(self, grid: tuple[int, int, int], tensors: Sequence[Tensor], scalars: Sequence[int]) -> None:
        args = [*(t.data_ptr() for t in tensors), *scalars]
        # Triton adds pointers to scratch memory, which these kernels have none of.
        args += [0] * (len(self._program.parameters) - len(args))
        memory = Memory.of_tensors(tensors, self._launcher.races)
        schedule = self._launcher.schedule
        self._executor.run(self._program, args, grid, self._threads, self._shared, memory, schedule)


class ExecutingLauncher(Launcher):
    """The sources and tiles of the device folder that `target` is for.

    `races` says that what is launched next names a slot twice, so that programs may store different bytes to it.
    """

    def __init__(self, target: Target, schedule: random.Random | None = None) -> None:
        own = target.launcher()
        super().__init__(own.backend, _triton.OPS, own.tiles)
        self.target = target
        self.schedule = schedule
        self.races = False

    def _build(self, variant: Variant, device: torch.device) -> Any:
        return ExecutedKernel(self.source(variant, self.target.lanes), self.target, self)
