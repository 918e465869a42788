"""What a store costs on a CPU beside torch's own ways: `python benchmarks/store_cpu.py [--json]`.

Rows of 8x128 for K and V, random slots in a pool much larger than the last-level cache, another set of slots each
call, all through the public API. Ratios are medians over rounds in which both candidates ran in turn. `index_put` runs
on buffers from `torch.zeros`, as an engine has them without a pool, and on the pool's own, which lie in huge pages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from timing import at_least_two, environment, fill, interleave, ratio, summary, used_pool

from portakv import HybridKVPool, LayerSpec
from portakv.allocator import HybridSlotAllocator

HEADS, DIM = 8, 128
TOKENS = (1, 8, 64, 512, 4096, 16384)
FP8 = torch.float8_e4m3fn
LAYERS = [LayerSpec(None, HEADS, DIM), LayerSpec(1024, HEADS, DIM)]

Tensor = torch.Tensor


def put_twice(caches: tuple[Tensor, Tensor], loc: Tensor, k: Tensor, v: Tensor) -> None:
    caches[0][loc] = k
    caches[1][loc] = v


def quantise_and_put(caches: tuple[Tensor, Tensor], loc: Tensor, k: Tensor, v: Tensor) -> None:
    """The torch expression of a quantised store; fp8 is indexed as bytes, as torch lacks the ops."""
    for cache, x in zip(caches, (k, v), strict=True):
        cache.view(torch.uint8)[loc] = (x.float() * 0.5).clamp(-448, 448).to(FP8).view(torch.uint8)


def stores(
    size: int, tokens: int, bf16: HybridKVPool, fp8: HybridKVPool, plain: tuple[Tensor, Tensor]
) -> dict[str, Callable[[int], None]]:
    """The candidates; call i of each writes the same set of slots."""
    order = torch.randperm(size) + 1
    slots = [order[i : i + tokens].clone() for i in range(0, size - tokens, tokens)][:4096]
    plans = [bf16.plan_write(loc) for loc in slots]
    k, v = torch.randn(2, tokens, HEADS, DIM).bfloat16().unbind()
    n = len(slots)
    own, quantised = bf16.get_kv_buffer(0), fp8.get_kv_buffer(0)
    k_copy, v_copy = torch.empty_like(k), torch.empty_like(v)

    def copy(_: int) -> None:
        k_copy.copy_(k)
        v_copy.copy_(v)

    return {
        "set_kv_buffer": lambda i: bf16.set_kv_buffer(0, plans[i % n], k, v),
        "two index_put": lambda i: put_twice(plain, slots[i % n], k, v),
        "two index_put, pool": lambda i: put_twice(own, slots[i % n], k, v),
        "set_kv_buffer fp8": lambda i: fp8.set_kv_buffer(0, plans[i % n], k, v),
        "quantise, two index_put": lambda i: quantise_and_put(quantised, slots[i % n], k, v),
        "two copy_ in cache": copy,
    }


def measure_stores(size: int, rounds: int) -> list[dict[str, Any]]:
    """Each comparison runs by itself, so that a heavy candidate's leftovers in the caches do not slow the next one."""
    bf16, fp8 = used_pool(LAYERS[:1], size=size), used_pool(LAYERS[:1], size=size, dtype=FP8)
    fp8.set_scales(0, 2.0, 2.0)
    k_plain, v_plain = (torch.zeros(size + 1, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    fill(k_plain, v_plain)
    table = []
    for tokens in TOKENS:
        calls, candidates = max(1, 8192 // tokens), stores(size, tokens, bf16, fp8, (k_plain, v_plain))

        def beside(
            a: str, b: str, calls: int = calls, candidates: dict[str, Any] = candidates
        ) -> dict[str, list[float]]:
            return interleave({name: candidates[name] for name in (a, b)}, calls, rounds)

        plain = beside("set_kv_buffer", "two index_put")
        in_pool = beside("set_kv_buffer", "two index_put, pool")
        both = beside("set_kv_buffer", "set_kv_buffer fp8")
        quantised = beside("set_kv_buffer fp8", "quantise, two index_put")
        copied = beside("set_kv_buffer", "two copy_ in cache")
        table.append(
            {
                "tokens": tokens,
                "us": {name: summary(values) for name, values in (copied | quantised | both | plain).items()},
                "gb_per_s": 4 * tokens * HEADS * DIM * 2 / summary(plain["set_kv_buffer"])[0] / 1000,
                "faster_than_two_index_put": ratio(plain["two index_put"], plain["set_kv_buffer"]),
                "faster_than_it_in_the_pool": ratio(in_pool["two index_put, pool"], in_pool["set_kv_buffer"]),
                "fp8_of_bf16_time": ratio(both["set_kv_buffer fp8"], both["set_kv_buffer"]),
                "fp8_faster_than_torch": ratio(quantised["quantise, two index_put"], quantised["set_kv_buffer fp8"]),
            }
        )
    return table


def measure_plan(rounds: int) -> dict[str, Any]:
    pool = HybridKVPool(LAYERS, size=65536, swa_size=65536)
    loc = pool.allocator.alloc(64)[torch.randperm(64)]
    mapping = pool.full_to_swa
    times = interleave(
        {"plan_write": lambda _: pool.plan_write(loc), "mapping[loc]": lambda _: mapping[loc]}, 2000, rounds
    )
    return {
        "us": {name: summary(values) for name, values in times.items()},
        "of_one_gather": ratio(times["plan_write"], times["mapping[loc]"]),
    }


def measure_allocator(size: int, rounds: int) -> list[dict[str, Any]]:
    """`alloc(1)` + `free` with the mapping kept, at three fills, beside two one-row index_put."""
    cache = HybridKVPool(LAYERS[:1], size=65536)
    k = torch.randn(1, HEADS, DIM).bfloat16()
    ids = torch.randint(1, 65536, (4096, 1))
    table = []
    for full in (0.0, 0.5, 0.999):
        allocator = HybridSlotAllocator(size, size)
        if full:
            held = allocator.alloc(int(size * full))
            # Give a scattered tenth back, so that the free list is no longer in order.
            allocator.free(held[torch.randperm(len(held))[: len(held) // 10]])
        times = interleave(
            {
                "alloc(1) + free": lambda _, a=allocator: a.free(a.alloc(1)),
                "two index_put": lambda i: put_twice(cache.get_kv_buffer(0), ids[i % 4096], k, k),
            },
            2000,
            rounds,
        )
        table.append(
            {
                "slots": size,
                "fill": full,
                "us": {name: summary(values) for name, values in times.items()},
                "of_two_index_put": ratio(times["alloc(1) + free"], times["two index_put"]),
            }
        )
    return table


def measure_overhead() -> list[dict[str, Any]]:
    table = []
    for page_size in (1, 16):
        pool = HybridKVPool(LAYERS[:1], size=1 << 16, swa_size=1 << 16, page_size=page_size)
        table.append({"page_size": page_size, "bytes_per_slot": (pool.nbytes - pool.kv_bytes) / pool.size})
    return table


def show(result: dict[str, Any]) -> None:
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    columns = ("tokens", "set_kv_buffer µs", "GB/s", "× two index_put", "× in the pool's memory")
    columns += ("fp8 µs", "fp8 / bf16", "fp8 × torch", "two copy_ µs")
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in result["stores"]:
        us = row["us"]
        median, low, high = us["set_kv_buffer"]
        cells = [str(row["tokens"]), f"{median:.2f} ({low:.2f}-{high:.2f})", f"{row['gb_per_s']:.1f}"]
        cells += [f"{row['faster_than_two_index_put']:.1f}", f"{row['faster_than_it_in_the_pool']:.1f}"]
        cells += [f"{us['set_kv_buffer fp8'][0]:.2f}", f"{row['fp8_of_bf16_time']:.2f}"]
        cells += [f"{row['fp8_faster_than_torch']:.1f}", f"{us['two copy_ in cache'][0]:.2f}"]
        print("| " + " | ".join(cells) + " |")
    plan = result["plan_write"]
    us = plan["us"]["plan_write"][0]
    print(f"\nplan_write of 64 tokens: {us:.2f} µs, {plan['of_one_gather']:.2f} of one mapping[loc]")
    for row in result["allocator"]:
        what, us = f"in {row['slots']:,} slots, {row['fill']:.1%} full", row["us"]["alloc(1) + free"][0]
        print(f"alloc(1) + free {what}: {us:.2f} µs, {row['of_two_index_put']:.2f} of two one-row index_put")
    for row in result["overhead"]:
        print(f"beyond K and V at page size {row['page_size']}: {row['bytes_per_slot']:.1f} bytes per full slot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, default=600_000, help="slots in the pool, 4 KiB of K and V each")
    parser.add_argument("--rounds", type=at_least_two, default=31)
    args = parser.parse_args()
    torch.manual_seed(0)
    result = {
        "environment": environment(),
        "stores": measure_stores(args.size, args.rounds),
        "plan_write": measure_plan(args.rounds),
        "allocator": measure_allocator(10_000_000, args.rounds),
        "overhead": measure_overhead(),
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
