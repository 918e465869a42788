"""All that only a GPU can show, in under 4 minutes: `python scripts/device_check.py --device cuda --out DIR`.

Captured graphs first, then the store benchmark, then the conformance suite in the time that is left. It needs this
source tree, torch, triton and numpy, and fetches nothing. DIR/device_check.json is written after each part, so that a
run which is cut short still leaves its figures; a short table comes last on stdout.

Exit code 0 if every case that ran passed, 1 if one did not, 2 if the device or its kernels are not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from pathlib import Path
from typing import Any

START = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import store_gpu  # noqa: E402
import torch  # noqa: E402
from timing import at_least_two  # noqa: E402

from portakv import PortaKVError, check, dispatch, testing  # noqa: E402
from portakv.check import Outcome  # noqa: E402
from portakv.device import DeviceFacts, shares_host_memory  # noqa: E402
from portakv.formats import Variant  # noqa: E402

BENCHMARK_SHARE, COMPILE_SHARE = 0.5, 0.75
"""When the benchmark starts no further size, and when compiling ahead ends, as parts of the budget."""


def choose_rows(found: DeviceFacts) -> dict[str, dispatch.Selection]:
    """The row of each op that has kernels for such a device. Raises `NoKernel` where a GPU would be left with a
    reference row: Triton is not serving then, and there is nothing to check."""
    ops = [op for op in dispatch.OPS if len(dispatch.rows(op, found.device)) > 1]
    return dispatch.select_all(found, strict=found.device.gpu is not None, formats=dict.fromkeys(ops))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        of, device = dispatch.resolve(args.device)
        chosen = choose_rows(of.facts(device))
    except PortaKVError as e:
        print(f"device_check: {e}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "device": args.device,
        "environment": store_gpu.environment() | store_gpu.device_environment(device),
        "kernels": {op: selection.row.name for op, selection in chosen.items()},
    }

    def record(**parts: Any) -> None:
        report.update(parts, seconds=round(time.monotonic() - START, 1))
        (args.out / "device_check.json").write_text(json.dumps(report, indent=1))

    named = check.rows(device)
    graphs = [check.check_graphs(op, row, device) for op, row in named if op in check.GRAPH_FILLS]
    record(graphs=[dataclasses.asdict(outcome) for outcome in graphs])
    try:
        until = START + BENCHMARK_SHARE * args.budget
        slots = args.slots or store_gpu.default_slots(device)
        bench = store_gpu.measure(device, slots, args.tokens, args.rounds, until)
    except Exception as e:  # the suite may say why
        bench = {"error": f"{type(e).__name__}: {e}"}
    record(benchmark=bench)
    suite = check_rows([(op, row) for op, row in named if op in dispatch.OPS], device, args.budget)
    record(rows=[dataclasses.asdict(outcome) for outcome in suite])
    show(report, suite + graphs)
    return 1 if "error" in bench or any(outcome.result in ("failed", "not run") for outcome in suite + graphs) else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", required=True, choices=[known.name for known in dispatch.DEVICES], help="cpu is for rehearsals"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder for device_check.json")
    parser.add_argument("--budget", type=float, default=200, help="seconds; the suite is cut to fit")
    parser.add_argument("--slots", type=int, help="slots in each pool of the benchmark")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=store_gpu.TOKENS)
    parser.add_argument("--rounds", type=at_least_two, default=21)
    return parser.parse_args(argv)


def check_rows(rows: Sequence[tuple[str, str]], device: torch.device, budget: float) -> list[Outcome]:
    """The suite, each row's cases in a shuffled order so that a cut leaves a sample of every kind of them."""
    cases = {op: list(testing.cases(op)) for op, _ in rows}
    for op in cases:
        random.Random(0).shuffle(cases[op])
    compile_ahead([case.variant for op in cases for case in cases[op]], device, START + COMPILE_SHARE * budget)
    # Kernels of the device before reference rows, whose every op torch itself has tested.
    order = sorted(rows, key=lambda named: named[1] == "reference")
    ahead = sum(len(cases[op]) for op, _ in order)
    outcomes = []
    for op, row in order:
        now = time.monotonic()
        share = max(START + budget - now, 0) * len(cases[op]) / ahead
        outcomes.append(check.check_row(op, row, device, cases[op], until=now + share))
        ahead -= len(cases[op])
    return outcomes


def compile_ahead(variants: Sequence[Variant], device: torch.device, until: float) -> None:
    """Fill Triton's cache on disk from all processors; what is not done by `until` compiles when it is first used."""
    if shares_host_memory(device):
        return
    driver = importlib.import_module("triton.runtime").driver
    target = driver.active.get_current_target()
    # A fresh process each: a forked copy of this one could not leave its device context alone.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) - 1), context) as pool:
        jobs = [
            pool.submit(compile_one, dispatch.device_of(device).name, variant, target)
            for variant in dict.fromkeys(variants)
        ]
        try:
            for job in as_completed(jobs, timeout=max(until - time.monotonic(), 0)):
                job.exception()  # a variant that fails will fail by name in its case
        except OutOfTime:
            pool.shutdown(wait=False, cancel_futures=True)


def compile_one(name: str, variant: Variant, target: Any) -> None:
    launcher = importlib.import_module("portakv.kernels._triton").launcher
    launcher(dispatch.find_device(name).gpu).compile(variant, target)


def show(report: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    for name, value in report["environment"].items():
        print(f"{name}: {value}")
    bench = report["benchmark"]
    if "error" in bench:
        print(f"benchmark: FAILED, {bench['error']}")
    else:
        store_gpu.show(bench)
    print("\n| op | row | result | cases | |\n|---|---|---|---|---|")
    for o in outcomes:
        result = o.result.upper() if o.result == "failed" else o.result
        detail = o.detail.splitlines()[0][:160] if o.detail else ""
        print(f"| {o.op} | {o.row} | {result} | {o.cases} of {o.total} | {detail} |")
    failed = sum(outcome.result == "failed" for outcome in outcomes)
    print(f"{failed} of {len(outcomes)} rows failed; {report['seconds']} s")


if __name__ == "__main__":
    sys.exit(main())
