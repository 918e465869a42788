"""Timing for all benchmarks: candidates in turn within each round, so that a drifting machine hits them alike."""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from portakv import HybridKVPool, LayerSpec, dispatch

_filled: list[torch.Tensor] = []


def fill(*buffers: torch.Tensor) -> None:
    """Write other bytes to every page: the host of a virtual machine may keep equal ones once, and copy on a write.

    It may also hold up the first write to a page, again and again: `interleave` writes to each before it times.
    """
    for buffer in buffers:
        buffer.view(torch.int64).random_()
        storage = buffer.untyped_storage()
        if all(storage.data_ptr() != other.data_ptr() for other in _filled):
            _filled.append(torch.empty(0, dtype=torch.uint8).set_(storage))


def used_pool(layers: list[LayerSpec], **options: Any) -> HybridKVPool:
    """A pool whose buffers were filled."""
    pool = HybridKVPool(layers, **options)
    for layer_id in range(len(layers)):
        fill(*pool.get_kv_buffer(layer_id))
    return pool


def interleave(candidates: Mapping[str, Callable[[int], object]], calls: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call of each candidate, one figure per round; candidates get the number of the call.

    A call that is not timed comes first: lines that another candidate left to be written back are not this one's.
    """
    for call in candidates.values():
        for i in range(min(calls, 64)):
            call(i)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(rounds):
        for memory in _filled:
            memory[::4096].add_(0)
        for name, call in candidates.items():
            call(turn * calls - 1)
            start = time.perf_counter_ns()
            for i in range(turn * calls, (turn + 1) * calls):
                call(i)
            times[name].append((time.perf_counter_ns() - start) / calls / 1000)
    return times


def at_least_two(text: str) -> int:
    """An argparse type, for rounds: quartiles need two."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, got {number}")
    return number


def summary(values: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def ratio(slow: list[float], fast: list[float]) -> float:
    """Median over the rounds of how many times `fast` is faster."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def environment() -> dict[str, str]:
    """What a figure depends on: versions, processor, threads and commit."""
    try:
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    found = dispatch.facts("cpu")
    return {
        "portakv": commit or "no git",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{found.name} {sorted(found.features)}",
        "threads": str(torch.get_num_threads()),
    }
