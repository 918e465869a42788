"""What `pool.plan_read` costs on a CPU beside torch: `python benchmarks/plan_read_cpu.py [--json]`.

A batch of decoding requests over a table of int32 slots in pages of 16 that lie anywhere, outputs in int32 and made
anew by both sides. The torch expressions have no loop over requests; of two ways to write the ragged one, the faster is
taken. Ratios are medians over rounds in which both candidates ran in turn.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from timing import environment, interleave, ratio, summary

from portakv import HybridKVPool, LayerSpec, ReadPlan, Structure

Tensor = torch.Tensor

BATCHES = ((256, 8192), (64, 2048), (8, 512), (8, 16))
WINDOW, PAGE = 1024, 16
TORCH = {Structure.RAGGED: ("masked", "repeated"), Structure.ROWS: ("token_rows",), Structure.PAGES: ("pages",)}


class Batch:
    """Requests of `tokens` tokens each; their rows of the table are in no order."""

    def __init__(self, requests: int, tokens: int) -> None:
        size = requests * tokens
        self.pools = {
            swa: HybridKVPool([LayerSpec(window, 1, 8)], size=size, swa_size=size, page_size=PAGE)
            for swa, window in ((False, None), (True, WINDOW))
        }
        pages = self.pools[True].allocator.alloc(size).view(-1, PAGE)[torch.randperm(size // PAGE)]
        self.mapping = self.pools[True].full_to_swa
        self.table = torch.zeros((2 * requests, tokens + 8), dtype=torch.int32)
        self.rows = torch.randperm(2 * requests)[:requests]
        self.table[self.rows, :tokens] = pages.view(requests, tokens).int()
        self.seq_lens = torch.full((requests,), tokens)
        self.tokens = tokens

    def ours(self, structure: Structure, swa: bool) -> ReadPlan:
        return self.pools[swa].plan_read(
            self.table, self.rows, self.seq_lens, structure=structure, index_dtype=torch.int32
        )

    def spans(self, swa: bool, step: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Per request its lens, and the positions [B, columns] with whether each is one."""
        starts = (self.seq_lens - WINDOW).clamp(min=0) // step * step if swa else torch.zeros_like(self.seq_lens)
        lens = self.seq_lens - starts
        columns = torch.arange(0, min(WINDOW, self.tokens) if swa else self.tokens, step)
        return lens, starts[:, None] + columns, columns < lens[:, None]

    def masked(self, swa: bool) -> tuple[Tensor, ...]:
        lens, positions, mask = self.spans(swa)
        slots = self.table[self.rows[:, None], positions] if swa else self.table[self.rows, : mask.shape[1]]
        slots = slots[mask]
        return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(), self.mapping[slots].int() if swa else slots

    def repeated(self, swa: bool) -> tuple[Tensor, ...]:
        starts = (self.seq_lens - WINDOW).clamp(min=0) if swa else torch.zeros_like(self.seq_lens)
        lens = self.seq_lens - starts
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        sequence = torch.repeat_interleave(lens)
        slots = self.table[self.rows[sequence], torch.arange(len(sequence)) + (starts - indptr[:-1])[sequence]]
        return indptr.int(), self.mapping[slots].int() if swa else slots

    def token_rows(self, swa: bool) -> Tensor:
        _, positions, mask = self.spans(swa)
        if not swa:
            return torch.where(mask, self.table[self.rows, : mask.shape[1]], 0)
        return torch.where(mask, self.mapping[self.table[self.rows[:, None], positions]], 0).int()

    def pages(self, swa: bool) -> Tensor:
        if not swa:
            mask = torch.arange(0, self.tokens, PAGE) < self.seq_lens[:, None]
            return torch.where(mask, self.table[:, : self.tokens : PAGE][self.rows] // PAGE, 0)
        _, positions, mask = self.spans(swa, PAGE)
        return torch.where(mask, self.mapping[self.table[self.rows[:, None], positions]] // PAGE, 0).int()


def measure(requests: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    batch, table = Batch(requests, tokens), []
    calls = max(1, 200_000 // (requests * tokens))
    for structure, names in TORCH.items():
        for swa in (False, True):
            ways = {"ours": partial(batch.ours, structure, swa)} | {n: partial(getattr(batch, n), swa) for n in names}
            times = interleave({name: lambda _, f=f: f() for name, f in ways.items()}, calls, rounds)
            torch_way = min(names, key=lambda name: summary(times[name])[0])
            table.append(
                {
                    "requests": requests,
                    "tokens": tokens,
                    "structure": structure.value,
                    "window": WINDOW if swa else None,
                    "us": {name: summary(values) for name, values in times.items()},
                    "faster_than_torch": ratio(times[torch_way], times["ours"]),
                }
            )
    return table


def show(result: dict[str, Any]) -> None:
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    columns = ("requests", "tokens", "structure", "window", "plan_read µs", "torch µs", "× torch")
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in result["reads"]:
        us = dict(row["us"])
        median, low, high = us.pop("ours")
        cells = [*(str(row[name]) for name in columns[:4]), f"{median:.1f} ({low:.1f}-{high:.1f})"]
        cells += [f"{min(times[0] for times in us.values()):.1f}", f"{row['faster_than_torch']:.1f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    torch.manual_seed(0)
    reads = [row for shape in BATCHES for row in measure(*shape, args.rounds)]
    result = {"environment": environment(), "reads": reads}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
