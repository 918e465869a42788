"""Fixtures of the scenarios: a pool on each row that can run here, and a comparison of all it holds.

Tests that take `accelerator` are collected only for kinds named in PORTAKV_TEST_DEVICES.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import portakv
from portakv import dispatch

ACCELERATORS = [kind for kind in os.environ.get("PORTAKV_TEST_DEVICES", "").split(",") if kind not in ("", "cpu")]


def _backends() -> list[tuple[str, str]]:
    """(device kind, row): what can serve on this CPU, and the whole column of each named accelerator."""
    chosen = dispatch.select("store_kv", dispatch.facts("cpu"))
    served = [row.name for row, why in chosen.rejected if why.endswith("comes first")]
    pairs = [("cpu", name) for name in (chosen.row.name, *served)]
    for kind in ACCELERATORS:
        pairs += [(kind, row.name) for row in dispatch.rows("store_kv", dispatch.find_device(kind))]
    return pairs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        pairs = _backends()
        metafunc.parametrize("backend", pairs, ids=["-".join(pair) for pair in pairs], indirect=True)
    if "accelerator" in metafunc.fixturenames:
        metafunc.parametrize("accelerator", ACCELERATORS, indirect=True)


def pytest_pycollect_makeitem(name: str, obj: object) -> list[Any] | None:
    needs = inspect.isfunction(obj) and "accelerator" in inspect.signature(obj).parameters
    return [] if needs and not ACCELERATORS else None


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> torch.device:
    return dispatch.resolve(request.param)[1]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> tuple[torch.device, str]:
    """A device and the row that serves every op on it."""
    kind, row = request.param
    return dispatch.resolve(kind)[1], row


@pytest.fixture
def make_pool(
    backend: tuple[torch.device, str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., portakv.HybridKVPool]:
    """HybridKVPool on one backend: `make_pool(layers, size=…, …)`."""
    device, row = backend
    monkeypatch.setenv("PORTAKV_KERNELS", ",".join(f"{op}={row}" for op in dispatch.OPS))
    return functools.partial(portakv.HybridKVPool, device=device, check=False)


@pytest.fixture
def kernel(backend: tuple[torch.device, str]) -> Callable[[str], Callable[..., None]]:
    """`kernel(op)`: the function that serves `op` on one backend."""
    device, row = backend
    found = dispatch.facts(device)
    return lambda op: dispatch.load(op, dispatch.select(op, found, dispatch.Request(wanted=row)))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each op's kernel by pools that are built after this."""
    counts: Counter[str] = Counter()
    load = dispatch.load

    def counted(op: str, selection: dispatch.Selection) -> Callable[..., None]:
        run = load(op, selection)

        def call(*args: Any) -> None:
            counts[op] += 1
            run(*args)

        return call

    monkeypatch.setattr(dispatch, "load", counted)
    return counts


@pytest.fixture
def unchanged() -> Callable[..., AbstractContextManager[None]]:
    """`with unchanged(pool, tensor, …):` fails if the block changes one byte or counter of them."""
    return _unchanged


@contextmanager
def _unchanged(*things: object) -> Iterator[None]:
    before = dict(_leaves(things, ""))
    yield
    after = dict(_leaves(things, ""))
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    assert not changed, f"changed: {changed}"


def _leaves(x: object, path: str) -> Iterator[tuple[str, object]]:
    """Every array and plain value that `x` holds, by attribute path; an array with its address and bytes."""
    if isinstance(x, torch.Tensor):
        yield path, (x.data_ptr(), x.shape, x.stride(), x.dtype)
        if x.device.type != "meta":
            yield f"{path}.bytes", x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(x, np.ndarray):
        yield path, (x.ctypes.data, x.shape, x.dtype, x.tobytes())
    elif isinstance(x, (list, tuple)):
        for i, item in enumerate(x):
            yield from _leaves(item, f"{path}[{i}]")
    elif isinstance(x, dict):
        for key, item in x.items():
            yield from _leaves(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        for item in dataclasses.fields(x):
            yield from _leaves(getattr(x, item.name), f"{path}.{item.name}")
    elif type(x).__module__.startswith("portakv") and not callable(x):
        slots = [name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in {*getattr(x, "__dict__", {}), *slots}:
            yield from _leaves(getattr(x, name), f"{path}.{name}")
    elif not callable(x):
        yield path, x
