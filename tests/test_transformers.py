"""PortaKVCache against the cache that transformers makes itself: same logits, same tokens, slots given
back."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from portakv import HybridKVPool, LayerSpec, OutOfSlots, PortaKVError
from portakv.integrations.transformers import PortaKVCache
from portakv.layers import layers_from_config

CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"
"""What a model calls its cache: older versions of transformers have the second name."""

WINDOW = 8
LAYER_TYPES = ["sliding_attention", "full_attention"]

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "v_head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "layer_types": LAYER_TYPES * 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""Values for every config that knows the name: sliding layers on, and 24 tokens are three windows."""

PER_LAYER_INPUTS = {
    "num_hidden_layers": 6,
    "layer_types": LAYER_TYPES * 3,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
ROPE = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in LAYER_TYPES}

BYTE_LEVEL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
HYBRID = ["hybrid_sliding", "hybrid"] * 2
SWA_SHAPE = {
    "sliding_window_size": WINDOW,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "unpadded_vocab_size": 128,
}

ONLY_FOR: dict[str, dict[str, Any]] = {
    "beam": {"n_group": 1, "topk_group": 1},
    "blt": {f"{part}_config": BYTE_LEVEL for part in ("patcher", "encoder", "decoder", "global")}
    | {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass": {"rope_parameters": ROPE},
    "deepseek_v4": {"layer_types": ["sliding_attention"] * 4, "num_key_value_heads": 1},
    "dory": {"n_recurrent_loops": 1, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"num_key_value_heads": 4, "layer_types": ["full_attention"] * 4, "q_lora_rank": 16}
    | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "index_head_dim": 16},
    "gemma3n": PER_LAYER_INPUTS | {"laurel_rank": 8, "activation_sparsity_pattern": [0.5, *[0.0] * 5]},
    "gemma4": PER_LAYER_INPUTS | {"global_head_dim": 32},
    "gemma4_unified": {"global_head_dim": 32},
    "inkling": SWA_SHAPE | {"layer_types": HYBRID},
    "inkling2": SWA_SHAPE | {"layer_types": HYBRID},
    "inkling2_loop": SWA_SHAPE | {"layer_types": HYBRID},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "modernbert_decoder": {"local_attention": 2 * WINDOW},
    "phi4_multimodal": {
        "vision_config": TOWER | {"num_hidden_layers": 2, "crop_size": 28, "image_size": 28},
        "audio_config": TOWER | {"num_blocks": 1, "nemo_conv_channels": 8, "ext_pw_out_channel": 32, "input_size": 16},
    },
    "moshi": {"audio_vocab_size": 64, "ffn_dim": 128, "num_codebooks": 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": HYBRID},
}
"""What a family needs beyond SMALL to be small and to have sliding layers."""

CANNOT = {
    "blt": ("several decoders, over bytes and over patches, in one model", "num_hidden_layers"),
    "dots3_note": ("MLA, under the index of a sparse attention", "got indexed_attention"),
    "inkling": ("short convolutions keep a state of their own beside K and V", "got hybrid_sliding"),
    "inkling2": ("short convolutions keep a state of their own beside K and V", "got hybrid_sliding"),
    "inkling2_loop": ("short convolutions keep a state of their own beside K and V", "got hybrid_sliding"),
    "minimax": ("linear attention in some layers", "got linear_attention"),
    "recurrent_gemma": ("linear recurrence in some layers", "got linear_attention"),
    "zaya": ("convolutional and delayed value states beside K and V", "got hybrid_sliding"),
}
"""Families that can have sliding layers and do not run through the pool: the reason, and what the error says.
One that starts to run, or to fail in another way, is a failure here."""

MUST_RUN = {
    "gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "mistral", "ministral", "phi3", "qwen2", "qwen3",
    "cohere2", "exaone4", "olmo3", "smollm3", "starcoder2", "mimo_v2_flash",
}  # fmt: skip

MAX_PARAMETERS = 6_000_000


def _families() -> dict[str, str]:
    """Modelling module -> model type, of every causal LM whose module builds sliding-window masks."""
    found: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        module = sys.modules[getattr(transformers, name).__module__]
        family = module.__name__.split(".")[-2]
        # Moshi has a window, but makes its masks without the shared function.
        if hasattr(module, "create_sliding_window_causal_mask") or family == "moshi":
            found[family] = model_type  # the text model of a multimodal one comes after it
    return found


FAMILIES = _families()


def build(family: str, **options: Any) -> Any:
    """A seeded model of `family` in eval mode, with weights that keep attention from being uniform."""
    model_type = FAMILIES[family]
    config_class = transformers.CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)}
    known = fields | {name for name, own in config_class.attribute_map.items() if own in fields}
    values = {name: value for name, value in SMALL.items() if name in known}
    config = config_class(**(values | ONLY_FOR.get(family, {}) | options))
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    with torch.device("meta"):
        if (size := sum(p.numel() for p in model_class(config).parameters())) > MAX_PARAMETERS:
            raise ValueError(f"{family}: {size} parameters from a small config")
    torch.manual_seed(0)
    model = model_class(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    return model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices of 64 columns lose time to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gemma3() -> Any:
    return build("gemma3")


def prompts(lengths: tuple[int, ...] = (14, 9)) -> dict[str, torch.Tensor]:
    """Left-padded token ids and their mask."""
    ids = torch.randint(2, 120, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: Any, cache: Cache | None = None, **options: Any) -> Any:
    torch.manual_seed(2)
    defaults = {
        "max_new_tokens": 14,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    inputs = {} if "input_ids" in options else prompts()
    return model.generate(**inputs, **(defaults | options), **({} if cache is None else {CACHE: cache}))


def compare(ours: Any, theirs: Any) -> None:
    """Same tokens, and the same logits to 1e-5, at every step."""
    assert torch.equal(ours.sequences, theirs.sequences)
    for step, (mine, other) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5, msg=lambda m, s=step: f"logits of step {s}: {m}")


class ForgetsOldestKey(PortaKVCache):
    """Wrong on purpose: in each decode step a full window's oldest key reads as zeros."""

    def update(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, *args, **kwargs)
        if key_states.shape[2] == 1 and keys.shape[2] == WINDOW:
            keys[:, :, 0] = 0
        return keys, values


# Families


@pytest.mark.skipif(CACHE != "cache", reason="an older transformers has fewer")
def test_the_families_that_must_run_are_all_there() -> None:
    assert not MUST_RUN - (FAMILIES.keys() - CANNOT.keys())
    assert CANNOT.keys() <= FAMILIES.keys()
    assert ONLY_FOR.keys() <= FAMILIES.keys()


def check_family(family: str) -> None:
    model = build(family)
    theirs = generate(model)
    cache = PortaKVCache.for_model(model, 2, 32, page_size=4)
    assert any(spec.window == WINDOW for spec in cache.pool.layers)
    ours = generate(model, cache)
    compare(ours, theirs)
    assert cache.get_seq_length() == ours.sequences.shape[1] - 1
    assert cache.get_seq_length() >= 3 * WINDOW
    assert not any(cache.pool.faults().values())
    wrong = generate(model, ForgetsOldestKey.for_model(model, 2, 32, page_size=4))
    with pytest.raises(AssertionError):
        compare(wrong, theirs)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - CANNOT.keys()))
