"""What stores into other layouts, and rotated ones, cost on a CPU beside torch: `python benchmarks/formats_cpu.py`.

Random slots in pools much larger than the last-level cache, another set of them each call, all through the public API.
The torch candidates write buffers of `torch.zeros`, as an engine has them without a pool. Ratios are medians over
rounds in which both candidates ran in turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from timing import at_least_two, environment, fill, interleave, ratio, summary, used_pool

from portakv import HybridKVPool, LayerSpec, Rope

TOKENS = (1, 8, 64, 512, 4096)
PAGE, FP8 = 64, torch.float8_e4m3fn
LATENT, NOPE, ROPE = 512, 448, 64
HEADS, DIM = 8, 128

Tensor = torch.Tensor
Store = Callable[[int], object]
Pair = tuple[str, Store, Store]
"""What is stored, and call i of the pool's store and of torch's."""


def slots(pool: HybridKVPool, tokens: int) -> tuple[list[Any], list[Tensor]]:
    order = torch.randperm(pool.size) + PAGE
    sets = [order[i : i + tokens].clone() for i in range(0, pool.size - tokens, tokens)][:2048]
    return [pool.plan_write(loc) for loc in sets], sets


def mla(pool: HybridKVPool, cache: Tensor, tokens: int) -> Pair:
    """Rows of latent and rope part; torch writes the two parts of one buffer."""
    latent, rope = torch.randn(tokens, 1, LATENT).bfloat16(), torch.randn(tokens, 1, ROPE).bfloat16()
    plans, sets = slots(pool, tokens)
    n = len(plans)

    def put(i: int) -> None:
        loc = sets[i % n]
        cache[loc, :, :LATENT] = latent
        cache[loc, :, LATENT:] = rope

    return "mla", lambda i: pool.set_kv_buffer(0, plans[i % n], latent, rope), put


def flashmla(pool: HybridKVPool, pages: Tensor, tokens: int) -> Pair:
    """DeepSeek-V4 pages; torch quantises, then writes values, rope parts and scales of `pages [pages, bytes]`."""
    nope, rope = torch.randn(tokens, 1, NOPE).bfloat16(), torch.randn(tokens, 1, ROPE).bfloat16()
    plans, sets = slots(pool, tokens)
    n, row = len(plans), NOPE + 2 * ROPE
    rows = pages[:, : PAGE * row].view(-1, PAGE, row)
    scales = pages[:, PAGE * row : PAGE * (row + 8)].view(-1, PAGE, 8)

    def put(i: int) -> None:
        page, at = sets[i % n] // PAGE, sets[i % n] % PAGE
        blocks = nope.float().view(tokens, -1, 64)
        exponents = (blocks.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()
        quantised = (blocks * torch.exp2(-exponents)[..., None]).clamp(-448, 448).to(FP8)
        rows[page, at, :NOPE] = quantised.view(torch.uint8).view(tokens, NOPE)
        rows[page, at, NOPE:] = rope[:, 0].view(torch.uint8)
        scales[page, at, :7] = (exponents + 127).to(torch.uint8)

    return "flashmla", lambda i: pool.set_kv_buffer(0, plans[i % n], nope, rope), put


def rotated(pool: HybridKVPool, caches: tuple[Tensor, Tensor], tokens: int, interleaved: bool) -> Pair:
    """Rows of 8x128 with K rotated; torch rotates in float32, rounds, then writes K and V."""
    k, v = torch.randn(2, tokens, HEADS, DIM).bfloat16().unbind()
    turns = torch.arange(8192)[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    table, positions = torch.cat((turns.cos(), turns.sin()), -1), torch.randint(0, 8192, (tokens,))
    rope = Rope(table, positions, interleaved)
    plans, sets = slots(pool, tokens)
    n = len(plans)

    def put(i: int) -> None:
        cos, sin = table[positions][:, None].chunk(2, -1)
        wide = k.float()
        a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
        turned = a * cos - b * sin, b * cos + a * sin
        out = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        caches[0][sets[i % n]] = out.bfloat16()
        caches[1][sets[i % n]] = v

    name = "rope, pairs" if interleaved else "rope, halves"
    return name, lambda i: pool.set_kv_buffer(0, plans[i % n], k, v, rope), put


def measure(size: int, rounds: int) -> list[dict[str, Any]]:
    latent = used_pool([LayerSpec(None, 1, LATENT, ROPE, mla=True)], size=size, page_size=PAGE)
    packed = used_pool(
        [LayerSpec(None, 1, NOPE, ROPE, mla=True)], size=size, page_size=PAGE, dtype=FP8, layout="flashmla"
    )
    heads = used_pool([LayerSpec(None, HEADS, DIM)], size=size // 4, page_size=PAGE)
    joined = torch.zeros(size + PAGE, 1, LATENT + ROPE, dtype=torch.bfloat16)
    pages = torch.zeros(size // PAGE + 1, packed.describe()[0].k_item_bytes, dtype=torch.uint8)
    k, v = (torch.zeros(size // 4 + PAGE, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    fill(joined, pages, k, v)
    table = []
    for tokens in TOKENS:
        for name, ours, theirs in (
            mla(latent, joined, tokens),
            flashmla(packed, pages, tokens),
            rotated(heads, (k, v), tokens, False),
            rotated(heads, (k, v), tokens, True),
        ):
            times = interleave({"portakv": ours, "torch": theirs}, max(1, 8192 // tokens), rounds)
            table.append(
                {
                    "store": name,
                    "tokens": tokens,
                    "us": {who: summary(values) for who, values in times.items()},
                    "faster_than_torch": ratio(times["torch"], times["portakv"]),
                }
            )
    return table


def show(result: dict[str, Any]) -> None:
    for name, value in result["environment"].items():
        print(f"{name}: {value}")
    print("\n| store | tokens | set_kv_buffer µs | torch µs | × torch |\n|---|---|---|---|---|")
    for row in sorted(result["stores"], key=lambda row: row["store"]):
        median, low, high = row["us"]["portakv"]
        cells = [row["store"], str(row["tokens"]), f"{median:.2f} ({low:.2f}-{high:.2f})"]
        cells += [f"{row['us']['torch'][0]:.1f}", f"{row['faster_than_torch']:.1f}"]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, default=1 << 20, help="slots in the MLA pools, about 1 KiB each")
    parser.add_argument("--rounds", type=at_least_two, default=31)
    args = parser.parse_args()
    torch.manual_seed(0)
    result = {"environment": environment(), "stores": measure(args.size, args.rounds)}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
