"""Decode steps of a transformers model through the pool, beside the model's own cache, in one run.

    python benchmarks/decode_transformers.py [--batch 4] [--context 2048] [--steps 32] [--json]
 The model is a Gemma 3 of eight layers (five sliding to one full, seeded weights). Both caches hold the same
prompt and take turns, one forward each, so that both meet the same noise. Reported: the median step, its
quartiles, tokens/s, and the median of the ratios of neighbouring steps, own cache over pool (above 1: the
pool is faster).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import transformers

from portakv.integrations.transformers import PortaKVCache

CHUNK = 256
"""Prompt tokens per forward of the prefill."""


def build_model(attention: str, dtype: torch.dtype) -> Any:
    config = transformers.Gemma3TextConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=512,
        max_position_embeddings=8192,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForCausalLM(config).to(dtype).eval()


@torch.inference_mode()
def measure(model: Any, batch: int, context: int, steps: int, page_size: int) -> dict[str, Any]:
    """Step times in seconds of both caches, after a prefill that is not timed."""
    caches = {
        "own": transformers.DynamicCache(config=model.config),
        "pool": PortaKVCache.for_model(model, batch, context + steps, max_chunk=CHUNK, page_size=page_size),
    }
    prompt = torch.randint(1, model.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
    tokens = {}
    for name, cache in caches.items():
        for chunk in prompt.split(CHUNK, dim=1):
            logits = model(chunk, cache=cache, use_cache=True, logits_to_keep=1).logits
        tokens[name] = logits[:, -1:].argmax(-1)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for step in range(steps):
        order = list(caches) if step % 2 else list(reversed(caches))
        for name in order:
            start = time.perf_counter()
            logits = model(tokens[name], cache=caches[name], use_cache=True).logits
            times[name].append(time.perf_counter() - start)
            tokens[name] = logits[:, -1:].argmax(-1)
    warm = {name: each[steps // 10 :] for name, each in times.items()}
    return {
        "identical": bool((tokens["own"] == tokens["pool"]).all()),
        "ratio": statistics.median(own / pool for own, pool in zip(warm["own"], warm["pool"], strict=True)),
        **{name: _summary(each, batch) for name, each in warm.items()},
    }


def _summary(times: list[float], batch: int) -> dict[str, float]:
    low, median, high = statistics.quantiles(times, n=4)
    return {"step_ms": 1e3 * median, "q1_ms": 1e3 * low, "q3_ms": 1e3 * high, "tokens_per_s": batch / median}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention", choices=("eager", "sdpa"), nargs="+", default=["eager", "sdpa"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, args.dtype)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "batch": args.batch,
        "context": args.context,
        "dtype": args.dtype,
        "results": {
            attention: measure(build_model(attention, dtype), args.batch, args.context, args.steps, args.page_size)
            for attention in args.attention
        },
    }
    if args.json:
        json.dump(report, sys.stdout, indent=2)
        print()
        return 0
    print(f"batch {args.batch}, context {args.context}, {args.dtype}, {report['threads']} threads")
    print(f"{'attention':10} {'cache':6} {'step ms':>9} {'q1':>8} {'q3':>8} {'tokens/s':>9} {'ratio':>6} tokens")
    for attention, result in report["results"].items():
        for name in ("own", "pool"):
            row = result[name]
            tail = (
                f" {result['ratio']:6.2f} {'identical' if result['identical'] else 'DIFFERENT'}"
                if name == "pool"
                else ""
            )
            print(
                f"{attention:10} {name:6} {row['step_ms']:9.2f} {row['q1_ms']:8.2f} {row['q3_ms']:8.2f} "
                f"{row['tokens_per_s']:9.1f}{tail}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