def test_family_matches_its_own_cache(family: str) -> None:
    check_family(family)


@pytest.mark.parametrize("family", sorted(CANNOT.keys() & FAMILIES.keys()))
def test_listed_family_still_cannot(family: str) -> None:
    _, error = CANNOT[family]
    with pytest.raises((ValueError, AttributeError), match=error):
        check_family(family)


# Ways to generate


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "mimo_v2_flash"])
def test_page_sizes(family: str, page_size: int) -> None:
    model = build(family)
    compare(
        generate(model, PortaKVCache.for_model(model, 2, 32, page_size=page_size, check=True)),
        generate(model),
    )


WAYS: dict[str, dict[str, Any]] = {
    "chunked prefill": {"prefill_chunk_size": 5},
    "sampling": {"do_sample": True, "temperature": 0.7},
    "beam search": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "several sequences": {"num_return_sequences": 3, "do_sample": True},
    "prompt lookup": {**prompts((14,)), "prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_ways_to_generate(gemma3: Any, way: str, page_size: int) -> None:
    cache = PortaKVCache.for_model(gemma3, 6, 40, page_size=page_size)
    compare(generate(gemma3, cache, **WAYS[way]), generate(gemma3, **WAYS[way]))
    cache.pool.allocator.check_integrity()


@pytest.mark.parametrize("page_size", [1, 4])
def test_assisted_decoding_crops(gemma3: Any, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assistant = build("gemma3")
    with torch.no_grad():  # close enough to be right now and then, and wrong now and then
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.04)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0.0
    crops: list[int] = []
    crop = PortaKVCache.crop
    monkeypatch.setattr(PortaKVCache, "crop", lambda self, n: (crops.append(n), crop(self, n))[1])
    options = {**prompts((14,)), "assistant_model": assistant, "max_new_tokens": 24}
    cache = PortaKVCache.for_model(gemma3, 1, 80, page_size=page_size)
    compare(generate(gemma3, cache, **options), generate(gemma3, **options))
    assert min(crops) < 0  # drafts were rejected,
    assert len(crops) < 24  # and accepted
    cache.pool.allocator.check_integrity()


def test_sdpa_attention(gemma3: Any) -> None:
    model = build("gemma3")
    model.set_attn_implementation("sdpa")
    compare(generate(model, PortaKVCache.for_model(model, 2, 32)), generate(model))


def test_continues_a_finished_cache(gemma3: Any) -> None:
    results = []
    for cache in (PortaKVCache.for_model(gemma3, 2, 64, page_size=4), DynamicCache(config=gemma3.config)):
        first = generate(gemma3, cache)
        ids = torch.cat((first.sequences, torch.full((2, 3), 7)), dim=1)
        mask = torch.nn.functional.pad(prompts()["attention_mask"], (0, ids.shape[1] - 14), value=1)
        results.append(generate(gemma3, cache, input_ids=ids, attention_mask=mask))
    compare(*results)


def test_several_generations_on_one_pool(gemma3: Any) -> None:
    pool = PortaKVCache.for_model(gemma3, 2, 32, page_size=4).pool
    theirs = generate(gemma3)
    for _ in range(3):
        compare(generate(gemma3, PortaKVCache(pool)), theirs)
    cache = PortaKVCache(pool)
    for _ in range(2):
        compare(generate(gemma3, cache), theirs)
        cache.reset()
    compare(generate(gemma3, cache, **prompts((14,))), generate(gemma3, **prompts((14,))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = build("gemma3").to(dtype)
    cache = PortaKVCache.for_model(model, 2, 32)
    assert cache.pool.dtype == dtype
    ours, theirs = generate(model, cache), generate(model)
    # Same bytes in, but attention may add them up in another order: the difference is of the dtype's own
    # size.
    torch.testing.assert_close(ours.logits[0], theirs.logits[0], rtol=2e-2, atol=2e-2)
    assert all(step.isfinite().all() for step in ours.logits)


def test_fp8_pool_serves_a_float_model(gemma3: Any) -> None:
    cache = PortaKVCache.for_model(gemma3, 2, 32, dtype=torch.float8_e4m3fn)
    ours, theirs = generate(gemma3, cache, max_new_tokens=1), generate(gemma3, max_new_tokens=1)
    difference = (ours.logits[0] - theirs.logits[0]).abs().max()
    assert 0 < difference < 0.5 * theirs.logits[0].std()


def test_windows_on_the_full_side(gemma3: Any) -> None:
    layers = PortaKVCache.for_model(gemma3, 2, 32).pool.layers
    pool = HybridKVPool(layers, size=64, dtype=torch.float32)
    compare(generate(gemma3, PortaKVCache(pool)), generate(gemma3))


def small(name: str, **options: Any) -> Any:
    """A seeded model beyond the families with windows."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config_class = getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**(sizes | options))).eval()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPTNeoXJapanese", {"intermediate_multiple_size": 2}),  # views K and V as [batch * heads, ...]
        ("Falcon", {"multi_query": True, "ffn_hidden_size": 48}),
        ("Falcon", {"multi_query": False, "ffn_hidden_size": 48, "alibi": True}),
        ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}),
        ("Llama", {"num_key_value_heads": 2, "intermediate_size": 48}),
    ],
)
def test_models_without_windows(name: str, options: dict[str, Any]) -> None:
    model = small(name, **options)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(3))
    for more in ({}, {"num_beams": 2}):
        more |= {"input_ids": ids, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
        compare(generate(model, PortaKVCache.for_model(model, 4, 16, page_size=4), **more), generate(model, **more))


def test_autocast_gives_k_and_v_of_two_dtypes() -> None:
    model = small("Llama", num_key_value_heads=2, intermediate_size=48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        options = {"input_ids": torch.arange(3, 12)[None], "max_new_tokens": 6, "eos_token_id": None}
        compare(generate(model, PortaKVCache.for_model(model, 1, 16), **options), generate(model, **options))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_decoder_of_an_encoder_decoder(name: str, num_beams: int) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 0, "eos_token_id": None}
    if name == "T5":
        sizes |= {"d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    else:
        sizes |= {f"{part}_{what}": 4 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
        sizes |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "forced_eos_token_id": None}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(getattr(transformers, f"{name}Config")(**sizes))
    model.eval()
    with pytest.raises(ValueError, match=r"config.is_encoder_decoder: expected a decoder .*, got True"):
        PortaKVCache.for_model(model, 2, 16)
    pool = HybridKVPool(layers_from_config(model.config), size=256, page_size=4, dtype=torch.float32)
    cache = transformers.EncoderDecoderCache(PortaKVCache(pool), DynamicCache())
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(3))
    options = {"input_ids": ids, "max_new_tokens": 6, "num_beams": num_beams}
    compare(generate(model, cache, **options), generate(model, **options))


# Threads


def test_threads_with_caches_of_their_own_on_one_pool(gemma3: Any, in_threads: Any) -> None:
    """Each thread's tokens are those it gets alone; caches dropped by another thread lose nothing."""
    pool = PortaKVCache.for_model(gemma3, 12, 32, page_size=4).pool
    jobs = [{**prompts((14, 9 + n)), "num_beams": 1 + n % 2, "max_new_tokens": 10} for n in range(4)]
    alone = [generate(gemma3, **job).sequences for job in jobs]
    dropped: list[PortaKVCache] = []
    once = threading.Barrier(2)

    def serve(first: int) -> None:
        once.wait()
        for turn in range(6):
            n = (first + turn) % len(jobs)
            cache = PortaKVCache(pool)
            tokens = gemma3.generate(**jobs[n], do_sample=False, **{CACHE: cache})
            assert torch.equal(tokens, alone[n]), (first, turn)
            dropped.append(cache)
            del cache
            if len(dropped) > 2:
                dropped.pop(0)  # whose ever it was

    in_threads(*(functools.partial(serve, n) for n in range(2)))
    dropped.clear()
    pool.check_integrity()
    assert pool.allocator.available("full") == pool.size
    assert pool.allocator.available("swa") == pool.swa_size


# What a process has set


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Any] = {
    "default device": default_device,
    "default dtype": default_dtype,
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def basics(turn: Any) -> list[torch.Tensor]:
    """What a cache's calls give, each made in `turn()`."""
    with turn():
        pool = make_pool(2, size=128, swa_size=96)
        cache = PortaKVCache(pool)
    inputs = [[x for layer in range(4) for x in rows_of(layer, n, 2)] for n in (11, 1, 2, 1)]
    out: list[torch.Tensor] = []

    def forward(cache: PortaKVCache, n: int, rows: int = 2) -> None:
        for layer in range(4):
            with turn():  # also in the middle of a forward
                k, v = (x[:1].expand(rows, *x.shape[1:]).clone() for x in inputs[n][2 * layer : 2 * layer + 2])
                out.extend(x.clone() for x in cache.update(k, v, layer))

    forward(cache, 0), forward(cache, 1), forward(cache, 2)
    with turn():
        cache.activate_past_recording()
        cache.crop(-1)
        twin = copy.deepcopy(cache)
        twin.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 1], device="cpu"))
    forward(cache, 3), forward(twin, 3, rows=4)
    with turn():
        twin.batch_select_indices(torch.tensor([False, True, False, True], device="cpu"))
        cache.reset()
    forward(twin, 3)
    with turn():
        del cache, twin
        assert (pool.allocator.available("full"), pool.allocator.available("swa")) == (128, 96)
        pool.check_integrity()
    return out


def rows_of(layer: int, num_tokens: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    random, spec = torch.Generator().manual_seed(layer), SPECS[layer]
    k, v = (
        torch.randn((batch, spec.num_kv_heads, num_tokens, d), generator=random) for d in (spec.head_dim, spec.v_dim)
    )
    return k, v


@pytest.mark.parametrize("setting", SETTINGS)
def test_basics_under_what_a_process_has_set(setting: str) -> None:
    right = basics(nullcontext)
    for turns in ([setting], [setting] * 7 + [None] * 99, [None, setting, None]):  # throughout, at first, in turn
        use = itertools.cycle(turns)
        got = basics(lambda use=use: SETTINGS[name]() if (name := next(use)) else nullcontext())
        assert len(got) == len(right)
        assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in got)
        assert all(map(torch.equal, got, right))


# Slots


def step(cache: Cache, num_tokens: int, batch: int = 2, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One forward through every layer of a cache of `SPECS`, with random K and V."""
    random = torch.Generator().manual_seed(seed)
    out = []
    for layer, spec in enumerate(SPECS):
        k, v = (
            torch.randn((batch, num_tokens, spec.num_kv_heads, dim), generator=random).transpose(1, 2)
            for dim in (spec.head_dim, spec.v_dim)
        )
        out.append(cache.update(k, v, layer))
    return out


SPECS = [
    LayerSpec(WINDOW, 2, 16, 8),
    LayerSpec(None, 2, 16),
    LayerSpec(5, 1, 8, 16),
    LayerSpec(WINDOW, 2, 16, 8),
]


def make_pool(page_size: int = 4, size: int = 256, swa_size: int = 256, **options: Any) -> HybridKVPool:
    return HybridKVPool(SPECS, size=size, swa_size=swa_size, page_size=page_size, dtype=torch.float32, **options)


def own_cache() -> Cache:
    layers = [DynamicLayer() if s.window is None else DynamicSlidingWindowLayer(s.window) for s in SPECS]
    cache = Cache(layers=layers)
    cache.activate_past_recording()
    return cache


def state(pool: HybridKVPool) -> tuple[Any, ...]:
    return (
        pool.allocator.available("full"),
        pool.allocator.available("swa"),
        pool.allocator.mapping.tobytes(),
        *(cache.clone() for group in pool.groups for cache in (group.k_caches, group.v_caches)),
    )


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_swa_side_holds_a_window_a_page_and_the_chunk(page_size: int) -> None:
    pool = make_pool(page_size, size=512)
    cache = PortaKVCache(pool)
    for num_tokens in (5, 7, 16, *[1] * 60, 3, 1, 1):
        step(cache, num_tokens)
        slots = cache._batch.state.held
        tokens = pool.allocator.is_live(slots.flatten()).reshape(slots.shape).sum(axis=1)
        assert (tokens <= WINDOW + page_size + num_tokens).all()
        held = pool.swa_size - pool.allocator.available("swa")
        assert held <= 2 * (-(-(WINDOW + num_tokens) // page_size) + 1) * page_size
    assert pool.allocator.available("full") < pool.size - 2 * 80  # the full side keeps everything


def test_a_pool_of_windows_outlasts_a_long_decode(gemma3: Any) -> None:
    cache = PortaKVCache.for_model(gemma3, 2, 128, max_chunk=14, page_size=4)
    assert cache.pool.swa_size < cache.pool.size / 3
    compare(generate(gemma3, cache, max_new_tokens=100), generate(gemma3, max_new_tokens=100))


def test_one_translation_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    cache = PortaKVCache(pool)
    step(cache, 12)
    calls: list[int] = []
    plan_write = HybridKVPool.plan_write
    monkeypatch.setattr(
        HybridKVPool, "plan_write", lambda self, loc: (calls.append(len(loc)), plan_write(self, loc))[1]
    )
    step(cache, 1)
    # What the forward writes, then what each of the two windows reads; never once per layer.
    assert calls[0] == 2
    assert sorted(calls[1:]) == [2 * 5, 2 * WINDOW]


def test_dropped_cache_returns_its_slots() -> None:
    pool = make_pool()
    before = pool.allocator.available("full"), pool.allocator.available("swa")
    cache = PortaKVCache(pool)
    step(cache, 20)
    gc.disable()  # no cycle: the reference count alone must do
    try:
        del cache
        assert (pool.allocator.available("full"), pool.allocator.available("swa")) == before
    finally:
        gc.enable()
    pool.allocator.check_integrity()


def test_cache_dropped_inside_an_allocator_call_returns_its_slots_with_the_next() -> None:
    pool = make_pool()
    before = pool.allocator.available("full")
    caches = [PortaKVCache(pool)]
    step(caches[0], 20)
    held = before - pool.allocator.available("full")
    taken = pool.allocator.atomically(lambda: (caches.clear(), pool.allocator.alloc(4))[1])
    assert held > 0
    assert pool.allocator.available("full") == before - 4
    pool.allocator.free(taken)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(8))
def test_random_operations_against_transformers_layers(page_size: int, seed: int) -> None:
    """Forwards, crops and every change of the batch, in any order, give the bits of transformers' own
    layers."""
    random = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=random))

    pool = make_pool(page_size, size=4096, swa_size=2048)
    ours, theirs, batch, last = PortaKVCache(pool), own_cache(), 2, 0
    for turn in range(40):
        kind = pick(0, 10) if last else 0
        if kind < 5:
            if last:
                theirs.crop(0)  # lets go of what lies before the windows
            last = (1, 1, 2, 7)[pick(0, 4)]
            sizes = [[c.get_mask_sizes(last, layer) for layer in range(len(SPECS))] for c in (ours, theirs)]
            assert sizes[0] == sizes[1]
            for mine, other in zip(step(ours, last, batch, turn), step(theirs, last, batch, turn), strict=True):
                assert all(map(torch.equal, mine, other))
        elif kind == 5 and last > 1:
            removed = pick(1, last)
            ours.crop(-removed), theirs.crop(-removed)
            last = 1
        elif kind == 6:
            rows = torch.randint(0, batch, (batch,), generator=random)
            ours.reorder_cache(rows), theirs.reorder_cache(rows)
        elif kind == 7 and batch < 4:
            ours.batch_repeat_interleave(2), theirs.batch_repeat_interleave(2)
            batch *= 2
        elif kind == 8:
            rows = torch.randint(0, batch, (pick(1, 4),), generator=random)
            ours.batch_select_indices(rows), theirs.batch_select_indices(rows)
            batch = len(rows)
        elif kind == 9:
            ours = copy.deepcopy(ours)
        assert [ours.get_seq_length(i) for i in range(len(SPECS))] == [
            theirs.get_seq_length(i) for i in range(len(SPECS))
        ]
        pool.allocator.check_integrity()
    del ours
    assert pool.allocator.available("full") == pool.size
    assert pool.allocator.available("swa") == pool.swa_size


def test_copies_hold_no_more_than_their_source() -> None:
    pool = make_pool()

    def held() -> tuple[int, int]:
        return pool.size - pool.allocator.available("full"), pool.swa_size - pool.allocator.available("swa")

    cache = PortaKVCache(pool)
    for num_tokens in (20, 1, 1):
        step(cache, num_tokens)
    full, swa = held()
    assert swa < full
    twin = copy.deepcopy(cache)
    assert held() == (2 * full, 2 * swa)
    twin.batch_repeat_interleave(2)
    assert held() == (3 * full, 3 * swa)


def test_copy_is_independent() -> None:
    pool = make_pool()
    cache = PortaKVCache(pool)
    step(cache, 11)
    twin = copy.deepcopy(cache)
    assert twin.pool is pool
    step(cache, 1, seed=5)
    cache.reset()
    other = own_cache()
    step(other, 11)
    for mine, theirs in zip(step(twin, 1, seed=6), step(other, 1, seed=6), strict=True):
        assert all(map(torch.equal, mine, theirs))


# Bad input


def refused(pool: HybridKVPool, error: type[Exception], match: str, call: Any) -> None:
    before = state(pool)
    with pytest.raises(error, match=match):
        call()
    assert same(before, state(pool))
    pool.allocator.check_integrity()


def test_out_of_slots_changes_nothing_and_can_be_retried() -> None:
    pool = make_pool(size=64, swa_size=64)
    cache = PortaKVCache(pool)
    step(cache, 20)
    other = pool.allocator.alloc(20)
    refused(pool, OutOfSlots, "full side", lambda: step(cache, 9))
    pool.allocator.free(other)
    assert step(cache, 9)[1][0].shape == (2, 2, 29, 16)
    pool = make_pool(page_size=1, size=256, swa_size=2 * (WINDOW + 5))
    cache = PortaKVCache(pool)
    step(cache, WINDOW + 3)
    refused(pool, OutOfSlots, "swa side: need 14 slots, 12 free", lambda: step(cache, 7))
    step(cache, 6)


def test_forward_of_another_batch_or_shape_is_refused() -> None:
    pool = make_pool()
    cache = PortaKVCache(pool)
    step(cache, 4)  # a whole page: the next token would take another
    refused(pool, ValueError, "key_states: expected the cache's 2 rows, got 3", lambda: step(cache, 1, batch=3))
    wrong = torch.zeros(2, 3, 1, 16)
    refused(pool, ValueError, "key_states: expected shape", lambda: cache.update(wrong, wrong, 0))
    for layer in (4, -1, True, "0", None):
        words = f"layer_idx: expected one of the pool's 4 layers, got {layer!r}"
        refused(pool, ValueError, words, lambda layer=layer: cache.update(wrong, wrong, layer))
    refused(pool, TypeError, "key_states: .*got NoneType", lambda: cache.update(None, wrong, 0))
    for shapeless, got in ((wrong[0], r"\(3, 1, 16\)"), (wrong[:, :, :0], r"\(2, 3, 0, 16\)")):
        refused(pool, ValueError, f"key_states: .*got {got}", lambda x=shapeless: cache.update(x, wrong, 0))
        refused(pool, ValueError, f"value_states: .*got {got}", lambda x=shapeless: cache.update(wrong, x, 0))
    k, v = torch.zeros(2, 2, 3, 16), torch.zeros(3, 2, 2, 8)  # as many rows of tokens, of other sequences
    refused(pool, ValueError, r"value_states: expected .*\(2, 3\), got \(3, 2\)", lambda: cache.update(k, v, 0))
    step(cache, 1)
    # Past the window a forward begins with an eviction, which a refused one must not have made.
    step(cache, 2 * WINDOW), step(cache, 3)
    refused(pool, ValueError, "key_states: expected shape", lambda: cache.update(wrong, wrong, 0))
    refused(
        pool,
        TypeError,
        "key_states: expected a dtype",
        lambda: cache.update(*(torch.zeros(2, 2, 1, 16).long(),) * 2, 0),
    )
    cache.crop(-1)


def test_forward_that_stopped_half_way_is_named_and_can_be_cropped() -> None:
    pool = make_pool()
    cache, other = PortaKVCache(pool), own_cache()
    step(cache, 6), step(other, 6)
    k, v = torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 8)
    cache.update(k, v, 0)
    refused(
        pool,
        ValueError,
        "expected 1 tokens of 2 rows",
        lambda: cache.update(k.expand(2, 2, 3, 16), v.expand(2, 2, 3, 8), 1),
    )
    refused(pool, PortaKVError, r"layers \[1, 2, 3\] did not write", lambda: cache.update(k, v, 0))
    refused(pool, PortaKVError, "did not write", lambda: cache.reorder_cache(torch.tensor([1, 0])))
    refused(pool, ValueError, "at least the 1 that some layer lacks", lambda: cache.crop(0))
    cache.crop(-1)
    for mine, theirs in zip(step(cache, 1, seed=3), step(other, 1, seed=3), strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_crop_stays_within_the_window() -> None:
    pool = make_pool(page_size=1)
    cache = PortaKVCache(pool)
    step(cache, 20)
    step(cache, 4)
    refused(pool, ValueError, "tokens_to_remove: expected -24 to 0, got 3", lambda: cache.crop(3))
    refused(pool, ValueError, "tokens_to_remove: expected -24 to 0, got -25", lambda: cache.crop(-25))
    refused(pool, ValueError, "SWA slots below position 13 are given back", lambda: cache.crop(-5))
    cache.crop(-4)
    assert cache.get_seq_length() == 20
    short = PortaKVCache(pool)
    step(short, 3), step(short, 2)
    short.crop(-5)  # nothing evicted yet: as far back as there is
    step(short, 3, batch=1)


def test_recorded_past_comes_back() -> None:
    """As DynamicCache: what was added since the last crop, or since recording began, however many forwards it took."""
    for page_size in (1, 4):
        pool = make_pool(page_size)
        ours, theirs = PortaKVCache(pool), own_cache()
        step(ours, 20), step(theirs, 20)
        ours.activate_past_recording(), theirs.crop(0)
        assert ours.is_recording_past(0) if hasattr(ours, "is_recording_past") else ours.layers[0].record_past
        for removed in (3, 1, 0, 4):
            for seed in range(4):
                step(ours, 1, seed=seed), step(theirs, 1, seed=seed)
            ours.crop(-removed), theirs.crop(-removed)
            assert ours.get_seq_length() == theirs.get_seq_length()
        for seed in range(2):
            for mine, other in zip(step(ours, 1, seed=seed), step(theirs, 1, seed=seed), strict=True):
                assert all(map(torch.equal, mine, other))
        held = pool.swa_size - pool.allocator.available("swa")
        assert held <= 2 * (WINDOW + 2 * page_size + 6)  # each crop lets go of what is before its window
        refused(pool, ValueError, "needs a whole window", lambda ours=ours, n=6 + page_size: ours.crop(-n))
        twin = copy.deepcopy(ours)
        ours.layers[0].record_past = False  # as transformers ends it
        for _ in range(9):
            step(ours, 1), step(twin, 1)
        refused(pool, ValueError, "needs a whole window", lambda ours=ours: ours.crop(-5))
        twin.crop(-11)
        twin.reset()
        for num_tokens in (5, 9, 9):  # from the start: nothing is let go of before the first crop
            step(twin, num_tokens)
        twin.crop(-23)


def test_rows_that_are_not_there_are_refused() -> None:
    pool = make_pool()
    cache = PortaKVCache(pool)
    step(cache, 3)
    refused(
        pool,
        ValueError,
        r"indices\[.\]: expected rows of 0 to 1",
        lambda: cache.batch_select_indices(torch.tensor([0, 2])),
    )
    refused(pool, ValueError, "repeats", lambda: cache.batch_repeat_interleave(0))
    full = make_pool(size=24, swa_size=24)
    cache = PortaKVCache(full)
    step(cache, 8)
    refused(full, OutOfSlots, "full side", lambda: cache.batch_repeat_interleave(2))
    refused(full, OutOfSlots, "full side", lambda: copy.deepcopy(cache))


def test_constructor_arguments() -> None:
    with pytest.raises(TypeError, match="pool: expected a HybridKVPool, got str"):
        PortaKVCache("pool")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size"):
        PortaKVCache.for_model(None, 0, 10)
    with pytest.raises(PortaKVError, match="copy the cache"):
        copy.deepcopy(PortaKVCache(make_pool()).layers[0])
    for duplicate in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"PortaKVCache: expected copy.deepcopy"):
            duplicate(PortaKVCache(make_pool()))


def test_gradients_stop_at_the_cache() -> None:
    cache = PortaKVCache(make_pool())
    for layer, spec in enumerate(SPECS):
        k = torch.ones(2, spec.num_kv_heads, 1, spec.head_dim, requires_grad=True)
        v = torch.ones(2, spec.num_kv_heads, 1, spec.v_dim, requires_grad=True)
        assert not any(x.requires_grad for x in cache.update(k, v, layer))


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (torch.tensor(0), ValueError, "beam_idx: expected 1 dimensions, got shape"),
        (torch.tensor([[0, 1]]), ValueError, "beam_idx: expected 1 dimensions, got shape"),
        (torch.tensor([0.0, 1.0]), TypeError, "beam_idx: expected integers, got float32"),
        (torch.tensor([True]), ValueError, "beam_idx: expected a mask of 2 rows, got one of 1"),
        (torch.tensor([0, 1]).to_sparse(), TypeError, "beam_idx: expected a plain tensor, got one of torch.sparse"),
        (torch.tensor([0, 1], device="meta"), TypeError, "beam_idx: expected a plain tensor, got one on meta"),
        (
            torch._neg_view(torch.tensor([0, 1])),
            TypeError,
            "beam_idx: expected a plain tensor, got a view",
        ),
        (None, TypeError, "beam_idx: expected integers, got object"),
        ("01", TypeError, "beam_idx: expected integers, got <U2"),
        ([[0], [0, 1]], TypeError, "beam_idx: expected a plain tensor, an array or a sequence of integers, got list"),
    ],
    ids=str,
)
def test_what_names_no_rows(rows: Any, error: type[Exception], words: str) -> None:
    pool = make_pool()
    cache = PortaKVCache(pool)
    step(cache, 4)
    refused(pool, error, words, lambda: cache.reorder_cache(rows))
    assert cache.get_seq_length() == 4


def test_key_states_that_are_not_what_they_say() -> None:
    pool = make_pool()
    cache = PortaKVCache(pool)
    step(cache, 4)
    rows = torch.zeros(2, 2, 1, 16)
    short = rows.clone()
    short.untyped_storage().resize_(short.nbytes - 1)
    for odd in (short, torch._neg_view(rows), rows.to_sparse()):
        refused(pool, TypeError, "key_states: expected a plain tensor, got", lambda x=odd: cache.update(x, rows, 0))
        refused(pool, TypeError, "value_states: expected a plain tensor", lambda x=odd: cache.update(rows, x, 0))
