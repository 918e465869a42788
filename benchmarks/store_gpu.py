"""What a store costs on a GPU beside plain copies and other engines: `python benchmarks/store_gpu.py [--json]`.

K and V rows of 8x128 at random slots, through the public API. Many stores are captured in one graph, another set of
slots each, so that launches do not hide in one another's shadow; large sizes touch far more memory than the L2 holds.
Candidates replay in turn within each round. Eager calls are timed on the host, with the queue empty at the start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from timing import at_least_two, environment, ratio, summary

from portakv import HybridKVPool, KVWriteLoc, LayerSpec, check, dispatch
from portakv import device as devices
from portakv.formats import KVFormat
from portakv.kernels.reference import rows as reference

HEADS, DIM, PAGE = 8, 128, 16
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
EAGER_TOKENS = (1, 64)
STORES_PER_GRAPH, EAGER_CALLS = 256, 200
"""At most. So many eager calls fit in a device's queue, so that none waits for the device."""

SLOT_BYTES = 2 * HEADS * DIM * 2
"""K and V of one token in bf16."""

OURS, FP8, COPY = "set_kv_buffer", "set_kv_buffer fp8", "copy_"
READ_AND_WRITTEN = {FP8: 3 / 4}
"""Bytes moved, of those a bf16 store moves: an fp8 store reads two bytes and writes one."""

Tensor = torch.Tensor
Store = Callable[[Tensor, Tensor, Tensor], object]
"""(k, v, loc): one way to store rows, with its cache bound."""


def put_twice(k_cache: Tensor, v_cache: Tensor) -> Store:
    def store(k: Tensor, v: Tensor, loc: Tensor) -> None:
        k_cache[loc] = k
        v_cache[loc] = v

    return store


def vllm_store(k_cache: Tensor, v_cache: Tensor) -> Store:
    from vllm import _custom_ops as ops

    k_pages, v_pages = (cache.view(-1, PAGE, HEADS, DIM) for cache in (k_cache, v_cache))
    one = torch.ones((), dtype=torch.float32, device=k_cache.device)
    return lambda k, v, loc: ops.reshape_and_cache_flash(k, v, k_pages, v_pages, loc, "auto", one, one)


def sglang_store(k_cache: Tensor, v_cache: Tensor) -> Store:
    k_rows, v_rows = k_cache.flatten(1), v_cache.flatten(1)
    try:
        from sgl_kernel import set_kv_buffer_kernel
    except ImportError:
        from sglang.jit_kernel.kvcache import store_cache

        return lambda k, v, loc: store_cache(k.flatten(1), v.flatten(1), k_rows, v_rows, loc)
    return lambda k, v, loc: set_kv_buffer_kernel(k_rows, v_rows, loc, k.flatten(1), v.flatten(1))


def flashinfer_store(k_cache: Tensor, v_cache: Tensor) -> Store:
    """Each token as a request of one page of one token, which is how it addresses arbitrary slots."""
    from flashinfer.page import append_paged_kv_cache

    pages = (k_cache.unsqueeze(1), v_cache.unsqueeze(1))
    count = torch.arange(max(TOKENS) + 1, dtype=torch.int32, device=k_cache.device)
    zeros, ones = torch.zeros_like(count), torch.ones_like(count)
    narrow: dict[tuple[int, int], Tensor] = {}  # it takes int32 slots; the cast is not its own cost

    def store(k: Tensor, v: Tensor, loc: Tensor) -> None:
        n = len(loc)
        key = loc.data_ptr(), n
        if key not in narrow:
            narrow[key] = loc.int()
        append_paged_kv_cache(k, v, count[:n], zeros[:n], pages, narrow[key], count[: n + 1], ones[:n], "NHD")

    return store


PEERS = {"vLLM": vllm_store, "SGLang": sglang_store, "FlashInfer": flashinfer_store}


