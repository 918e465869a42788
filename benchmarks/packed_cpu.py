"""What packed CPU stores cost beside vLLM's: `python benchmarks/packed_cpu.py [--json]`, with the extra `peers`.

K and V of 8x128 bfloat16, through the public API and vLLM's op, in one process, into pages of one kind of memory; a
pool much larger than the last-level cache, other slots each call. Slots are consecutive from the start of a page;
pages in random order, as allocators hand them out; those of a range in random order; or scattered one by one. `lines`
is what a scattered store has to move: each unit of K that it writes costs a cache line read and written back. Ratios
are medians over rounds in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import at_least_two, environment, interleave, ratio, summary, used_pool

from portakv import LayerSpec

HEADS, DIM = 8, 128
TOKENS = (1, 16, 32, 64, 512, 4096, 16384)
LAYERS = [LayerSpec(None, HEADS, DIM)]


def load_vllm() -> Any:
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.submodule_search_locations, "needs the wheel of the extra `peers`"
    torch.ops.load_library(Path(found.submodule_search_locations[0], "_C.abi3.so"))
    return torch.ops._C


def slot_sets(order: str, size: int, page: int, tokens: int) -> list[torch.Tensor]:
    """Sets of `tokens` slots of a pool of `size`, from all over it."""
    sets, count = [], max(1, min(1024, 65536 // tokens))
    for _ in range(count):
        start = page * int(torch.randint(1, (size - tokens) // page, ()))
        if order == "consecutive":
            slots = start + torch.arange(tokens)
        elif order == "shuffled":
            slots = start + torch.randperm(tokens)
        elif order == "pages":
            pages = torch.randperm(size // page - 1)[: -(-tokens // page)] + 1
            slots = (pages[:, None] * page + torch.arange(page)).flatten()[:tokens]
        else:
            slots = torch.randint(page, size, (2 * tokens,)).unique()
            slots = slots[torch.randperm(len(slots))][:tokens]
        sets.append(slots)
    return sets


def measure(vllm: Any, layout: str, page: int, size: int, rounds: int) -> list[dict[str, Any]]:
    packed = used_pool(LAYERS, size=size, page_size=page, layout=layout)
    rows = used_pool(LAYERS, size=size, page_size=page)
    theirs = used_pool(LAYERS, size=size, page_size=page, layout=layout).get_kv_buffer(0)
    isa = layout.removeprefix("cpu_")

    def stores(sets: list[torch.Tensor], tokens: int) -> dict[str, Callable[[int], object]]:
        plans, n = [packed.plan_write(slots) for slots in sets], len(sets)
        k, v = torch.randn(2, tokens, HEADS, DIM).bfloat16().unbind()
        return {
            "packed": lambda i: packed.set_kv_buffer(0, plans[i % n], k, v),
            "vLLM": lambda i: vllm.cpu_attn_reshape_and_cache(k, v, *theirs, sets[i % n], isa, 1.0, 1.0, "auto"),
            "rows": lambda i: rows.set_kv_buffer(0, plans[i % n], k, v),
        }

    table = []
    for order in ("consecutive", "pages", "shuffled", "scattered"):
        for tokens in TOKENS:
            sets = slot_sets(order, size, page, tokens)
            candidates, calls = stores(sets, tokens), max(8, 4096 // tokens)
            beside_vllm = interleave({name: candidates[name] for name in ("packed", "vLLM")}, calls, rounds)
            beside_rows = interleave({name: candidates[name] for name in ("packed", "rows")}, calls, rounds)
            us = {name: summary(values) for name, values in (beside_rows | beside_vllm).items()}
            table.append(
                {
                    "layout": layout,
                    "page": page,
                    "slots": order,
                    "tokens": tokens,
                    "us": us,
                    "gb_per_s": 4 * tokens * HEADS * DIM * 2 / us["packed"][0] / 1000,
                    "faster_than_vllm": ratio(beside_vllm["vLLM"], beside_vllm["packed"]),
                    "of_row_bandwidth": ratio(beside_rows["rows"], beside_rows["packed"]),
                    "lines_gb_per_s": 2 * 64 * lines(layout, page, sets[0]) / us["packed"][0] / 1000,
                }
            )
    return table


def lines(layout: str, page: int, slots: torch.Tensor) -> int:
    """Cache lines of K and V that a store to `slots` writes, whole or in part."""
    k_tile, v_tile = (16, 2) if layout == "cpu_amx" else (min(32, page), 1)
    k_lines = DIM // 2 if layout == "cpu_amx" else DIM
    v_lines = DIM // 16 if layout == "cpu_amx" else DIM // 32
    return HEADS * (len((slots // k_tile).unique()) * k_lines + len((slots // v_tile).unique()) * v_lines)


def show(result: dict[str, Any]) -> None:
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    columns = ("layout", "page", "slots", "tokens", "µs", "GB/s", "vLLM µs", "× vLLM", "of rows' GB/s", "lines GB/s")
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in result["stores"]:
        median, low, high = row["us"]["packed"]
        cells = [row["layout"], str(row["page"]), row["slots"], str(row["tokens"])]
        cells += [f"{median:.1f} ({low:.1f}-{high:.1f})", f"{row['gb_per_s']:.1f}", f"{row['us']['vLLM'][0]:.1f}"]
        cells += [f"{row['faster_than_vllm']:.1f}", f"{row['of_row_bandwidth']:.2f}", f"{row['lines_gb_per_s']:.1f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, default=262_144, help="slots in each of three pools, 4 KiB of K and V each")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--rounds", type=at_least_two, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    vllm = load_vllm()
    stores = []
    for layout in ("cpu_amx", "cpu_vec"):
        stores += measure(vllm, layout, args.page, args.size, args.rounds)
    result = {"environment": environment(), "stores": stores}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
