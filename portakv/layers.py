"""LayerSpec: what one attention layer keeps in the cache; `layers_from_config` reads it off a config."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from portakv.arguments import MOST, as_int, require_bool, shown


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One model layer's KV.

    `window` is the number of visible keys including the current token, `None` for full attention.
    `v_head_dim` defaults to `head_dim`. A layer with `alias_of` owns no storage: it reads the KV of that
    earlier layer (Gemma 3n's shared layers). An `mla` layer keeps a latent of `head_dim` and a rope part of
    `v_head_dim` numbers a token, as one KV head. Raises `ValueError` or `TypeError` for sizes that are not
    positive integers, and for more heads of an MLA layer.
    """

    window: int | None
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    alias_of: int | None = None
    mla: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "num_kv_heads", "head_dim", "v_head_dim"):
            value = getattr(self, name)
            if value is not None or name not in ("window", "v_head_dim"):
                object.__setattr__(self, name, as_int(name, value))
        if self.alias_of is not None:
            object.__setattr__(self, "alias_of", as_int("alias_of", self.alias_of, -MOST))
        require_bool("mla", self.mla)
        if self.mla and self.num_kv_heads != 1:
            raise ValueError(f"num_kv_heads: expected 1 of an MLA layer, got {self.num_kv_heads}")
        if self.mla and self.v_head_dim is None:
            raise ValueError("v_head_dim: expected the dim of an MLA layer's rope part, got None")

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


def as_layers(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    if not isinstance(layers, Sequence):
        raise TypeError(f"layers: expected a sequence of LayerSpec, got {shown(layers)}")
    for i, spec in enumerate(layers):
        if not isinstance(spec, LayerSpec):
            raise TypeError(f"layers[{i}]: expected a LayerSpec, got {shown(spec)}")
    if not layers:
        raise ValueError("layers: expected at least one LayerSpec, got none")
    return tuple(layers)


def require_heads(layers: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
    """Raise `ValueError` for an MLA layer: transformers caches the K and V heads that it expands from the latent."""
    for i, spec in enumerate(layers):
        if spec.mla:
            raise ValueError(f"layers[{i}]: expected K and V heads, got MLA (a latent)")
    return layers


def layers_from_config(config: Any) -> list[LayerSpec]:
    """One LayerSpec per layer of a transformers decoder config; of a multimodal config, its text decoder's.

    Reads plain attributes, so any object with the same names will do: `num_hidden_layers`, `layer_types`,
    `sliding_window` (which counts the current token), `use_sliding_window`, head counts and dims (per layer
    where the config has `per_layer_config` or a list, of the sliding layers where it has `swa_*`), Falcon's
    `multi_query` and `new_decoder_architecture`, `num_kv_shared_layers`. Layers that share KV come out as aliases of
    the last layer of their kind that stores it. With `kv_lora_rank` and `qk_rope_head_dim` they are MLA layers, for
    engines that attend to the latent.

    Raises `ValueError` for what is not a token's K and V under a window: chunked, linear or compressed
    attention; and, or `TypeError`, for attributes that are no numbers of heads, dims or layers.
    """
    try:
        return _read_layers(config)
    except (ArithmeticError, AttributeError, IndexError, RuntimeError) as error:
        got = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"config: expected the numbers of heads, dims and layers of a decoder, got {got}") from error


def _read_layers(config: Any) -> list[LayerSpec]:
    text = config.get_text_config(decoder=True) if callable(getattr(config, "get_text_config", None)) else config
    text = getattr(text, "text_config", None) or text
    num_layers = getattr(text, "num_decoder_layers", None) or getattr(text, "num_hidden_layers", None)
    if num_layers is None:
        got = type(config).__name__
        raise ValueError(f"config: expected a decoder config with num_hidden_layers, got {got}")
    own = getattr(text, "num_decoder_layers", None) is None  # T5's other layers are its encoder's
    num_layers = as_int("config.num_hidden_layers", num_layers, most=1 << 20)
    of_layer = (own and _listed(text, "per_layer_config")) or [text] * num_layers
    kinds = _listed(text, "layer_types") or [_infer_kind(layer) for layer in of_layer]
    if not _listed(text, "layer_types") and len(blocks := _listed(text, "layers_block_type")) == len(kinds):
        kinds = [kind if block == "attention" else block for kind, block in zip(kinds, blocks, strict=True)]
    if not len(kinds) == len(of_layer) == num_layers:
        raise ValueError(f"config.layer_types: expected {num_layers} entries, got {len(kinds)}")
    specs = [_layer_spec(i, kinds[i], of_layer[i]) for i in range(num_layers)]
    shared = as_int("config.num_kv_shared_layers", getattr(text, "num_kv_shared_layers", None) or 0, 0, num_layers)
    for i in range(num_layers - shared, num_layers):
        stored = [j for j in range(i) if kinds[j] == kinds[i] and specs[j].alias_of is None]
        if not stored:
            raise ValueError(f"config.num_kv_shared_layers: no layer before {i} stores KV of kind {kinds[i]}")
        specs[i] = replace(specs[i], alias_of=stored[-1])
    return specs


def _listed(config: Any, name: str) -> list[Any]:
    """An attribute of one entry for each layer; empty where there is none."""
    value = getattr(config, name, None)
    try:
        return list(value or ())
    except TypeError:
        raise TypeError(f"config.{name}: expected a list, got {type(value).__name__}") from None


def _infer_kind(layer: Any) -> str:
    """What transformers takes a layer without a `layer_types` entry for."""
    if _window(layer) is not None:
        return "sliding_attention"
    chunked = getattr(layer, "attention_chunk_size", None) is not None
    return "chunked_attention" if chunked else "full_attention"


def _window(layer: Any) -> int | None:
    return getattr(layer, "sliding_window", None) if getattr(layer, "use_sliding_window", True) else None


def _layer_spec(i: int, kind: str, layer: Any) -> LayerSpec:
    if kind not in ("full_attention", "sliding_attention"):
        raise ValueError(f"config.layer_types[{i}]: expected full_attention or sliding_attention, got {kind}")
    is_swa = kind == "sliding_attention"
    window = _window(layer) if is_swa else None
    if is_swa and window is None:
        raise ValueError(f"config.sliding_window: expected the window of layer {i}, got None")
    if (latent := getattr(layer, "kv_lora_rank", None)) is not None:
        return LayerSpec(window, 1, latent, getattr(layer, "qk_rope_head_dim", None), mla=True)

    def size(*names: str) -> Any:  # LayerSpec checks it
        for name in names:
            own = getattr(layer, f"swa_{name}", None) if is_swa else None
            value = own or getattr(layer, name, None)
            if value:
                return value[i] if isinstance(value, (list, tuple)) else value
        return None

    heads = size("num_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads", "num_attention_heads")
    if getattr(layer, "new_decoder_architecture", False):
        heads = layer.num_attention_heads  # Falcon repeats its KV heads before it caches them
    elif getattr(layer, "multi_query", False):
        heads = 1
    if is_swa and getattr(layer, "model_type", None) == "mimo_v2_flash":
        heads = 2 * layer.num_key_value_heads  # fixed in its modelling code, whatever its config says
    if not heads:
        raise ValueError(f"config.num_attention_heads: expected the heads of layer {i}, got {heads}")
    head_dim = size("head_dim", "d_kv") or as_int("config.hidden_size", layer.hidden_size) // as_int(
        "config.num_attention_heads", size("num_attention_heads")
    )
    v_head_dim = size("v_head_dim") or head_dim
    return LayerSpec(window, heads, head_dim, None if v_head_dim == head_dim else v_head_dim)


