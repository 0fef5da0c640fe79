"""What a model's files say, in one flat dictionary for a person or a program. Nothing is loaded.

An entry that the files say nothing about is None: a default of the model's class then holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError
from .folder import ModelFolder, read_folder
from .generation import sampling_defaults
from .gguf_header import GgufHeader, kind_name, read_gguf, tensor_bytes
from .quantization import StoredLayer, in_mxfp4, read_quantization, stored_layers, values_of
from .states import state_facts
from .token_ids import read_vocabulary, tokens_without_row, turn_end_ids
from .weight_files import Weight, read_weights

# Of a layer's linear layers, which can be quantized at load; experts are merged and stay as they are.
_LINEAR = re.compile(r"(.*\.)?(layers|blk|h)\.\d+\.(?!.*(experts\.|_exps))[\w.]+\.weight")
_ROPE_NAMES = ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings")


def summary_of_folder(path: Path) -> dict[str, Any]:
    """Raises ConfigError for files that cannot be read."""
    folder, vocabulary, weights = read_folder(path), read_vocabulary(path), read_weights(path) or {}
    text, eos = folder.text, folder.tokenizer_config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    stated = folder.end_ids(vocabulary.ids.get(eos) if vocabulary and eos else None)
    turn_ends = turn_end_ids(vocabulary) if vocabulary else ()
    kinds = Counter(weight.kind for weight in weights.values())
    states = state_facts(text)
    quantized, plain = _quantized(folder, weights)
    values = [rows * inner for rows, inner in (layer.shape for layer in quantized.values())]
    linear = _linear({name: weights[name].shape for name in plain})
    unpacked_values, unpacked_bytes = _unpacked_experts(quantized, weights)
    return {
        "format": "folder",
        "architecture": text.get("model_type"),
        "layers": text.get("num_hidden_layers"),
        "state_layers": states.layers,
        "state_bytes": states.sequence_bytes,
        "hidden_size": text.get("hidden_size"),
        "attention_heads": text.get("num_attention_heads"),
        "key_value_heads": text.get("num_key_value_heads"),
        "head_size": text.get("head_dim"),
        "experts": text.get("num_experts", text.get("num_local_experts", text.get("n_routed_experts"))),
        "context_tokens": folder.context_tokens,
        "vocabulary_rows": folder.vocab_size,
        "tokens": vocabulary.size if vocabulary else None,
        "end_ids": list(dict.fromkeys((*stated, *turn_ends))),
        "rope": _rope(folder),
        "sliding_window": text.get("sliding_window") if text.get("use_sliding_window", True) else None,
        "tied_head": _tied(folder, weights),
        "weights": dict(kinds.most_common()),
        "parameters": sum(values_of(name, weights[name]) for name in plain) + sum(values) or None,
        "linear_parameters": sum(map(prod, linear)),
        "linear_rows": sum(shape[0] for shape in linear),
        "weight_bytes": sum(weight.stored_bytes for weight in weights.values()) or None,
        "quantization": (folder.config.get("quantization_config") or {}).get("quant_method"),
        "quantized_layers": dict(Counter(layer.words for layer in quantized.values()).most_common()),
        "quantized_parameters": sum(values),
        "unpacked_parameters": unpacked_values,
        "unpacked_bytes": unpacked_bytes,
        "chat_template_chars": sum(map(len, folder.chat_templates[:1])),
        "generation_defaults": sampling_defaults(path),
        "tokens_without_row": tokens_without_row(folder, vocabulary) if vocabulary else [],
    }


def summary_of_gguf(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    header = read_gguf(path)
    stated = header.of_architecture()
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    kinds = Counter(kind_name(tensor.kind) for tensor in header.tensors)
    linear = _linear(shapes)
    return {
        "format": "GGUF file",
        "architecture": header.architecture,
        "layers": stated.get("block_count"),
        "state_layers": 0,
        "state_bytes": 0,
        "hidden_size": stated.get("embedding_length"),
        "attention_heads": stated.get("attention.head_count"),
        "key_value_heads": stated.get("attention.head_count_kv"),
        "head_size": stated.get("attention.key_length"),
        "experts": stated.get("expert_count"),
        "context_tokens": stated.get("context_length"),
        "vocabulary_rows": shapes.get("token_embd.weight", (stated.get("vocab_size"),))[0],
        "tokens": header.lengths.get("tokenizer.ggml.tokens"),
        "end_ids": list(header.end_ids),
        "rope": _gguf_rope(header),
        "sliding_window": stated.get("attention.sliding_window"),
        "tied_head": "output.weight" not in shapes,
        "weights": dict(kinds.most_common()),
        "parameters": sum(tensor.elements for tensor in header.tensors),
        "linear_parameters": sum(map(prod, linear)),
        "linear_rows": sum(shape[0] for shape in linear),
        "weight_bytes": sum(map(tensor_bytes, header.tensors)),
        "quantization": None,
        "quantized_layers": {},
        "quantized_parameters": 0,
        "unpacked_parameters": 0,
        "unpacked_bytes": 0,
        "chat_template_chars": len(header.values.get("tokenizer.chat_template", "")),
        "generation_defaults": sampling_defaults(path),
        "tokens_without_row": [],
    }


def _quantized(folder: ModelFolder, weights: Mapping[str, Weight]) -> tuple[Mapping[str, StoredLayer], Collection[str]]:
    """Quantized layers and names of whole weights; of a kind that is not served nothing is known."""
    try:
        quantization = read_quantization(folder)
        return stored_layers(weights, quantization, str(folder.path)) if quantization else ({}, weights)
    except ConfigError:
        return {}, weights


def _unpacked_experts(layers: Mapping[str, StoredLayer], weights: Mapping[str, Weight]) -> tuple[int, int]:
    """(numbers, bytes as they are stored) of quantized experts, which are unpacked while they are loaded."""
    parts = {full for layer in layers.values() if ".experts." in layer.name for full in layer.parts.values()}
    shapes = [layer.shape for layer in layers.values() if ".experts." in layer.name]
    values, stored = in_mxfp4(weights)
    return values + sum(map(prod, shapes)), stored + sum(weights[name].stored_bytes for name in parts)


def _linear(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shape for name, shape in shapes.items() if len(shape) == 2 and _LINEAR.fullmatch(name)]


def _tied(folder: ModelFolder, weights: Mapping[str, Any]) -> bool | None:
    stated = folder.text.get("tie_word_embeddings", folder.config.get("tie_word_embeddings"))
    if stated is None and weights:
        return "lm_head.weight" not in weights
    return None if stated is None else bool(stated)


def _rope(folder: ModelFolder) -> dict[str, Any]:
    text = folder.text
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    stated = {name: text[name] for name in ("rope_theta",) if name in text}
    nested = {kind: part for kind, part in given.items() if isinstance(part, dict)}
    return stated | (nested or {name: given[name] for name in _ROPE_NAMES if name in given})


def _gguf_rope(header: GgufHeader) -> dict[str, Any]:
    tensors = [tensor.name for tensor in header.tensors if tensor.name.startswith("rope_")]
    return _below(header.of_architecture(), "rope.") | ({"tensors": tensors} if tensors else {})


def _below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}
