"""What a row store costs beside IPEX's CPU op: `python benchmarks/ipex_cpu.py [--json]`.

In an environment of its own: `torch==2.8.0`, `intel-extension-for-pytorch==2.8.0` and this package built there. K and V
rows of 8x128 bfloat16, random slots in a pool much larger than the last-level cache, another set each call; IPEX's
cache is `[blocks, heads, block, dim]`, in the pool's kind of memory. Ratios are medians over rounds in turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import intel_extension_for_pytorch  # type: ignore[import-not-found]  # noqa: F401 (registers torch_ipex)
import torch
from timing import at_least_two, environment, interleave, ratio, summary, used_pool

from portakv import HybridKVPool, LayerSpec

HEADS, DIM, BLOCK = 8, 128, 16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def stores(
    pool: HybridKVPool, caches: list[torch.Tensor], size: int, tokens: int
) -> dict[str, Callable[[int], object]]:
    """The candidates; call i of each writes the same set of slots."""
    order = torch.randperm(size) + BLOCK
    slots = [order[i : i + tokens].clone() for i in range(0, size - tokens, tokens)][:4096]
    plans, narrow, n = [pool.plan_write(x) for x in slots], [x.int() for x in slots], len(slots)
    k, v = torch.randn(2, tokens, HEADS, DIM).bfloat16().unbind()
    ipex = torch.ops.torch_ipex.reshape_and_cache
    return {
        "set_kv_buffer": lambda i: pool.set_kv_buffer(0, plans[i % n], k, v),
        "IPEX": lambda i: ipex(k, v, *caches, narrow[i % n], "auto", 1.0, 1.0),
    }


def measure(size: int, rounds: int) -> list[dict[str, Any]]:
    pool, other = (used_pool([LayerSpec(None, HEADS, DIM)], size=size, page_size=BLOCK) for _ in range(2))
    caches = [x.view(-1, HEADS, BLOCK, DIM) for x in other.get_kv_buffer(0)]
    table = []
    for tokens in TOKENS:
        times = interleave(stores(pool, caches, size, tokens), max(1, 8192 // tokens), rounds)
        us = {name: summary(values) for name, values in times.items()}
        table.append({"tokens": tokens, "us": us, "faster_than_ipex": ratio(times["IPEX"], times["set_kv_buffer"])})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, default=300_000, help="slots in each of two pools, 4 KiB of K and V each")
    parser.add_argument("--rounds", type=at_least_two, default=31)
    args = parser.parse_args()
    torch.manual_seed(0)
    result = {"environment": environment(), "stores": measure(args.size, args.rounds)}
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    print("\n| tokens | set_kv_buffer µs | IPEX µs | × IPEX |\n|---|---|---|---|")
    for row in result["stores"]:
        cells = [f"{m:.2f} ({low:.2f}-{high:.2f})" for m, low, high in map(row["us"].get, ("set_kv_buffer", "IPEX"))]
        print(f"| {row['tokens']} | {cells[0]} | {cells[1]} | {row['faster_than_ipex']:.2f} |")


if __name__ == "__main__":
    main()
