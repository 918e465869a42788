"""The engine's side of captured graphs: decoding with speculative drafts, from buffers that never move.

A small hybrid model (full and sliding-window layers, random weights) serves several requests. Prompts are prefilled
eagerly, at locations that were planned when the scheduler admitted them. After that each round is one replay of a graph
that was captured for a batch size and is used for every batch that fits: a draft model proposes a chain of tokens, each
step over its own column of the round's write locations, and the target verifies them in one forward. What is not
accepted, and what has left the windows, goes back to the allocator. The tokens must equal plain eager decoding's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from portakv import DEVICE, HybridKVPool, KVWriteLoc, LayerSpec, ReadPlan, Structure, resolve_write_loc
from portakv.check import capture

Tensor = torch.Tensor

TARGET = [LayerSpec(None, 2, 16), LayerSpec(12, 2, 16), LayerSpec(None, 2, 16), LayerSpec(7, 2, 16)]
DRAFT = TARGET[:2]
POOL = {"size": 512, "swa_size": 192, "page_size": 4, "dtype": torch.float32}
VOCABULARY, HIDDEN, MAX_LEN = 64, 32, 96
SIZES = (2, 4, 8)  # batch sizes that a graph is captured for
STEPS = 3  # tokens that a round feeds to each request: its last one, and two drafts
ROWS = {"structure": Structure.QUERY_ROWS, "index_dtype": torch.int64, "pad": 0}  # a row of slots for each query


class Model:
    """Attention layers over a pool. A draft model is the first layers of its target."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        def weights(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device) / shape[0] ** 0.5

        generator = torch.Generator().manual_seed(0)
        self.embedding, self.position = weights(VOCABULARY, HIDDEN) * 8, weights(MAX_LEN + STEPS, HIDDEN) * 4
        self.head = weights(HIDDEN, VOCABULARY)
        self.layers = [(weights(HIDDEN, 3 * HIDDEN), weights(HIDDEN, HIDDEN) / 2) for _ in range(num_layers)]

    def __call__(
        self, pool: HybridKVPool, tokens: Tensor, positions: Tensor, loc: KVWriteLoc, reads: ReadPlan
    ) -> Tensor:
        """The next token after each of `tokens [T]`."""
        hidden = self.embedding[tokens] + self.position[positions]
        for layer, (qkv, out) in enumerate(self.layers):
            q, k, v = (hidden @ qkv).float().view(len(tokens), 3, 2, 16).unbind(1)
            pool.set_kv_buffer(layer, loc, k, v)
            keys = reads.for_layer(layer)
            # Of a graph's buffers, the part that this batch size uses.
            slots, lens = keys.indices[: len(tokens)], keys.lens[: len(tokens)]
            k_cache, v_cache = (cache[slots].double() for cache in pool.get_kv_buffer(layer))
            scores = torch.einsum("thd,tchd->thc", q.double(), k_cache) / 4
            unused = torch.arange(slots.shape[1], device=slots.device) >= lens[:, None, None]
            weights = scores.masked_fill(unused, -torch.inf).softmax(-1)
            hidden = hidden + torch.einsum("thc,tchd->thd", weights, v_cache).flatten(1) @ out
        return (hidden @ self.head).argmax(-1)


@dataclass(eq=False)
class Request:
    """`tokens` are the prompt and what came after, up to `end` of them; all but the last are stored at `slots`."""

    row: int
    tokens: list[int]
    end: int
    slots: Tensor | None = None
    evicted: int = 0
    plan: KVWriteLoc | None = None


