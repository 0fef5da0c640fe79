"""The rotary frequencies of a GGUF file: as transformers' parameters, and as numbers to check a built model by.

The file says them in its keys (`rope.freq_base`, `rope.scaling.*`) and, for frequencies that follow no formula, in a
tensor of divisors, one for each pair of dimensions: `rope_freqs` (Llama 3.1 and later), or `rope_factors_short` and
`rope_factors_long` (Phi-3). Knows nothing about weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....contracts.errors import ConfigError
from ....model_facts.gguf_header import GgufHeader, read_floats

DEFAULT_BASE = 10_000.0
LOCAL_BASE = 10_000.0  # of sliding layers that have frequencies of their own
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192  # of every Llama 3.1 to 3.3
FACTORS, SHORT_FACTORS, LONG_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
BETA_FAST, BETA_SLOW = 32.0, 1.0

Floats = np.ndarray[Any, np.dtype[np.float64]]


def read_factors(header: GgufHeader) -> dict[str, list[float]]:
    """The tensors of divisors that the file has, by name. Raises ConfigError."""
    names = {tensor.name for tensor in header.tensors}
    return {name: read_floats(header, name) for name in (FACTORS, SHORT_FACTORS, LONG_FACTORS) if name in names}


def rope_parameters(values: Mapping[str, Any], factors: Mapping[str, list[float]], dimensions: int) -> dict[str, Any]:
    """transformers' parameters for `dimensions` rotary dimensions of each head. `values`: keys without architecture.

    Raises ConfigError naming the key for a scaling that transformers has no exact form of.
    """
    base = float(values.get("rope.freq_base", DEFAULT_BASE))
    kind, factor = _scaling(values)
    _refuse_unclear(values, kind)
    context = int(values["context_length"])
    original = int(values.get("rope.scaling.original_context_length", context))
    attention = float(values.get("rope.scaling.attn_factor", 1.0))
    for name, given in factors.items():
        if len(given) != dimensions // 2:
            raise ConfigError(f"{name} has {len(given)} values, the rotary dimensions are {dimensions}")
    if kind == "longrope":
        return _longrope(base, factors, context, original, values.get("rope.scaling.attn_factor"))
    if divisors := factors.get(FACTORS):
        if kind != "none" or attention != 1.0:
            raise ConfigError(f"{FACTORS} and rope.scaling together: no known model has both")
        return {"rope_theta": base, **_explicit(base, divisors, context)}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": float(values.get("rope.scaling.yarn_beta_fast", BETA_FAST)),
            "beta_slow": float(values.get("rope.scaling.yarn_beta_slow", BETA_SLOW)),
            "attention_factor": attention * _yarn_attention(factor),
        }
    if attention != 1.0:
        raise ConfigError(f"rope.scaling.attn_factor: given {attention} without yarn or longrope, allowed: 1")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    return {"rope_type": "default", "rope_theta": base}


def frequencies(values: Mapping[str, Any], factors: Mapping[str, list[float]], dimensions: int) -> Floats:
    """Radians a position, for each pair of dimensions, straight from the file's keys: short texts where there are two
    sets. `rope_parameters` must have allowed them."""
    base = float(values.get("rope.freq_base", DEFAULT_BASE))
    kind, factor = _scaling(values)
    plain = base ** (-np.arange(0, dimensions, 2) / dimensions)
    if divisors := factors.get(SHORT_FACTORS if kind == "longrope" else FACTORS):
        return np.asarray(plain / np.array(divisors))
    if kind == "linear":
        return np.asarray(plain / factor)
    if kind != "yarn":
        return np.asarray(plain)
    original = int(values.get("rope.scaling.original_context_length", values["context_length"]))
    bounds = [
        dimensions * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (
            float(values.get("rope.scaling.yarn_beta_fast", BETA_FAST)),
            float(values.get("rope.scaling.yarn_beta_slow", BETA_SLOW)),
        )
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dimensions - 1)
    interpolated = np.clip((np.arange(dimensions // 2) - low) / max(0.001, high - low), 0, 1)
    return np.asarray(plain * (1 - interpolated) + plain / factor * interpolated)


def _scaling(values: Mapping[str, Any]) -> tuple[str, float]:
    """(none, linear, yarn or longrope; factor). A factor without a type is linear. Raises ConfigError."""
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 0.0)) or 1.0)
    kind = str(values.get("rope.scaling.type", "linear"))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ConfigError(f"rope.scaling.type: given {kind!r}, allowed: none, linear, yarn, longrope")
    if kind == "linear" and factor == 1.0:
        return "none", 1.0
    return kind, factor


def _refuse_unclear(values: Mapping[str, Any], kind: str) -> None:
    """Keys that programs read differently, or that transformers has no parameter for."""
    for key, allowed in (
        ("yarn_ext_factor", (1.0,)),
        ("yarn_attn_factor", ()),
        ("yarn_log_multiplier", (0.0,)),
        ("alpha", (0.0, 1.0)),
    ):
        given = values.get(f"rope.scaling.{key}")
        if given is not None and kind != "none" and given not in allowed:
            words = f"allowed: {' or '.join(map(str, allowed)) or 'none at all'}"
            raise ConfigError(f"rope.scaling.{key}: given {given} with {kind} scaling, {words}")


def _explicit(base: float, divisors: list[float], context: int) -> dict[str, Any]:
    """Llama 3's formula where it gives these divisors; else the divisors themselves, in the form that takes any."""
    if np.allclose(divisors, _llama3_divisors(base, len(divisors), max(divisors)), rtol=1e-5, atol=0):
        return {
            "rope_type": "llama3",
            "factor": max(divisors),
            "low_freq_factor": LLAMA3_LOW,
            "high_freq_factor": LLAMA3_HIGH,
            "original_max_position_embeddings": LLAMA3_CONTEXT,
        }
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _llama3_divisors(base: float, pairs: int, factor: float) -> Floats:
    """Slow turns are stretched by `factor`, fast ones not at all, those between in part."""
    turns = LLAMA3_CONTEXT * base ** (-np.arange(pairs) / pairs) / (2 * math.pi)
    kept = np.clip((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    return np.asarray(1 / ((1 - kept) / factor + kept))


def _longrope(
    base: float, factors: Mapping[str, list[float]], context: int, original: int, attention: float | None
) -> dict[str, Any]:
    if SHORT_FACTORS not in factors or LONG_FACTORS not in factors:
        raise ConfigError(f"rope.scaling.type: given longrope without the tensors {SHORT_FACTORS} and {LONG_FACTORS}")
    parameters = {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors[SHORT_FACTORS],
        "long_factor": factors[LONG_FACTORS],
        "factor": context / original,
        "original_max_position_embeddings": original,
    }
    return parameters if attention is None else {**parameters, "attention_factor": float(attention)}


def _yarn_attention(factor: float) -> float:
    """What cosine and sine are multiplied by."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
