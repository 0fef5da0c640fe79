"""Writes a tiny model as the GGUF file that llama.cpp would make of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

ARCHITECTURES = {"gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}  # others: as the type
RMS_NORM = {"llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3"}
NORMS_PLUS_ONE = {"gemma2", "gemma3"}
Tensors = Iterator[tuple[str, np.ndarray[Any, Any]]]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    without: Collection[str] = (),
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """The model's keys and tensors, less the tensors in `without`, plus what `change` adds."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    _write_sizes(writer, config, architecture)
    if (rope := getattr(config, "rope_parameters", None)) is not None:
        _write_rope(writer, config, rope)
    for name, tensor in _tensors(model, architecture):
        if name not in without:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig, architecture: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    epsilons = ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    [epsilon] = [getattr(config, name) for name in epsilons if hasattr(config, name)]
    (writer.add_layer_norm_rms_eps if architecture in RMS_NORM else writer.add_layer_norm_eps)(epsilon)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma3":
        writer.add_sliding_window_pattern([layer == "sliding_attention" for layer in config.layer_types])
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig, rope: dict[str, Any]) -> None:
    rope = rope.get("full_attention", rope)
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dimensions = int(heads * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dimensions)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope" and config.model_type == "phi3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _tensors(model: PreTrainedModel, architecture: str) -> Tensors:
    config = model.config
    [key] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    for weight, value in model.state_dict().items():
        if weight == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor, stem = value.numpy(), weight.removesuffix(".weight").removesuffix(".bias")
        if stem.endswith("gate_up_proj") and tensor.ndim == 3:  # experts
            block = stem.split(".")[2]
            gate, up = np.split(tensor, 2, axis=1)
            yield f"blk.{block}.ffn_gate_exps.weight", gate
            yield f"blk.{block}.ffn_up_exps.weight", up
            continue
        name = names.get_name(stem)
        assert name is not None, weight
        if name.endswith("norm") and architecture in NORMS_PLUS_ONE and weight.endswith(".weight"):
            tensor = tensor + 1
        if architecture == "llama" and name.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if name.endswith("q") else config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if architecture == "gpt2" and tensor.ndim == 2 and name.startswith("blk."):
            tensor = tensor.T
        if name.endswith("ffn_gate_inp_shexp"):
            tensor = tensor[0]
        yield name + (".bias" if weight.endswith(".bias") else ".weight"), tensor
    yield from _divisors(model)


def _divisors(model: PreTrainedModel) -> Tensors:
    """What the frequencies are divided by, where they follow from no key."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and model.config.model_type == "phi3":
        yield "rope_factors_short.weight", np.array(rope["short_factor"], np.float32)
        yield "rope_factors_long.weight", np.array(rope["long_factor"], np.float32)
    elif rope.get("rope_type") in ("llama3", "longrope"):
        built = next(buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")).double().numpy()
        plain = rope["rope_theta"] ** (-np.arange(len(built)) / len(built))
        yield "rope_freqs.weight", (plain / built).astype(np.float32)
