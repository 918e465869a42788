"""Continuous batching of a transformers model on a portakv pool: `python examples/mini_engine.py`.

Requests arrive at different times, prompts are prefilled in chunks beside decoding sequences, SWA slots go back as the
window passes, and when the pool is full the youngest sequence moves to host memory and comes back later. Each
request's tokens must equal the model's own `generate`; the last line says whether they do, and the exit code.

Engine authors: `Engine.step` is the life of a forward. One `plan_write` and one `plan_read`, however many layers; per
layer one store, and attention over the slots that the plan names. Everything else is ordinary scheduling.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from portakv import HostCopy, HybridKVPool, OutOfSlots, layers_from_config

Tensor = torch.Tensor

COMMON = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "hidden_size": 128}
COMMON |= {"intermediate_size": 128, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
COMMON |= {"initializer_range": 0.2, "tie_word_embeddings": False, "max_position_embeddings": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 24, "query_pre_attn_scalar": 32},
    "gpt_oss": {"num_hidden_layers": 4, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@dataclass
class Request:
    """A prompt, and what became of it so far. `slots` are the full slots of the tokens whose KV was computed."""

    prompt: list[int]
    new_tokens: int
    arrival: int
    tokens: list[int] = field(default_factory=list)
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    evicted: int = 0  # tokens whose SWA slots went back
    row: int = -1  # of the request table
    on_host: HostCopy | None = None

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.new_tokens


class Engine:
    """One model on one pool; `run` serves requests to their end."""

    def __init__(self, model: Any, pool: HybridKVPool, max_running: int = 4, max_len: int = 256, budget: int = 24):
        self.model, self.pool, self.budget = model, pool, budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.free_rows = list(range(max_running))
        # Full slots by request row and position, on the host. An engine on a GPU keeps a copy there and patches it.
        self.req_to_token = torch.zeros((max_running, max_len), dtype=torch.int64)
        self.stats = {"steps": 0, "chunks": 0, "preempted": 0, "evicted": 0}
        AttentionInterface.register("portakv_engine", self.attend)
        AttentionMaskInterface.register("portakv_engine", lambda *args, **kwargs: None)
        model.set_attn_implementation("portakv_engine")

    def run(self, requests: Iterable[Request]) -> dict[str, int]:
        arriving = deque(sorted(requests, key=lambda r: r.arrival))
        while arriving or self.waiting or self.running:
            while arriving and arriving[0].arrival <= self.stats["steps"]:
                request = arriving.popleft()
                request.tokens = list(request.prompt)
                self.waiting.append(request)
            self.step()
        return self.stats

    # A step: who runs, where their tokens go, one forward, what can be given back.

    def step(self) -> None:
        self.stats["steps"] += 1
        self.admit()
        if not self.running:
            return
        batch, loc = self.allocate()
        queries = torch.tensor([n for _, n in batch])
        seq_lens = torch.tensor([len(r.slots) for r, _ in batch])
        rows = torch.tensor([r.row for r, _ in batch])
        self.write_loc = self.pool.plan_write(loc)
        table, device = self.req_to_token.to(self.pool.device), self.pool.device
        self.reads = self.pool.plan_read(table, rows, seq_lens, queries, consumer="triton")
        self.queries = queries.tolist()
        tokens = [t for r, n in batch for t in r.tokens[len(r.slots) - n : len(r.slots)]]
        positions = [p for r, n in batch for p in range(len(r.slots) - n, len(r.slots))]
        with torch.inference_mode():
            inputs = torch.tensor([tokens, positions], device=device)
            logits = self.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False).logits[0]
        for (request, _), end in zip(batch, accumulate(self.queries), strict=True):
            if len(request.slots) == len(request.tokens):  # otherwise its prompt is not through yet
                request.tokens.append(int(logits[end - 1].argmax()))
        self.give_back()

    def admit(self) -> None:
        """Start waiting requests while there is a row and room for the next chunk of the first one."""
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            if request.on_host is not None:
                # A page more than its own for each that runs, or it would be the next to leave again.
                room = len(request.on_host.live) + self.pool.page_size * (len(self.running) + 2)
                if self.running and self.pool.allocator.available() < room:
                    return
                try:
                    request.slots = self.pool.load_from_host(request.on_host)
                except OutOfSlots:
                    return
                request.on_host = None
            elif self.running and self.pool.allocator.available() < self.budget + self.pool.page_size:
                return
            self.waiting.popleft()
            request.row = self.free_rows.pop()
            self.req_to_token[request.row, : len(request.slots)] = request.slots
            self.running.append(request)

    def allocate(self) -> tuple[list[tuple[Request, int]], Tensor]:
        """Slots for each running request's next tokens; the youngest leaves as long as they do not fit."""
        while True:
            batch, left = [], self.budget
            for request in self.running:
                n = min(len(request.tokens) - len(request.slots), left)
                if n:
                    batch.append((request, n))
                    left -= n
            prefix = [len(r.slots) for r, _ in batch]
            seq = [len(r.slots) + n for r, n in batch]
            last = [int(r.slots[-1]) if len(r.slots) else -1 for r, _ in batch]
            try:
                loc = self.pool.allocator.alloc_extend(prefix, seq, last)
                break
            except OutOfSlots:
                if len(self.running) == 1:
                    raise
                self.preempt(self.running.pop())
        for (request, n), slots in zip(batch, loc.split([n for _, n in batch]), strict=True):
            self.req_to_token[request.row, len(request.slots) : len(request.slots) + n] = slots
            request.slots = torch.cat((request.slots, slots))
            self.stats["chunks"] += 1 < n < len(request.prompt)
        return batch, loc

    def preempt(self, request: Request) -> None:
        """Move a request's KV to the host; tokens whose SWA slots are gone stay without."""
        self.stats["preempted"] += 1
        if len(request.slots):
            request.on_host = self.pool.copy_to_host(request.slots)
        self.release(request)
        self.waiting.appendleft(request)

    def release(self, request: Request) -> None:
        self.pool.allocator.free(request.slots)
        request.slots = request.slots[:0]
        self.free_rows.append(request.row)

    def give_back(self) -> None:
        """Free finished requests, and of the others what left the window of every query to come."""
        for request in [r for r in self.running if r.done]:
            self.running.remove(request)
            self.release(request)
        if self.pool.window is None or not self.running:
            return
        cursors = self.pool.allocator.evict_swa(
            self.req_to_token,
            [r.row for r in self.running],
            [r.evicted for r in self.running],
            [len(r.slots) for r in self.running],
        )
        for request, cursor in zip(self.running, cursors.tolist(), strict=True):
            self.stats["evicted"] += cursor - request.evicted
            request.evicted = cursor

    # A layer: store, then attention of each sequence over the slots that the plan names.

    def attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attention as transformers calls it: query `[1, Hq, T, D]`, key and value `[1, H, T, D]`."""
        self.pool.set_kv_buffer(layer.layer_idx, self.write_loc, key[0].transpose(0, 1), value[0].transpose(0, 1))
        k_cache, v_cache = self.pool.get_kv_buffer(layer.layer_idx)
        plan = self.reads.for_layer(layer.layer_idx)
        assert plan.indptr is not None
        out, ends = [], accumulate(self.queries)
        for i, (n, end) in enumerate(zip(self.queries, ends, strict=True)):
            slots = plan.indices[plan.indptr[i] : plan.indptr[i + 1]]
            k, v = k_cache[slots].permute(1, 2, 0), v_cache[slots].transpose(0, 1)  # [H, D, L], [H, L, Dv]
            q = query[0, :, end - n : end].unflatten(0, (k.shape[0], -1))  # [H, Hq/H, n, D]
            at = plan.starts[i] + torch.arange(len(slots), device=q.device)
            behind = at[-n:, None] - at  # how far each key lies behind each query
            seen = behind >= 0 if plan.window is None else (behind >= 0) & (behind < plan.window)
            scores = (q @ k[:, None] * scaling).masked_fill(~seen, float("-inf"))
            if (sinks := kwargs.get("s_aux")) is not None:  # GPT-OSS: a logit per head that takes weight, not value
                sinks = sinks.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
                weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out.append((weights @ v[:, None]).flatten(0, 1).transpose(0, 1))  # [n, Hq, Dv]
        return torch.cat(out)[None], None


def serve(name: str, count: int = 10) -> bool:
    """Run `count` requests through the engine and through the model's own generate; print what happened."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **COMMON, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    # Too small for the requests that run at once, so that some must leave and come back.
    pool = HybridKVPool(layers_from_config(config), size=256, swa_size=160, page_size=4, dtype=torch.float32)
    model.to(pool.device)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(1, config.vocab_size, rng.integers(3, 90)).tolist(), int(rng.integers(5, 60)), arrival=3 * i
        )
        for i in range(count)
    ]
    own = [generate(model, request) for request in requests]
    stats = Engine(model, pool).run(requests)
    pool.check_integrity()
    same = sum(request.tokens == tokens for request, tokens in zip(requests, own, strict=True))
    left = pool.size - pool.allocator.available()
    print(f"{name}: {', '.join(f'{value} {key}' for key, value in stats.items())}, {left} slots left behind")
    print(f"{name}: {same} of {count} requests have the tokens of the model's own generate", flush=True)
    return same == count and left == 0 and all(stats.values())


def generate(model: Any, request: Request) -> list[int]:
    prompt = torch.tensor([request.prompt], device=model.device)
    tokens: list[int] = model.generate(prompt, max_new_tokens=request.new_tokens, do_sample=False)[0].tolist()
    return tokens


def main() -> int:
    torch.set_num_threads(1)  # models this small are faster so
    results = [serve(name) for name in MODELS]
    print("tokens identical: yes" if all(results) else "tokens identical: NO")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