class Bench:
    """Pools, source rows and slots on one device. `num_slots` bounds the memory: 6 KiB each for two pools."""

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self.device, self.num_slots = device, num_slots // PAGE * PAGE
        layers = [LayerSpec(None, HEADS, DIM)]
        self.pool, self.fp8 = (
            HybridKVPool(layers, size=self.num_slots, page_size=PAGE, dtype=dtype, device=device, check=False)
            for dtype in (torch.bfloat16, "fp8")
        )
        self.fp8.set_scales(0, 2.0, 2.0)
        self.caches = self.pool.get_kv_buffer(0)
        self.order = (torch.randperm(self.num_slots) + PAGE).to(device)
        self.peers: dict[str, Store] = {}
        self.notes: dict[str, str] = {}
        for name, make in PEERS.items():
            try:
                self.peers[name] = make(*self.caches)
            except Exception as e:  # a peer that is missing or broken is a note, never the end of a run
                self.notes[name] = "not installed" if isinstance(e, ModuleNotFoundError) else _one_line(e)

    def candidates(self, tokens: int) -> tuple[int, dict[str, Callable[[int], object]]]:
        """How many stores there are, and each way to do store i of them."""
        count = min(STORES_PER_GRAPH, self.num_slots // (2 * tokens))
        slots = [KVWriteLoc(self.order[i * tokens : (i + 1) * tokens]) for i in range(count)]
        # Small batches come out of the kernel before and are in the L2; large ones must not fit in it.
        rows = torch.randn(min(count, 8), 2, tokens, HEADS, DIM, device=self.device, dtype=torch.bfloat16)
        sources = [pair.unbind() for pair in rows]
        n = len(sources)
        moved = [pair.flatten(0, 1) for pair in rows]
        flat = self.caches[0][PAGE:][: 2 * tokens * count].split(2 * tokens)
        stores: dict[str, Store] = {"index_put": put_twice(*self.caches)} | self.peers
        calls: dict[str, Callable[[int], object]] = {
            OURS: lambda i: self.pool.set_kv_buffer(0, slots[i], *sources[i % n]),
            FP8: lambda i: self.fp8.set_kv_buffer(0, slots[i], *sources[i % n]),
            COPY: lambda i: flat[i].copy_(moved[i % n]),
        }
        for name, store in stores.items():
            calls[name] = lambda i, store=store: store(*sources[i % n], slots[i].loc)
        for name in [name for name in calls if name != COPY]:
            problem = self._check(name, calls[name], slots[count - 1].loc, *sources[(count - 1) % n], count - 1)
            if problem is not None:
                if name in (OURS, FP8):
                    raise RuntimeError(f"{name}: {problem}")
                self.notes[name] = problem
                del calls[name]
        return count, calls

    def _check(
        self, name: str, call: Callable[[int], object], loc: Tensor, k: Tensor, v: Tensor, last: int
    ) -> str | None:
        """Why a candidate is no store of these rows, if it is none."""
        pool = self.fp8 if name == FP8 else self.pool
        fmt = KVFormat(HEADS, DIM, DIM, pool.dtype, PAGE)
        inv = torch.full((HEADS,), 0.5, device=self.device)
        loc, k, v = loc[:512], k[:512], v[:512]
        caches = [cache.view(torch.uint8) for cache in pool.get_kv_buffer(0)]
        try:
            for cache in caches:
                cache[loc] = 0
            call(last)
            wrong = [
                not torch.equal(cache[loc], reference.convert(x, fmt, inv).view(torch.uint8))
                for cache, x in zip(caches, (k, v), strict=True)
            ]
        except Exception as e:
            return _one_line(e)
        return "wrote other bytes than it was given" if any(wrong) else None


def measure_copy(bench: Bench, rounds: int) -> float:
    """GB/s, read and written, of the largest plain copy at hand: one half of the K cache onto the other."""
    cache = bench.caches[0]
    half = len(cache) // 2
    timed = stopwatch(bench.device)
    times = [timed(lambda: cache[:half].copy_(cache[half : 2 * half])) for _ in range(rounds + 3)][3:]
    return 2 * cache[:half].nbytes / statistics.median(times) / 1000


def measure_stores(bench: Bench, tokens: int, rounds: int, copy_rate: float) -> dict[str, Any]:
    count, calls = bench.candidates(tokens)
    graphs: dict[str, Callable[[], object]] = {}
    for name, call in calls.items():
        try:
            graphs[name] = check.capture(lambda call=call: [call(i) for i in range(count)], bench.device)
        except Exception as e:
            if name in (OURS, FP8, COPY):
                raise
            bench.notes[name] = _one_line(e)
    times = interleave(graphs, bench.device, rounds)
    us = {name: [t / count for t in values] for name, values in times.items()}
    moved = {name: 2 * tokens * SLOT_BYTES * READ_AND_WRITTEN.get(name, 1) for name in us}
    rates = {name: moved[name] / statistics.median(values) / 1000 for name, values in us.items()}
    return {
        "tokens": tokens,
        "stores_per_graph": count,
        "mb_written": count * tokens * SLOT_BYTES / 1e6,
        "us": {name: summary(values) for name, values in us.items()},
        "gb_per_s": rates,
        "of_copy_bandwidth": {name: rate / copy_rate for name, rate in rates.items()},
        "of_copy_time": {name: ratio(values, us[COPY]) for name, values in us.items()},
    }


def measure_eager(bench: Bench, tokens: int, rounds: int) -> dict[str, Any]:
    """Host time per call."""
    count, calls = bench.candidates(tokens)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            _synchronize(bench.device)
            start = time.perf_counter_ns()
            for i in range(EAGER_CALLS):
                call(i % count)
            times[name].append((time.perf_counter_ns() - start) / EAGER_CALLS / 1000)
    return {"tokens": tokens, "us": {name: summary(values[1:]) for name, values in times.items()}}


def interleave(graphs: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Device microseconds per replay of each graph, one figure per round; all graphs take turns in each."""
    timed = stopwatch(device)
    repeats = {}
    for name, replay in graphs.items():
        replay()
        # 2 ms of work, so that the gap before the first launch does not count.
        repeats[name] = max(1, min(50, int(2000 / max(timed(replay), 1.0))))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, replay in graphs.items():
            n = repeats[name]
            times[name].append(timed(lambda replay=replay, n=n: [replay() for _ in range(n)]) / n)
    return times


def stopwatch(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """A function that gives the microseconds `device` spends on what a call enqueues."""
    module = torch.get_device_module(device)

    def by_events(call: Callable[[], object]) -> float:
        start, end = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)

    def by_clock(call: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1000

    return by_clock if devices.shares_host_memory(device) else by_events


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def _one_line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0]


def default_slots(device: torch.device) -> int:
    """Half a million, 3 GiB in two pools, or what fits in a quarter of the free memory."""
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    free = info(device)[0] if info else 8 << 30
    return int(min(1 << 19, free // (4 * 3 * SLOT_BYTES)))


def targets(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The figures a GPU should reach, each with what was measured; `None` where its sizes were not."""
    stores, eager = result["stores"], result["eager"]
    large = [row for row in stores if row["tokens"] >= 16384]
    small = [row for row in stores if row["tokens"] <= 256]
    for name, bound, least, values in (
        ("bf16, 16384 tokens and more: of copy bandwidth", 0.90, True, [r["of_copy_bandwidth"][OURS] for r in large]),
        ("fp8, 16384 tokens and more: of copy bandwidth", 0.85, True, [r["of_copy_bandwidth"][FP8] for r in large]),
        ("bf16, 1 to 256 tokens: of copy_ time", 1.2, False, [r["of_copy_time"][OURS] for r in small]),
        ("eager host time per store, µs", 8.0, False, [r["us"][OURS][0] for r in eager]),
    ):
        worst = (min if least else max)(values, default=None)
        reached = worst is not None and (worst >= bound if least else worst <= bound)
        yield {"target": name, "bound": bound, "at_least": least, "worst": worst, "reached": reached}


def measure(
    device: torch.device, num_slots: int, tokens: Sequence[int], rounds: int, until: float = float("inf")
) -> dict[str, Any]:
    """The whole benchmark. Sizes that would start after `until` on the monotonic clock are left out, largest last."""
    torch.manual_seed(0)
    bench = Bench(device, num_slots)
    result: dict[str, Any] = {
        "environment": environment() | device_environment(device),
        "num_slots": bench.num_slots,
        "kernels": bench.pool.kernels,
        "copy_gb_per_s": measure_copy(bench, rounds),
        "stores": [],
        "eager": [],
        "left_out": [n for n in tokens if 2 * n > bench.num_slots],
    }
    # The sizes at both ends carry the targets, so they come first.
    fitting = sorted(set(tokens) - set(result["left_out"]), key=lambda n: (256 < n < 16384, n))
    for n in fitting:
        if time.monotonic() > until:
            result["left_out"].append(n)
            continue
        result["stores"].append(measure_stores(bench, n, rounds, result["copy_gb_per_s"]))
    result["stores"].sort(key=lambda row: row["tokens"])
    if time.monotonic() <= until:
        result["eager"] = [measure_eager(bench, n, rounds) for n in EAGER_TOKENS]
    result["notes"] = bench.notes
    result["targets"] = [] if devices.shares_host_memory(device) else list(targets(result))
    return result


def device_environment(device: torch.device) -> dict[str, str]:
    found = dispatch.facts(device)
    versions = {name: package.version or package.problem or "built" for name, package in found.packages.items()}
    runtime = torch.version.cuda or torch.version.hip or "none"
    return {"device": f"{found.name} ({found.device.name} {found.arch})", "runtime": runtime} | versions


def show(result: dict[str, Any]) -> None:
    print(f"plain copy: {result['copy_gb_per_s']:.0f} GB/s (read + write)")
    print(
        "| tokens | set_kv_buffer µs (quartiles) | GB/s | of copy | × copy_ time | fp8 µs | fp8 of copy | others, µs |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in result["stores"]:
        us, rate, of_copy = row["us"], row["gb_per_s"][OURS], row["of_copy_bandwidth"]
        median, low, high = us[OURS]
        others = ", ".join(f"{name} {values[0]:.2f}" for name, values in us.items() if name not in (OURS, FP8))
        print(
            f"| {row['tokens']} | {median:.2f} ({low:.2f}-{high:.2f}) | {rate:.0f} | {of_copy[OURS]:.0%} "
            f"| {row['of_copy_time'][OURS]:.2f} | {us[FP8][0]:.2f} | {of_copy[FP8]:.0%} | {others} |"
        )
    for row in result["eager"]:
        shown = ", ".join(f"{name} {values[0]:.2f}" for name, values in row["us"].items())
        print(f"eager host µs per store of {row['tokens']} tokens: {shown}")
    for name, why in result["notes"].items():
        print(f"{name}: {why}")
    if result["left_out"]:
        print(f"not measured, for want of memory or time: {result['left_out']} tokens")
    for t in result["targets"]:
        got = (
            "not yet measured" if t["worst"] is None else f"{t['worst']:.2f}, {'reached' if t['reached'] else 'MISSED'}"
        )
        print(f"target {t['target']} {'≥' if t['at_least'] else '≤'} {t['bound']}: {got}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=[known.name for known in dispatch.DEVICES])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--slots", type=int, help="slots in each of two pools, 6 KiB of K and V together")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=TOKENS)
    parser.add_argument("--rounds", type=at_least_two, default=21)
    args = parser.parse_args()
    _, device = dispatch.resolve(args.device)
    result = measure(device, args.slots or default_slots(device), args.tokens, args.rounds)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result["environment"].items():
            print(f"{name}: {value}")
        show(result)


if __name__ == "__main__":
    main()
