"""layers_from_config on plain objects, and on transformers configs against the keys their models really
store."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from portakv.layers import LayerSpec, layers_from_config, layers_from_model


def config(**options: Any) -> SimpleNamespace:
    values = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    return SimpleNamespace(**(values | options))


MIXED = ["sliding_attention", "full_attention"] * 2
FULL, SWA = LayerSpec(None, 2, 8), LayerSpec(16, 2, 8)


def test_full_attention_only() -> None:
    assert layers_from_config(config()) == [FULL] * 4
    assert layers_from_config(config(sliding_window=None)) == [FULL] * 4
    assert layers_from_config(config(num_key_value_heads=None)) == [LayerSpec(None, 8, 8)] * 4


def test_layer_types_decide_which_layers_have_the_window() -> None:
    assert layers_from_config(config(layer_types=MIXED, sliding_window=16)) == [SWA, FULL] * 2
    assert layers_from_config(config(sliding_window=16)) == [SWA] * 4  # without them every layer has


def test_sliding_windows_that_are_switched_off() -> None:
    assert layers_from_config(config(sliding_window=16, use_sliding_window=False)) == [FULL] * 4
    off = config(sliding_window=16, use_sliding_window=False, layer_types=["full_attention"] * 4)
    assert layers_from_config(off) == [FULL] * 4


def test_head_dims() -> None:
    assert layers_from_config(config(head_dim=32)) == [LayerSpec(None, 2, 32)] * 4
    assert layers_from_config(config(head_dim=32, v_head_dim=16)) == [LayerSpec(None, 2, 32, 16)] * 4
    assert layers_from_config(config(head_dim=32, v_head_dim=32)) == [LayerSpec(None, 2, 32)] * 4


def test_sliding_layers_of_another_shape() -> None:
    options = {"swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 8}
    layers = layers_from_config(config(layer_types=MIXED, sliding_window=16, **options))
    assert layers == [LayerSpec(16, 4, 16, 8), FULL] * 2


def test_per_layer_config_wins() -> None:
    per_layer = [config(sliding_window=16), config(head_dim=64, num_key_value_heads=1)] * 2
    layers = layers_from_config(config(layer_types=MIXED, per_layer_config=per_layer))
    assert layers == [SWA, LayerSpec(None, 1, 64)] * 2


def test_windows_may_differ_by_layer() -> None:
    per_layer = [config(sliding_window=w) for w in (16, 32, None, 16)]
    windows = [spec.window for spec in layers_from_config(config(per_layer_config=per_layer))]
    assert windows == [16, 32, None, 16]


def test_shared_layers_alias_the_last_of_their_kind() -> None:
    kinds = [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]
    shared = config(num_hidden_layers=5, layer_types=kinds, sliding_window=16, num_kv_shared_layers=2)
    assert [spec.alias_of for spec in layers_from_config(shared)] == [None, None, None, 1, 2]
    shared.num_kv_shared_layers = 3
    with pytest.raises(ValueError, match="no layer before 2 stores KV of kind full_attention"):
        layers_from_config(shared)


def test_head_counts_of_falcon() -> None:
    falcon = {"num_key_value_heads": None, "num_kv_heads": 8, "multi_query": True}
    assert layers_from_config(config(**falcon)) == [LayerSpec(None, 1, 8)] * 4
    assert layers_from_config(config(**falcon | {"multi_query": False})) == [LayerSpec(None, 8, 8)] * 4
    repeated = config(**falcon | {"num_kv_heads": 2, "new_decoder_architecture": True})
    assert layers_from_config(repeated) == [LayerSpec(None, 8, 8)] * 4


@pytest.mark.parametrize("name", ["num_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads"])
def test_head_counts_listed_by_layer(name: str) -> None:
    counts = [2, 4, 1, 8]
    layers = layers_from_config(config(**{"num_key_value_heads": None, name: counts}))
    assert layers == [LayerSpec(None, heads, 8) for heads in counts]


def test_text_config_of_a_multimodal_config() -> None:
    text = config(sliding_window=16)
    assert layers_from_config(SimpleNamespace(text_config=text)) == [SWA] * 4
    assert layers_from_config(SimpleNamespace(get_text_config=lambda decoder: text)) == [SWA] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention_chunk_size": 32},
            r"layer_types\[0\]: expected full_attention or sliding_attention, got chunked",
        ),
        (
            {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
            r"layer_types\[3\].*got linear_attention",
        ),
        (
            {"layers_block_type": ["attention", "recurrent"] * 2},  # RecurrentGemma's, before transformers 5.20
            r"layer_types\[1\].*got recurrent",
        ),
        ({"layer_types": MIXED[:3], "sliding_window": 16}, "layer_types: expected 4 entries, got 3"),
        ({"layer_types": MIXED}, "sliding_window: expected the window of layer 0, got None"),
        ({"layer_types": MIXED, "sliding_window": 0}, "window: expected at least 1, got 0"),
        ({"kv_lora_rank": 512}, "v_head_dim: expected the dim of an MLA layer's rope part, got None"),
    ],
)
def test_what_the_pool_has_no_layer_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers_from_config(config(**options))


def test_a_layer_without_heads() -> None:
    without = config(num_attention_heads=None, num_key_value_heads=None)
    with pytest.raises(ValueError, match="num_attention_heads: expected the heads of layer 0, got None"):
        layers_from_config(without)


def test_not_a_decoder_config() -> None:
    with pytest.raises(ValueError, match="expected a decoder config with num_hidden_layers, got SimpleNamespace"):
        layers_from_config(SimpleNamespace(hidden_size=4))


# Published configs, from their class defaults


def transformers_config(name: str, **options: Any) -> Any:
    return getattr(transformers, name)(**options)


def test_gpt_oss() -> None:
    layers = layers_from_config(transformers_config("GptOssConfig"))
    assert layers == [LayerSpec(128, 8, 64), LayerSpec(None, 8, 64)] * 18


def test_gemma3_text_decoder_of_the_multimodal_config() -> None:
    layers = layers_from_config(transformers_config("Gemma3Config"))
    assert len(layers) == 26
    assert layers[:6] == [LayerSpec(4096, 4, 256)] * 5 + [LayerSpec(None, 4, 256)]


def test_mimo_v2_has_twice_the_heads_on_sliding_layers() -> None:
    layers = layers_from_config(transformers_config("MiMoV2FlashConfig"))
    assert layers[0] == LayerSpec(None, 4, 192, 128)
    assert layers[1] == LayerSpec(129, 8, 192, 128)


def test_gemma4_full_layers_have_larger_heads() -> None:
    layers = layers_from_config(transformers_config("Gemma4TextConfig", num_kv_shared_layers=12))
    assert layers[:6] == [LayerSpec(512, 4, 256)] * 5 + [LayerSpec(None, 4, 512)]
    assert {spec.alias_of for spec in layers[18:]} == {16, 17}


@pytest.mark.parametrize("name", ["Qwen2Config", "MistralConfig", "Qwen3Config"])
def test_sliding_is_off_by_default(name: str) -> None:
    options = {"sliding_window": None} if name == "MistralConfig" else {}
    assert {spec.window for spec in layers_from_config(transformers_config(name, **options))} == {None}


def test_deepseek_keeps_a_latent() -> None:
    layers = layers_from_config(transformers_config("DeepseekV3Config"))
    assert layers == [LayerSpec(None, 1, 512, 64, mla=True)] * 61


@pytest.mark.parametrize("name", ["Llama4TextConfig", "Qwen3NextConfig", "JambaConfig"])
def test_published_configs_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        layers_from_config(transformers_config(name))


# Models


def tiny(name: str, **options: Any) -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
    config_class = getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**(sizes | options)))


def test_model_says_how_many_heads_it_has() -> None:
    model = tiny("Llama", num_key_value_heads=2, intermediate_size=32)
    assert layers_from_model(model) == [LayerSpec(None, 2, 16)] * 2
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(64, 64)  # as where a config has a name of its own for it
    assert layers_from_model(model) == [LayerSpec(None, 2, 16), LayerSpec(None, 4, 16)]
    model.model.layers[1].self_attn.k_proj = torch.nn.Linear(64, 24)
    with pytest.raises(ValueError, match="expected heads of 16 in layer 1, got 24 rows of k_proj"):
        layers_from_model(model)


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    """The first of two processes; the other is not needed for what is asked here."""
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_rank_of_tensor_parallelism_has_its_own_heads(two_ranks: DeviceMesh) -> None:
    model = tiny("Llama", num_key_value_heads=2, intermediate_size=32)
    model._tp_size = 2
    for layer in model.model.layers:
        local = layer.self_attn.k_proj.weight[:16]
        sharded = DTensor.from_local(local, two_ranks, [Shard(0)], run_check=False)
        layer.self_attn.k_proj.weight = torch.nn.Parameter(sharded)
    assert layers_from_model(model) == [LayerSpec(None, 1, 16)] * 2
    model._tp_plan = {"model.layers.*.self_attn.k_proj": "colwise_gather_output"}
    assert layers_from_model(model) == [LayerSpec(None, 2, 16)] * 2
    other = tiny("GPTNeoX", intermediate_size=32)
    other._tp_size = 2
    with pytest.raises(ValueError, match="expected a k_proj in layer 0 to count the heads of 1 of 2 ranks, got none"):
        layers_from_model(other)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: transformers.T5Config(), "config.is_encoder_decoder: expected a decoder .*, got True"),
        (lambda: transformers.GPT2Config(add_cross_attention=True), "config.add_cross_attention: .*got True"),
        (lambda: transformers.MllamaConfig(), r"config.cross_attention_layers: .*got \[3, 8, .*EncoderDecoderCache"),
    ],
)
def test_models_that_look_at_an_encoder_are_refused(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layers_from_model(SimpleNamespace(config=config()))


def test_decoder_of_an_encoder_decoder() -> None:
    t5 = transformers.T5Config(d_model=32, d_kv=6, num_layers=2, num_decoder_layers=3, num_heads=4)
    assert layers_from_config(t5) == [LayerSpec(None, 4, 6)] * 3
    bart = transformers.BartConfig(d_model=32, encoder_layers=2, decoder_layers=3, decoder_attention_heads=4)
    assert layers_from_config(bart) == [LayerSpec(None, 4, 8)] * 3


ATTRIBUTES = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "sliding_window"),
    *("layer_types", "num_kv_shared_layers", "kv_lora_rank", "v_head_dim", "per_layer_config", "layers_block_type"),
    *("multi_query", "text_config", "num_decoder_layers", "swa_head_dim", "get_text_config"),
)
ABSURD = (0, -1, 2**70, 1.5, "x", [1], True, float("nan"), torch.tensor([1, 2]), object(), [None] * 4)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_absurd_attributes_are_refused_in_one_line(name: str) -> None:
    """Or read, where something can be made of them."""
    good = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "sliding_window": 8}

    def refusal(config: dict[str, Any]) -> str | None:
        try:
            layers_from_config(SimpleNamespace(**config))
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    for value, types in itertools.product(ABSURD, ({}, {"layer_types": ["full_attention", "sliding_attention"] * 2})):
        told = refusal(good | types | {name: value})
        assert told is None or re.fullmatch(r"[\w.\[\]]+: (expected .*, got .*|no layer .*)", told)
