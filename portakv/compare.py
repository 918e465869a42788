"""A model's generation through a pool beside its own cache: the tokens, the logits, and what each costs.

Needs transformers, which is imported when a function needs it.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from portakv.device import Device
from portakv.layers import LayerSpec, layers_from_config, require_heads
from portakv.pool import HybridKVPool

Tensor = torch.Tensor
OnToken = Callable[[], None]

PROMPTS = (
    "The window moves on.",
    "Four prompts of different lengths, so the batch is left padded.",
    "A sliding-window layer forgets.",
    "A full-attention layer keeps every key, and its pool grows with the text.",
)

_COMMON: dict[str, Any] = {
    "vocab_size": 257,  # every byte, and padding
    "pad_token_id": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_size": 256,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    # Five times the usual: attention far from uniform, so a lost key changes the logits.
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}

# Which layers slide is left to each config class, whose default is the released model's pattern. Query heads
# per KV head and K dim to V dim are the released ones too; windows and pages are a quarter (Gemma 3's less).
SCALED: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma3_text": {
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 32,
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "v_head_dim": 32,
        "sliding_window": 33,  # the config of transformers counts the current token, so 128 became 129
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
}
"""Scaled-down models by transformers model type: what differs from `_COMMON`."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and its prompts: `input_ids` and `attention_mask` are int64 `[B, T]`, left padded.

    `page_size` is the pool's; `threads` torch's on a CPU, `None` for as many as it has.
    """

    name: str
    model: Any
    input_ids: Tensor
    attention_mask: Tensor
    page_size: int = 16
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one model did through the pool and through its own cache.

    `max_logit_diff` is over all generated steps, `logit_tolerance` what rounding explains. `windows_passed`
    is the shortest sequence's final length in windows. Tokens/s are of decoding, for the whole batch, from
    the median step. Bytes are those of K and V held at the end: in the pool whole pages of slots, in the
    model's own cache its tensors' memory. `swa_slots_held` and `swa_slots_bound` are of the whole batch. `kernels` has
    the row behind each op of the pool.
    """

    name: str
    dtype: str
    full_layers: int
    swa_layers: int
    window: int | None
    batch: int
    new_tokens: int
    windows_passed: float
    tokens_identical: bool
    max_logit_diff: float
    logit_tolerance: float
    tokens_per_s_pool: float
    tokens_per_s_own: float
    bytes_held_pool: int
    bytes_held_own: int
    swa_slots_held: int
    swa_slots_bound: int
    kernels: dict[str, str]

    @property
    def matches(self) -> bool:
        return self.tokens_identical and self.max_logit_diff <= self.logit_tolerance


@dataclass(slots=True)
class _Run:
    """One generation: tokens `[B, steps]`, logits `[steps, B, V]`, the cache at its end, seconds per step."""

    tokens: Tensor
    logits: Tensor
    cache: Any
    step_s: float


@dataclass(slots=True)
class _Clock:
    """A transformers streamer that notes when each token of the batch was there."""

    on_token: OnToken
    times: list[float] = field(default_factory=list)

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > 1:  # the first call is the prompt
            self.on_token()

    def end(self) -> None:
        """Nothing is held back."""


def scaled_subjects(device: torch.device, prompts: Sequence[str]) -> Iterator[Subject]:
    """The models of `SCALED` in float32 with byte-level prompts; the weights are the same on every device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    causal_lm: Any = AutoModelForCausalLM  # its methods have no types
    pad: int = _COMMON["pad_token_id"]
    rows = [list(prompt.encode()) or [pad] for prompt in prompts]
    width = max(map(len, rows))
    input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device="cpu")
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device="cpu")
    for name, changes in SCALED.items():
        config = AutoConfig.for_model(name, **(_COMMON | changes))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = causal_lm.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model = model.eval().to(device)
        # In matrices this small more threads only wait for each other, for long on a busy machine.
        yield Subject(name, model, input_ids.to(device), mask.to(device), page_size=4, threads=1)


def local_subject(directory: Path, device: torch.device, prompts: Sequence[str]) -> Subject:
    """A checkpoint and its tokenizer from `directory`, in the checkpoint's dtype.

    Raises `OSError` or `ValueError` where one is missing, `ValueError` for a model that no pool can hold.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, dtype="auto", attn_implementation="eager"
    )
    require_heads(layers_from_config(model.config))
    # A checkpoint may ask for a static cache, which generate refuses beside a cache that it is given.
    model.generation_config.cache_implementation = None
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
    return Subject(directory.name, model.eval().to(device), batch["input_ids"], batch["attention_mask"])