def layers_from_model(model: Any) -> list[LayerSpec]:
    """`layers_from_config` of a transformers model, with the KV heads that its layers have in this process.

    They are counted by the rows of each layer's `k_proj`, if it has one: a rank of tensor parallelism has some of the
    config's heads, and configs have other names for them. Raises `ValueError` as `layers_from_config` does, for an
    encoder-decoder, for layers of cross-attention, and for ranks whose heads cannot be counted.
    """
    config = model.config
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for name in ("is_encoder_decoder", "add_cross_attention", "cross_attention_layers"):
        for of in (config, text):
            if value := getattr(of, name, None):
                raise ValueError(
                    f"config.{name}: expected a decoder without cross-attention, got {value}: it takes "
                    "EncoderDecoderCache(PortaKVCache(pool), DynamicCache())"
                )
    ranks = getattr(model, "_tp_size", None) or 1
    keys = _keys(model)
    specs = layers_from_config(config)
    if max(keys, default=0) >= len(specs):
        raise ValueError(f"config.num_hidden_layers: expected the model's {max(keys) + 1} layers, got {len(specs)}")
    for i, spec in enumerate(specs):
        if i in keys and not spec.mla:
            rows, head_dim = keys[i]
            heads, rest = divmod(rows, head_dim or spec.head_dim)
            if rest:
                raise ValueError(
                    f"model: expected heads of {head_dim or spec.head_dim} in layer {i}, got {rows} rows of k_proj"
                )
            specs[i] = replace(spec, num_kv_heads=heads, head_dim=head_dim or spec.head_dim)
        elif ranks > 1 and spec.alias_of is None:
            raise ValueError(
                f"model: expected a k_proj in layer {i} to count the heads of 1 of {ranks} ranks, got none"
            )
    return specs


def _keys(model: Any) -> dict[int, tuple[int, int | None]]:
    """By layer, how many rows of keys its `k_proj` gives in this process, and how many make a head, if it says so."""
    plan = (getattr(model, "tp_plan", None) or {}) if getattr(model, "_tp_size", None) else {}
    keys: dict[int, tuple[int, int | None]] = {}
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = set(map(id, decoder.modules()))  # beside it a tower of another modality may stand
    for name, module in model.named_modules():
        if id(module) not in inside:
            continue
        layer, weight = getattr(module, "layer_idx", None), getattr(getattr(module, "k_proj", None), "weight", None)
        if not isinstance(layer, int) or weight is None or weight.dim() != 2 or not weight.is_floating_point():
            continue  # weights that are packed do not show their rows
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.k_proj"), "")
        local = weight.to_local() if style == "colwise" and hasattr(weight, "to_local") else weight
        head_dim = getattr(module, "head_dim", None)
        # A layer's own attention comes before cross-attention.
        keys.setdefault(layer, (int(local.shape[0]), head_dim if isinstance(head_dim, int) else None))
    return keys
