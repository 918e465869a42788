"""examples/mini_engine.py serves requests of different lengths and arrivals, and says so where its tokens are wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from portakv.read_plan import ReadIndices, ReadPlan

EXAMPLE = Path(__file__).parents[1] / "examples" / "mini_engine.py"


def test_every_request_gets_the_tokens_of_generate() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "tokens identical: yes"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mini_engine", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mini_engine"] = module
    spec.loader.exec_module(module)
    return module


def test_a_window_one_key_short_is_noticed(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ReadPlan.for_layer

    def short(plan: ReadPlan, layer_id: int) -> ReadIndices:
        read = whole(plan, layer_id)
        return read if read.window is None else dataclasses.replace(read, window=read.window - 1)

    monkeypatch.setattr(ReadPlan, "for_layer", short)
    assert not example.serve("gemma3_text", count=4)