class Engine:
    def __init__(self, requests: Sequence[Request]) -> None:
        self.pool = HybridKVPool(TARGET, **POOL)
        self.draft_pool = HybridKVPool(DRAFT, **POOL, slots_of=self.pool)  # one allocator, one mapping, one plan
        self.device, self.allocator = self.pool.device, self.pool.allocator
        self.target, self.draft = (Model(len(specs), self.device) for specs in (TARGET, DRAFT))
        self.requests, self.rounds = requests, 0

        # What the graphs read and write, captured once and refilled in place for every round.
        most, buffers = max(SIZES), {"dtype": torch.int64, "device": self.device}
        self.req_to_token = torch.zeros(len(requests), MAX_LEN + STEPS, **buffers)
        self.tokens = torch.zeros(most, STEPS + 1, **buffers)
        self.positions, self.next = torch.zeros(2, most, STEPS, **buffers)
        self.write_loc = self.pool.graph_write_loc(most * STEPS)
        self.draft_reads = [self.draft_pool.graph_read_plan(most, MAX_LEN, **ROWS) for _ in range(STEPS)]
        self.reads = self.pool.graph_read_plan(most, MAX_LEN, max_query_len=STEPS, **ROWS)
        self.graphs = {n: capture(lambda n=n: self.forward(n), self.device) for n in SIZES}

    def forward(self, size: int) -> None:
        """What is captured: the draft steps, then the verification, of `size` requests."""
        write_loc = self.write_loc[: size * STEPS]  # [requests, steps], one after another
        for step in range(STEPS):
            now = self.tokens[:size, step], self.positions[:size, step]
            after = self.draft(self.draft_pool, *now, write_loc[step::STEPS], self.draft_reads[step])
            self.tokens[:size, step + 1] = after
        tokens, positions = self.tokens[:size, :STEPS].flatten(), self.positions[:size].flatten()
        self.next[:size] = self.target(self.pool, tokens, positions, write_loc, self.reads).view(size, STEPS)

    def admit(self, request: Request) -> None:
        """Take a prompt's slots and plan its writes; the forward may come much later."""
        request.slots = self.allocator.alloc(len(request.tokens))
        request.plan = self.pool.plan_write(request.slots)
        self.req_to_token[request.row, : len(request.slots)] = request.slots

    def prefill(self, request: Request) -> None:
        """Both models, the target last, at the locations that came with the request."""
        n = len(request.tokens)
        write_loc = resolve_write_loc(self.pool, request.slots, request.plan, index_dtype=torch.int64)
        assert write_loc is request.plan
        tokens, positions = torch.tensor(request.tokens, device=self.device), torch.arange(n, device=self.device)
        for model, pool in ((self.draft, self.draft_pool), (self.target, self.pool)):
            reads = pool.plan_read(self.req_to_token, torch.tensor([request.row]), torch.tensor([n]), n, **ROWS)
            after = model(pool, tokens, positions, write_loc, reads)
        request.tokens.append(int(after[-1]))

    def decode(self, running: Sequence[Request]) -> None:
        """One round of all running requests, padded to a captured size."""
        live, lens = len(running), torch.tensor([len(r.slots) for r in running])
        new = self.allocator.alloc_extend(lens, lens + STEPS, torch.stack([r.slots[-1] for r in running]))
        rows, columns = torch.tensor([r.row for r in running]), lens[:, None] + torch.arange(STEPS)
        self.req_to_token[rows[:, None], columns] = new.view(live, STEPS).to(self.device)
        self.tokens[:live, 0] = torch.tensor([r.tokens[-1] for r in running])
        self.positions[:live] = columns

        self.write_loc.fill(new)  # and PAD behind: what padded requests compute goes nowhere
        for step, reads in enumerate(self.draft_reads):
            self.draft_pool.plan_read(self.req_to_token, rows, lens + step + 1, out=reads)
        self.pool.plan_read(self.req_to_token, rows, lens, extra_lens=STEPS, out=self.reads)
        self.graphs[min(n for n in SIZES if n >= live)]()
        self.rounds += 1

        drafts, after = self.tokens[:live, 1:STEPS].tolist(), self.next[:live].tolist()
        for request, own, guessed, right in zip(running, new.view(live, STEPS), drafts, after, strict=True):
            wrong = [i for i, draft in enumerate(guessed) if draft != right[i]]
            kept = min([*wrong, STEPS - 1]) + 1
            request.tokens += right[:kept]
            request.slots = torch.cat((request.slots, own[:kept]))
            self.allocator.rewind(own[kept:])
            gone = self.allocator.evict_swa(request.slots[None], [0], [request.evicted], [len(request.slots)])
            request.evicted = int(gone[0])

    def run(self) -> None:
        for request in self.requests:
            self.admit(request)
        running = list(self.requests)
        for request in running:
            self.prefill(request)
        while running:
            self.decode(running)
            for request in [r for r in running if len(r.tokens) >= r.end]:
                self.allocator.free(request.slots)
                running.remove(request)


def eager(tokens: list[int], end: int) -> list[int]:
    """The same without drafts, graphs or company."""
    pool = HybridKVPool(TARGET, **POOL)
    model, tokens, slots = Model(len(TARGET), pool.device), list(tokens), torch.empty(0, dtype=torch.int64)
    while len(tokens) < end:
        start, stop = len(slots), len(tokens)
        loc = pool.allocator.alloc_extend([start], [stop], slots[-1:] if start else [-1])
        slots = torch.cat((slots, loc))
        table, row, length = slots[None].to(pool.device), torch.tensor([0]), torch.tensor([stop])
        reads = pool.plan_read(table, row, length, stop - start, **ROWS)
        new = torch.tensor(tokens[start:], device=pool.device)
        after = model(pool, new, torch.arange(start, stop, device=pool.device), pool.plan_write(loc), reads)
        tokens.append(int(after[-1]))
    return tokens


def main() -> int:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 21, 9, 14, 30, 5, 12)]
    requests = [Request(row, list(prompt), len(prompt) + 8 + 5 * row) for row, prompt in enumerate(prompts)]
    engine = Engine(requests)
    engine.run()
    wrong = [r.row for r, prompt in zip(requests, prompts, strict=True) if r.tokens[: r.end] != eager(prompt, r.end)]
    outcome = f"{wrong} differ from" if wrong else "the tokens of"
    print(f"{len(requests)} requests in {engine.rounds} replays on {DEVICE.value}: {outcome} eager decoding")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
