"""Calibrated scales of cached keys and values (`k_scale`, `v_scale`) made part of a model's own weights.

A cache in FP8 is to hold K / k_scale and V / v_scale. Both are linear in the weights: projections, or the norms behind
them, make keys and values smaller, queries and the output projection undo it, and no kernel knows of it. Scales are
rounded up to powers of two: nothing else is rounded by them, and no value is cut that the calibration kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from .packing import PackedLinear, narrowed

_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}


@torch.no_grad()
def use_cache_scales(model: PreTrainedModel, scales: Mapping[str, tuple[float, float]]) -> str | None:
    """`scales`: of K and of V, by the name of an attention module. None, or why none of them can be used."""
    if getattr(model.config.get_text_config(), "clip_qkv", None) is not None:
        return "its keys and values are clipped"
    modules = dict(model.named_modules())
    for name in scales:
        if name not in modules or (reason := _why_not(modules[name])):
            return f"{name} {reason if name in modules else 'is no part of this model'}"
    for name, (key, value) in scales.items():
        attention = modules[name]
        key, value = _power(key), _power(value)
        normed = hasattr(attention, "k_norm")
        for part, factor in (("q", key), ("k", 1.0 / key)):
            if normed:
                attention.get_parameter(f"{part}_norm.weight").mul_(factor)
            else:
                _scale(attention.get_submodule(f"{part}_proj"), factor)
        _scale(attention.get_submodule("v_proj"), 1.0 / value)
        _scale(attention.get_submodule("o_proj"), value, bias=False)
    return None


def _why_not(attention: nn.Module) -> str:
    parts = dict(attention.named_children())
    if not set(parts) >= _PROJECTIONS or set(parts) - _PROJECTIONS not in (set(), _NORMS):
        return "has other parts than projections and norms"
    for name in _PROJECTIONS:
        if type(parts[name]) not in (nn.Linear, PackedLinear):
            return f"has {type(parts[name]).__name__} for {name}"
    for name in _NORMS & set(parts):
        kind = type(parts[name]).__name__
        if not kind.endswith("RMSNorm") or kind.startswith("Gemma"):
            return f"has {kind} for {name}"
    return ""


def _power(scale: float) -> float:
    """The power of two that is not smaller."""
    mantissa, exponent = math.frexp(scale)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def _scale(module: nn.Module, factor: float, bias: bool = True) -> None:
    if isinstance(module, PackedLinear):
        module.packed = replace(module.packed, scales=narrowed(module.packed.scales.float() * factor))
    elif isinstance(module, nn.Linear):
        module.weight.mul_(factor)
    if bias and isinstance(module.bias, torch.Tensor):
        module.bias.mul_(factor)
