"""examples/graph_engine.py: it runs as shown, and what an engine may get wrong it reports with exit code 1."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portakv import GraphWriteLoc, HybridKVPool, KVWriteLoc
from portakv.formats import SLOT_OPS, KVFormat

EXAMPLE = Path(__file__).parents[1] / "examples" / "graph_engine.py"


def test_it_runs_and_is_short() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads that spin on a busy machine take 30 times as long
    command = [sys.executable, "-W", "error", EXAMPLE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1
    assert "the tokens of eager decoding" in done.stdout
    assert done.stderr == ""
    assert len(EXAMPLE.read_text().splitlines()) < 200


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("graph_engine", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["graph_engine"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A captured graph for any device: the torch ops of a step and the very tensors they had, run again in order."""
    tape: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    class Tape(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            tape.append((func, args, kwargs or {}, out))
            return out

    with Tape():
        step()

    def replay() -> None:
        for func, args, kwargs, out in tape:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    return replay


def test_nothing_but_tensors_reaches_a_graph(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replayed without a line of its Python, the engine still makes the same tokens: addresses hold, and nothing that
    changes between rounds was read on the host."""
    ops = (*SLOT_OPS, *KVFormat(1, 8, 8, torch.bfloat16).ops)
    kernels = dict.fromkeys(ops, "reference")  # whose launches are torch ops
    monkeypatch.setattr(example, "POOL", example.POOL | {"kernels": kernels})
    monkeypatch.setattr(example, "capture", record)
    assert example.main() == 0, capsys.readouterr().out


def stale_tail(self: GraphWriteLoc, loc: torch.Tensor) -> None:
    """Leaves the slots of the batch before behind the live ones: padded requests overwrite what others now own."""
    self._translate(loc, self.swa_loc[: len(loc)], self.loc[: len(loc)], None, None)


def full_slots_on_both_sides(self: GraphWriteLoc, tokens: slice) -> KVWriteLoc:
    return KVWriteLoc(self.loc[tokens], self.loc[tokens])


def forgets_the_drafts(self: HybridKVPool, *args: Any, extra_lens: int | None = None, **options: Any) -> Any:
    """A verify that reads what is committed only."""
    return plan_read(self, *args, **options)


plan_read = HybridKVPool.plan_read


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (GraphWriteLoc, "fill", stale_tail),
        (GraphWriteLoc, "__getitem__", full_slots_on_both_sides),
        (HybridKVPool, "plan_read", forgets_the_drafts),
    ],
)
def test_a_wrong_engine_is_seen(
    owner: type, name: str, wrong: Any, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    assert example.main() == 1
    assert "differ from eager decoding" in capsys.readouterr().out
