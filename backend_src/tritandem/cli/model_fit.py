"""How much memory a model takes, and how many sequences then fit, by arithmetic on what its files state. Pure.

Weights as a GPU holds them: 2 bytes a value, as stored where they are quantized (experts are unpacked), or as they are
once quantized at load. What graphs and steps need beside them is not known before a start: counts are an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritandem.config import EngineConfig

LENGTHS = (2_048, 8_192, 32_768)  # tokens of a sequence
_VALUE_BYTES = 2  # bfloat16
_SCALE_BYTES, _INT4_GROUP = 4, 128  # of what is quantized at load


def kv_bytes_a_token(facts: Mapping[str, Any], kv_dtype: str = "auto") -> int | None:
    """Keys and values of all layers that have them; None where the files do not state their shape. `kv_dtype`: of the
    setting."""
    layers, heads = facts["layers"], facts["attention_heads"]
    key_value_heads, head_size = facts["key_value_heads"] or heads, facts["head_size"]
    if head_size is None and facts["hidden_size"] and heads:
        head_size = facts["hidden_size"] // heads
    if not (isinstance(layers, int) and isinstance(key_value_heads, int) and isinstance(head_size, int)):
        return None
    states: int = facts["state_layers"]
    return 2 * (layers - states) * key_value_heads * head_size * (1 if kv_dtype == "fp8_e4m3" else _VALUE_BYTES)


def weight_bytes(facts: Mapping[str, Any], quantization: str = "none") -> int | None:
    """On a GPU; None where there are no weights to count. `quantization`: of the setting, for whole weights."""
    if facts["quantization"]:
        stored: int = facts["weight_bytes"] or 0
        unpacked: int = facts["unpacked_parameters"] * _VALUE_BYTES - facts["unpacked_bytes"]
        return stored + unpacked or None
    if not facts["parameters"]:
        return None
    values: int = facts["linear_parameters"]
    rows: int = facts["linear_rows"]
    whole: int = (facts["parameters"] - values) * _VALUE_BYTES
    match quantization:
        case "fp8":
            return whole + values + rows * _SCALE_BYTES
        case "int4":
            return whole + values // 2 + values // _INT4_GROUP * _SCALE_BYTES
    return whole + values * _VALUE_BYTES


def fit(
    facts: Mapping[str, Any], gpu_bytes: int, quantization: str = "none", kv_dtype: str = "auto"
) -> dict[str, Any] | None:
    """What a GPU of so many bytes holds beside the weights: tokens, and by length how many sequences. None: unknown."""
    a_token, weights = kv_bytes_a_token(facts, kv_dtype), weight_bytes(facts, quantization)
    states = facts["state_bytes"]
    if not a_token or weights is None or states is None:
        return None
    left = (gpu_bytes - weights) * EngineConfig().kv_memory_fraction
    tokens = max(0, int(left / a_token))
    context = facts["context_tokens"] or max(LENGTHS)
    lengths = [length for length in LENGTHS if length <= context] or [context]
    sequences = {length: max(0, int(left / (length * a_token + states))) for length in lengths}
    return {"gpu_bytes": gpu_bytes, "weight_bytes": weights, "kv_tokens": tokens, "sequences": sequences}
