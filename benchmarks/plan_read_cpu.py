"""What `pool.plan_read` costs on a CPU beside torch: `python benchmarks/plan_read_cpu.py [--json]`.

A batch of decoding requests over a table of int32 slots in pages of 16 that lie anywhere, outputs in int32 and made
anew by both sides. The torch expressions have no loop over requests, and may be written in several ways: page tables as
SGLang's backends write them (`gathered`), from a strided slice, or by shifts. Ratios are medians over rounds in which
all candidates ran in turn.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from timing import at_least_two, environment, interleave, ratio, summary

from portakv import HybridKVPool, LayerSpec, ReadPlan, Structure

Tensor = torch.Tensor

BATCHES = ((256, 8192), (64, 2048), (8, 512), (8, 16))
WINDOW, PAGE = 1024, 16
TORCH = {
    Structure.RAGGED: ("masked", "repeated"),
    Structure.ROWS: ("token_rows",),
    Structure.PAGES: ("gathered", "sliced", "shifted"),
}


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

    # What `ours` returns, of what it is given: the longest sequence is not known, and lens and starts are int32 too.

    def spans(self, swa: bool, step: int = 1) -> tuple[Tensor, Tensor, int]:
        """Per request its lens and starts, and the most that one reads."""
        starts = (self.seq_lens - WINDOW).clamp(min=0) // step * step if swa else torch.zeros_like(self.seq_lens)
        lens = self.seq_lens - starts
        return lens, starts, int(lens.max())

    def positions(self, swa: bool, step: int = 1) -> tuple[Tensor, ...]:
        """Also the slots in the table that are read, `[B, columns]`, and whether each is one of the request."""
        lens, starts, most = self.spans(swa, step)
        columns = torch.arange(0, most, step)
        if swa:
            slots = self.table[self.rows[:, None], starts[:, None] + columns]
        else:
            slots = self.table[:, :most:step][self.rows]
        return slots, columns < lens[:, None], lens.int(), starts.int()

    def masked(self, swa: bool) -> tuple[Tensor, ...]:
        slots, mask, lens, starts = self.positions(swa)
        slots = slots[mask]
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        return self.mapping[slots].int() if swa else slots, indptr, lens, starts

    def repeated(self, swa: bool) -> tuple[Tensor, ...]:
        lens, starts, _ = self.spans(swa)
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
        sequence = torch.repeat_interleave(lens)
        slots = self.table[self.rows[sequence], torch.arange(len(sequence)) + (starts - indptr[:-1])[sequence]]
        return self.mapping[slots].int() if swa else slots, indptr.int(), lens.int(), starts.int()

    def token_rows(self, swa: bool) -> tuple[Tensor, ...]:
        slots, mask, lens, starts = self.positions(swa)
        return torch.where(mask, self.mapping[slots], 0).int() if swa else torch.where(mask, slots, 0), lens, starts

    def gathered(self, swa: bool) -> tuple[Tensor, ...]:
        """Rows of tokens, translated, of which each page's first is taken."""
        lens, starts, most = self.spans(swa, PAGE)
        columns = torch.arange(most)
        slots = self.table[self.rows[:, None], starts[:, None] + columns] if swa else self.table[self.rows, :most]
        pages = (self.mapping[slots] if swa else slots)[:, columns[::PAGE]] // PAGE
        return torch.where(columns[::PAGE] < lens[:, None], pages, 0).int(), lens.int(), starts.int()

    def sliced(self, swa: bool) -> tuple[Tensor, ...]:
        slots, mask, lens, starts = self.positions(swa, PAGE)
        pages = (self.mapping[slots] if swa else slots) // PAGE
        return torch.where(mask, pages, 0).int(), lens, starts

    def shifted(self, swa: bool) -> tuple[Tensor, ...]:
        """`sliced` without a division, as only a power of two allows, and in place."""
        slots, mask, lens, starts = self.positions(swa, PAGE)
        pages = self.mapping[slots] if swa else slots
        pages >>= PAGE.bit_length() - 1
        return pages.mul_(mask).int(), lens, starts


def measure(requests: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    batch, table = Batch(requests, tokens), []
    calls = max(1, 200_000 // (requests * tokens))
    for structure, names in TORCH.items():
        for swa in (False, True):
            ways = {"ours": partial(batch.ours, structure, swa)} | {n: partial(getattr(batch, n), swa) for n in names}
            times = interleave({name: lambda _, f=f: f() for name, f in ways.items()}, calls, rounds)
            table.append(
                {
                    "requests": requests,
                    "tokens": tokens,
                    "structure": structure.value,
                    "window": WINDOW if swa else None,
                    "us": {name: summary(values) for name, values in times.items()},
                    "faster_than": {name: ratio(times[name], times["ours"]) for name in names},
                }
            )
    return table


def show(result: dict[str, Any]) -> None:
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    columns = ("requests", "tokens", "structure", "window", "plan_read µs", "torch µs, and × as fast")
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in result["reads"]:
        median, low, high = row["us"]["ours"]
        cells = [*(str(row[name]) for name in columns[:4]), f"{median:.1f} ({low:.1f}-{high:.1f})"]
        cells.append(", ".join(f"{way} {row['us'][way][0]:.1f}: {x:.1f}" for way, x in row["faster_than"].items()))
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=at_least_two, default=31)
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