def compare(
    subject: Subject,
    new_tokens: int,
    on_token: OnToken = lambda: None,
    device: Device | torch.device | None = None,
) -> Comparison:
    """Generate `new_tokens` greedily through the model's own cache, then through a pool made for it.

    `on_token` is called after each token of the batch, `2 * new_tokens` times.
    """
    from portakv.integrations.transformers import PortaKVCache

    model, (batch, width) = subject.model, subject.input_ids.shape
    cache = PortaKVCache.for_model(
        model,
        batch,
        width + new_tokens,
        max_chunk=width,
        page_size=subject.page_size,
        device=device or model.device,
    )
    with _torch_threads(subject.threads):
        own = _generate(subject, None, new_tokens, on_token)
        ours = _generate(subject, cache, new_tokens, on_token)
    pool = cache.pool
    held = {"full": pool.size - pool.allocator.available("full")}
    held["swa"] = (pool.swa_size or 0) - pool.allocator.available("swa")
    diff = torch.where(own.logits == ours.logits, 0.0, (own.logits - ours.logits).abs()).max().item()
    shortest = int(subject.attention_mask.sum(1).min()) + new_tokens
    scale = max(1.0, own.logits.abs().max().item())
    return Comparison(
        name=subject.name,
        dtype=str(model.dtype).removeprefix("torch."),
        full_layers=sum(spec.window is None for spec in pool.layers),
        swa_layers=sum(spec.window is not None for spec in pool.layers),
        window=pool.window,
        batch=batch,
        new_tokens=new_tokens,
        windows_passed=shortest / pool.window if pool.window else 0.0,
        tokens_identical=torch.equal(own.tokens, ours.tokens),
        max_logit_diff=diff,
        logit_tolerance=100 * torch.finfo(model.dtype).eps * scale,
        tokens_per_s_pool=batch / ours.step_s,
        tokens_per_s_own=batch / own.step_s,
        bytes_held_pool=sum(len(g.layers) * g.fmt.row_bytes * held[g.side] for g in pool.groups),
        bytes_held_own=_cache_bytes(own.cache),
        swa_slots_held=held["swa"],
        swa_slots_bound=batch * (pool.window + pool.page_size + 1) if pool.window else 0,
        kernels=pool.kernels,
    )


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _generate(subject: Subject, cache: Any, new_tokens: int, on_token: OnToken) -> _Run:
    names = inspect.signature(subject.model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"  # as older versions of transformers call it
    clock = _Clock(on_token)
    out = subject.model.generate(
        subject.input_ids,
        attention_mask=subject.attention_mask,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        streamer=clock,
        **({} if cache is None else {name: cache}),
    )
    steps = [after - before for before, after in zip(clock.times[1:], clock.times[2:], strict=False)]
    tokens = out.sequences[:, subject.input_ids.shape[1] :]
    return _Run(tokens, torch.stack(out.logits).float(), out[name], statistics.median(steps))


def _cache_bytes(cache: Any) -> int:
    """Memory that a transformers cache keeps alive."""
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(x.untyped_storage().nbytes() for x in tensors if isinstance(x, Tensor))


def measure_store(on: Device | torch.device, tokens: int = 4096, rounds: int = 8) -> tuple[float, float]:
    """GB/s, read and written, of `set_kv_buffer` at random slots, and of plain copies of the same rows.

    bfloat16 rows of 8 x 128 for K and V, another part of the pool each call. The median call; the first
    round, which touches the memory first, does not count.
    """
    parts = 8
    pool = HybridKVPool([LayerSpec(None, 8, 128)], size=parts * tokens, device=on)
    device = pool.device
    order = torch.randperm(pool.size, generator=torch.Generator().manual_seed(0), device="cpu") + pool.page_size
    write_locs = [pool.plan_write(loc) for loc in order.view(parts, tokens)]
    k, v = torch.randn((2, tokens, 8, 128), device=device).to(pool.dtype)
    caches = pool.get_kv_buffer(0)
    synchronize = torch.get_device_module(device).synchronize

    def store(part: int) -> None:
        pool.set_kv_buffer(0, write_locs[part], k, v)

    def copy(part: int) -> None:
        start = pool.page_size + part * tokens
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[start : start + tokens].copy_(rows)

    def rate(call: Callable[[int], None]) -> float:
        seconds: list[float] = []
        for i in range((rounds + 1) * parts):
            synchronize()
            start = time.perf_counter()
            call(i % parts)
            synchronize()
            seconds.append(time.perf_counter() - start)
        gigabytes: float = 2 * (k.nbytes + v.nbytes) / 1e9
        return gigabytes / statistics.median(seconds[parts:])

    # Copies first: a store that bypasses the caches would leave them cold for a copy.
    copy_rate = rate(copy)
    return rate(store), copy_rate
