"""A transformers configuration that says what a GGUF file's header says, or a refusal that names the key.

transformers' own map leaves keys out, and the default of a class then stands where the file says something else. Here
every key that describes the model is put into the configuration and compared with it afterwards, or has one allowed
value. Knows nothing about weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ....contracts.errors import ConfigError
from ....model_facts.gguf_header import GgufHeader
from .rope import LOCAL_BASE, read_factors, rope_parameters

# The type of configuration for each architecture whose attention can be served.
MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt2": "gpt2",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "starcoder2": "starcoder2",
}
_UNSAID: dict[str, dict[str, Any]] = {"qwen3moe": {"norm_topk_prob": True}}  # what the architecture implies

_EPSILONS = ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon")
# What a key is called in configurations: the first of the names that the class has.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
}
_REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.sliding_window",
    "expert_count",
    "expert_used_count",
)
# Keys with the one meaning that every architecture above has; absence says the same.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),
}
_ROPE_KEYS = {"rope.dimension_count", "rope.freq_base", "rope.scale_linear"}
_LAYER_TYPES = {True: "sliding_attention", False: "full_attention"}
# Numbers of layers by which llama.cpp tells the sizes whose queries are scaled by the model's width.
_GEMMA_WIDE_LAYERS = {"gemma2": 46, "gemma3": 62}


def gguf_config(header: GgufHeader) -> PreTrainedConfig:
    """Raises ConfigError naming what the header says and no configuration of transformers can."""
    path = header.path
    kind = header.values.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{path}: general.type: given {kind!r}, allowed: 'model'")
    if header.architecture not in MODEL_TYPES:
        allowed = ", ".join(MODEL_TYPES)
        raise ConfigError(f"{path}: general.architecture: given {header.architecture!r}, allowed: {allowed}")
    try:
        config = _build(header, read_factors(header))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: its header makes no {header.architecture} configuration: {error}") from error
    if differing := _differences(header, config):
        said = ", ".join(differing)
        raise ConfigError(f"{path}: transformers' {config.model_type} cannot be what the header says: {said}")
    return config


def rotary_dimensions(header: GgufHeader) -> int:
    """Of each head."""
    return int(header.of_architecture().get("rope.dimension_count", head_dimensions(header)))


def head_dimensions(header: GgufHeader) -> int:
    stated = header.of_architecture()
    return int(stated.get("attention.key_length", stated["embedding_length"] // _one(stated["attention.head_count"])))


def _build(header: GgufHeader, factors: Mapping[str, list[float]]) -> PreTrainedConfig:
    stated = header.of_architecture()
    plain = AutoConfig.for_model(MODEL_TYPES[header.architecture])
    names = {key: name for key in _ATTRIBUTES if (name := _attribute(key, plain)) is not None}
    for key in _REQUIRED:
        if key not in stated and key in names and getattr(plain, names[key]):
            raise ConfigError(f"{header.architecture}.{key}: the header does not say it")
    if not {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"} & set(stated):
        raise ConfigError(f"{header.architecture}.attention.layer_norm_rms_epsilon: the header does not say it")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise ConfigError("weights are missing (1): token_embd.weight")
    values: dict[str, Any] = {
        "vocab_size": shapes["token_embd.weight"][0],
        "num_key_value_heads": _one(stated["attention.head_count"]),
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.values.get("tokenizer.ggml.padding_token_id"),
        **_UNSAID.get(header.architecture, {}),
        **{names[key]: _one(given) for key, given in stated.items() if key in names},
    }
    if hasattr(plain, "head_dim"):
        values["head_dim"] = head_dimensions(header)
    if "attention.sliding_window_pattern" in stated and getattr(plain, "layer_types", None):
        values["layer_types"] = [_LAYER_TYPES[slides] for slides in _sliding_layers(header)]
    if hasattr(plain, "query_pre_attn_scalar"):
        wide = stated["block_count"] == _GEMMA_WIDE_LAYERS[header.architecture]
        values["query_pre_attn_scalar"] = (
            stated["embedding_length"] // stated["attention.head_count"] if wide else head_dimensions(header)
        )
    if getattr(plain, "rope_parameters", None):
        values |= _rope_values(header, plain, factors)
    return AutoConfig.for_model(MODEL_TYPES[header.architecture], **values)


def _rope_values(header: GgufHeader, plain: PreTrainedConfig, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    stated, dimensions = header.of_architecture(), rotary_dimensions(header)
    parameters = rope_parameters(stated, factors, dimensions)
    values: dict[str, Any] = {}
    if hasattr(plain, "original_max_position_embeddings"):
        values["original_max_position_embeddings"] = parameters.get(
            "original_max_position_embeddings", stated["context_length"]
        )
    if dimensions != head_dimensions(header) or "partial_rotary_factor" in plain.rope_parameters:
        parameters["partial_rotary_factor"] = dimensions / head_dimensions(header)
    if "sliding_attention" in plain.rope_parameters:  # sliding layers turn by frequencies of their own, never scaled
        local = {"rope_type": "default", "rope_theta": local_base(header)}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    return {**values, "rope_parameters": parameters}


def local_base(header: GgufHeader) -> float:
    """The frequency base of sliding layers that have one of their own."""
    return float(header.of_architecture().get("rope.freq_base_swa", LOCAL_BASE))


def _attribute(key: str, config: PreTrainedConfig) -> str | None:
    return next((name for name in _ATTRIBUTES.get(key, ()) if hasattr(config, name)), None)


def _one(given: Any) -> Any:
    """A list that says the same for every layer is that value."""
    return given[0] if isinstance(given, list) and len(set(given)) == 1 else given


def _differences(header: GgufHeader, config: PreTrainedConfig) -> list[str]:
    """The keys that the configuration does not say, each with what the header does."""
    differing = []
    for key, given in header.of_architecture().items():
        if key in _ONLY:
            same = given in _ONLY[key]
        elif key.startswith("rope."):  # read by `rope.py`, whose frequencies are looked for in the built model
            same = _turns(key, config)
        elif key in ("attention.key_length", "attention.value_length"):
            same = given == head_dimensions(header)
        elif key == "attention.sliding_window_pattern":
            wanted = [_LAYER_TYPES[slides] for slides in _sliding_layers(header)]
            same = getattr(config, "layer_types", None) == wanted
        else:
            name = _attribute(key, config)
            same = key in _ATTRIBUTES and not given if name is None else getattr(config, name) == _one(given)
        if not same:
            differing.append(f"{header.architecture}.{key} {_shown(given)}")
    return differing


def _turns(key: str, config: PreTrainedConfig) -> bool:
    rope = getattr(config, "rope_parameters", None) or {}
    if key == "rope.freq_base_swa":
        return "sliding_attention" in rope
    return bool(rope) and (key in _ROPE_KEYS or key.startswith("rope.scaling."))


def _sliding_layers(header: GgufHeader) -> list[bool]:
    """Of each layer, from a key that says so for each or that every n-th does not slide."""
    stated = header.of_architecture()
    pattern, layers = stated["attention.sliding_window_pattern"], stated["block_count"]
    if isinstance(pattern, list):
        return [bool(slides) for slides in pattern]
    return [pattern > 0 and (layer + 1) % pattern > 0 for layer in range(layers)]


def _shown(given: Any) -> str:
    return str(given) if not isinstance(given, list) or len(given) <= 4 else f"[{given[0]}, {given[1]}, ...]"
