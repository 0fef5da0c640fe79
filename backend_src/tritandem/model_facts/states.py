"""Layers that keep a state of one size instead of keys and values, as a configuration states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LAYER_TYPE = "linear_attention"
_VALUE_BYTES, _STATE_BYTES = 2, 4  # bfloat16 of the convolution's inputs, float32 of what the rule accumulates


@dataclass(frozen=True, slots=True)
class StateFacts:
    """`layers` keep `sequence_bytes` of each sequence; None where their shape is not stated."""

    layers: int
    sequence_bytes: int | None


def state_facts(text: Mapping[str, Any]) -> StateFacts:
    """Of a text model's configuration."""
    layers, interval = text.get("num_hidden_layers"), text.get("full_attention_interval")
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        count = kinds.count(LAYER_TYPE)
    elif isinstance(layers, int) and isinstance(interval, int) and interval > 0:
        count = layers - layers // interval
    else:
        count = 0
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    sizes = [text.get(f"linear_{name}") for name in names]
    if not count or not all(isinstance(size, int) for size in sizes):
        return StateFacts(count, None if count else 0)
    groups, heads, key_dim, value_dim, kernel = (int(size) for size in sizes if size is not None)
    channels = 2 * groups * key_dim + heads * value_dim
    each = channels * (kernel - 1) * _VALUE_BYTES + heads * key_dim * value_dim * _STATE_BYTES
    return StateFacts(count, count * each)
