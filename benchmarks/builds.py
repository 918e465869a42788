"""Whether a build of portakv is slower than another: `python benchmarks/builds.py OLD NEW [--only NAME] [--json FILE]`.

OLD and NEW are each a Python interpreter, a virtual environment, or a folder made by `pip install --no-deps --target`.
Processes of both take turns on one core (old, new, new, old, …), and each times the same calls of the public API, one
row after the other. A row's ratio is the median over pairs of processes of new / old, with its quartiles.

The exit status is 1 if a row's lower quartile is above 1.03 or the geometric mean of the ratios above 1.02.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROW_LIMIT, MEAN_LIMIT = 1.03, 1.02

BATCH_SECONDS, ROW_SECONDS = 2e-4, 0.1
"""What is timed at once, and how long a row is timed in one process, after half as long a warm-up."""

HEADS, DIM, WINDOW = 8, 128, 1024

Row = tuple[str, Callable[[int], object]]
"""A call gets its number. Names and what calls do are the same in every build."""


# What is timed. torch and portakv are those of the build, so nothing here imports them before its process asks.


def stores() -> Iterator[Row]:
    """Rows of 8x128 bfloat16 to slots in random order, in a full and in an SWA layer; and all that moves rows back."""
    import torch
    from timing import used_pool

    import portakv

    size = 16384
    layers = [portakv.LayerSpec(window, HEADS, DIM) for window in (None, WINDOW)]
    k, v = torch.randn(2, 4096, HEADS, DIM).bfloat16().unbind()
    pool, checked = (used_pool(layers, size=size, swa_size=size, strict=True, check=check) for check in (False, True))
    slots, own = pool.allocator.alloc(size)[torch.randperm(size)], checked.allocator.alloc(size)

    def store(to: portakv.HybridKVPool, layer: int, tokens: int, rope: portakv.Rope | None = None) -> Any:
        plans = [to.plan_write(part) for part in (slots if to is pool else own).split(tokens)[: size // tokens]]
        some_k, some_v, n = k[:tokens], v[:tokens], len(plans)
        return lambda i: to.set_kv_buffer(layer, plans[i % n], some_k, some_v, rope)

    for tokens, layer in itertools.product((1, 8, 256, 4096), (0, 1)):
        yield f"store {tokens}, {'SWA' if layer else 'full'} layer", store(pool, layer, tokens)
    for tokens in (1, 256):
        rope = portakv.Rope(torch.randn(4096, DIM), torch.arange(tokens))
        yield f"store {tokens} with rope", store(pool, 0, tokens, rope)
        yield f"store {tokens}, checked", store(checked, 0, tokens)
    some = slots[:256]
    plan, outputs = pool.plan_write(some), torch.empty(2, 256, HEADS, DIM, dtype=torch.bfloat16).unbind()
    yield "gather 256", lambda _: pool.gather_kv(0, plan, *outputs)
    yield "move 64", lambda _: pool.move_kv_cache(some[:64], some[64:128])
    yield "plan_write 1", lambda _: pool.plan_write(some[:1])
    yield "plan_write 64", lambda _: pool.plan_write(some[:64])
    graph = pool.graph_write_loc(256)
    yield "graph fill 64 of 256", lambda _: graph.fill(some[:64])


def packed_stores() -> Iterator[Row]:
    """Consecutive slots, as a prefill has them."""
    import torch
    from timing import used_pool

    import portakv

    for layout, tokens in itertools.product(("cpu_vec", "cpu_amx"), (8, 256)):
        layers = [portakv.LayerSpec(None, HEADS, DIM)]
        pool = used_pool(layers, size=16384, page_size=64, layout=layout, strict=True)
        plans = [pool.plan_write(part) for part in pool.allocator.alloc(16384).split(tokens)]
        k, v = torch.randn(2, tokens, HEADS, DIM).bfloat16().unbind()

        def store(i: int, pool: Any = pool, plans: Any = plans, k: Any = k, v: Any = v) -> None:
            pool.set_kv_buffer(0, plans[i % len(plans)], k, v)

        yield f"store {tokens}, {layout}", store


def read_plans() -> Iterator[Row]:
    """Eight requests of 2048 tokens in pages of 16."""
    import torch

    import portakv

    requests, tokens, page = 8, 2048, 16
    size = requests * tokens
    rows, lens = torch.randperm(requests), torch.full((requests,), tokens)
    for name, window in (("full", None), ("windowed", WINDOW)):
        layers = [portakv.LayerSpec(window, 1, 8)]
        pool = portakv.HybridKVPool(layers, size=size, swa_size=size, page_size=page, strict=True)
        pages = pool.allocator.alloc(size).view(-1, page)[torch.randperm(size // page)]
        read = (pages.reshape(requests, tokens).int(), rows, lens)

        def plan(_: int, pool: Any = pool, read: Any = read, **options: Any) -> object:
            return pool.plan_read(*read, index_dtype=torch.int32, **options)

        yield f"plan_read decode, {name} pages", lambda i, plan=plan: plan(i, structure="pages")
        yield f"plan_read prefill, {name}", lambda i, plan=plan: plan(i, query_lens=512, structure="ragged")


def allocations() -> Iterator[Row]:
    import portakv

    # Half of it is held, in no order, so that the free list is in none either.
    allocator = portakv.HybridSlotAllocator(65536, 65536, window=128)
    held = allocator.alloc(65536)
    allocator.free(held[1::2].flip(0))

    def evict(_: int) -> None:
        loc = allocator.alloc(256)
        allocator.evict_swa(loc[None], [0], [0], [256])
        allocator.free(loc)

    yield "alloc 1, free", lambda _: allocator.free(allocator.alloc(1))
    yield "alloc 64, free", lambda _: allocator.free(allocator.alloc(64))
    yield "alloc 256, evict, free", evict


def transformers_cache() -> Iterator[Row]:
    """A decode step of four sequences behind 32 tokens each, in eight layers, six of them windowed; taken back."""
    if importlib.util.find_spec("transformers") is None:
        return
    import torch

    import portakv
    from portakv.integrations.transformers import PortaKVCache

    layers = [portakv.LayerSpec(WINDOW if i % 4 else None, HEADS, DIM) for i in range(8)]
    cache = PortaKVCache(portakv.HybridKVPool(layers, size=2048, swa_size=2048, page_size=16, strict=True))
    kv = {tokens: torch.randn(2, 4, HEADS, tokens, DIM).bfloat16().unbind() for tokens in (1, 32)}

    def forward(tokens: int) -> None:
        for layer_id in range(len(layers)):
            cache.update(*kv[tokens], layer_id)

    def step(_: int) -> None:
        forward(1)
        cache.crop(-1)

    forward(32)
    yield "PortaKVCache decode", step


def measure(only: Sequence[str]) -> dict[str, Any]:
    """Microseconds of a call of each row, in this process."""
    import torch

    import portakv

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = {}
    for name, call in itertools.chain(stores(), packed_stores(), read_plans(), allocations(), transformers_cache()):
        if not only or any(part in name for part in only):
            rows[name] = time_calls(call)
    return {"build": str(Path(portakv.__file__).parent), "torch": torch.__version__, "us": rows}


def time_calls(call: Callable[[int], object]) -> float:
    """The median of calls after a warm-up, in microseconds of this process's own time, whatever else the core does."""
    start, done = time.process_time(), 0
    while (spent := time.process_time() - start) < ROW_SECONDS / 2 or not done:
        call(done)
        done += 1
    batch = max(1, round(BATCH_SECONDS * done / spent))
    samples, stop = [], time.process_time() + ROW_SECONDS
    while len(samples) < 3 or time.process_time() < stop:
        before = time.process_time_ns()
        for i in range(done, done + batch):
            call(i)
        samples.append((time.process_time_ns() - before) / batch / 1000)
        done += batch
    return statistics.median(samples)


