"""How much memory a model takes, and how many sequences then fit, by arithmetic on what its files state. Pure.

Weights as a GPU holds them: 2 bytes a value, or as stored where they are quantized. What graphs and steps need beside
them is not known before a start, so that counts are an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritandem.config import EngineConfig

LENGTHS = (2_048, 8_192, 32_768)  # tokens of a sequence
_VALUE_BYTES = 2  # bfloat16


def kv_bytes_a_token(facts: Mapping[str, Any]) -> int | None:
    """Keys and values of all layers; None where the files do not state their shape."""
    layers, heads = facts["layers"], facts["attention_heads"]
    key_value_heads, head_size = facts["key_value_heads"] or heads, facts["head_size"]
    if head_size is None and facts["hidden_size"] and heads:
        head_size = facts["hidden_size"] // heads
    if not (isinstance(layers, int) and isinstance(key_value_heads, int) and isinstance(head_size, int)):
        return None
    return 2 * layers * key_value_heads * head_size * _VALUE_BYTES


def weight_bytes(facts: Mapping[str, Any]) -> int | None:
    """On a GPU; None where there are no weights to count."""
    if facts["quantization"]:
        stored: int | None = facts["weight_bytes"]
        return stored
    return facts["parameters"] * _VALUE_BYTES if facts["parameters"] else None


def fit(facts: Mapping[str, Any], gpu_bytes: int) -> dict[str, Any] | None:
    """What a GPU of so many bytes holds beside the weights: tokens, and by length how many sequences. None: unknown."""
    a_token, weights = kv_bytes_a_token(facts), weight_bytes(facts)
    if a_token is None or weights is None:
        return None
    left = (gpu_bytes - weights) * EngineConfig().kv_memory_fraction
    tokens = max(0, int(left / a_token))
    context = facts["context_tokens"] or max(LENGTHS)
    sequences = {length: tokens // length for length in LENGTHS if length <= context} or {context: tokens // context}
    return {"gpu_bytes": gpu_bytes, "weight_bytes": weights, "kv_tokens": tokens, "sequences": sequences}