# Which builds, and what becomes of the figures.


def run(build: Path, only: Sequence[str]) -> dict[str, Any]:
    """What one process of a build measures."""
    python, env = build, {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if build.is_dir():
        python = build / "bin" / "python"
        if not python.exists():
            python, env = Path(sys.executable), env | {"PYTHONPATH": str(build.resolve())}
    command = [str(python), __file__, "--measure", *(x for name in only for x in ("--only", name))]
    found: dict[str, Any] = json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)
    if "PYTHONPATH" in env and not Path(found["build"]).is_relative_to(build.resolve()):
        raise SystemExit(f"{build}: expected an interpreter or a folder with portakv in it, found {found['build']}")
    return found


def compare(old: Path, new: Path, pairs: int, only: Sequence[str]) -> dict[str, Any]:
    runs: dict[Path, list[dict[str, Any]]] = {old: [], new: []}
    for pair in range(pairs):
        for build in (new, old) if pair % 2 else (old, new):
            runs[build].append(run(build, only))
        print(f"pair {pair + 1} of {pairs}", end="\n" if pair + 1 == pairs else "\r", file=sys.stderr, flush=True)
    rows = {}
    for name in runs[old][0]["us"]:
        before, after = ([run["us"][name] for run in runs[build]] for build in (old, new))
        low, ratio, high = statistics.quantiles((b / a for a, b in zip(before, after, strict=True)), n=4)
        us = {"old_us": statistics.median(before), "new_us": statistics.median(after)}
        rows[name] = us | {"ratio": ratio, "low": low, "high": high}
    mean = statistics.geometric_mean(row["ratio"] for row in rows.values())
    environments = {name: {k: runs[b][0][k] for k in ("build", "torch")} for name, b in (("old", old), ("new", new))}
    return environments | {"pairs": pairs, "rows": rows, "geometric_mean": mean}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--pairs", type=int, default=15, help="of processes, at least 2")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="rows with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    if args.pairs < 2:
        parser.error(f"--pairs: expected at least 2, got {args.pairs}")
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the processes inherit it
    result = compare(args.old, args.new, args.pairs, args.only)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(f"old: {result['old']}\nnew: {result['new']}\n")
    print("| row | old µs | new µs | new / old | quartiles |\n|---|---|---|---|---|")
    slower = [name for name, row in result["rows"].items() if row["low"] > ROW_LIMIT]
    for name, row in result["rows"].items():
        cells = [name, f"{row['old_us']:.2f}", f"{row['new_us']:.2f}", f"{row['ratio']:.3f}"]
        print("| " + " | ".join([*cells, f"{row['low']:.3f}-{row['high']:.3f}"]) + " |")
    print(f"\ngeometric mean: {result['geometric_mean']:.3f}; slower than {ROW_LIMIT}: {', '.join(slower) or 'none'}")
    return int(bool(slower) or result["geometric_mean"] > MEAN_LIMIT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[3::2])))
        sys.exit()
    sys.exit(main())
