"""Which modules of transformers are layers with a state, and how each lays out its projections.

A family is one line in `READERS`. Knows nothing about batches, rows or kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .interface import DeltaInputs, DeltaLayer, StateShape

LAYER_TYPE = "linear_attention"  # as configurations call them
FAMILIES = ("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
Projection = Callable[[Any, StateShape, torch.Tensor], DeltaInputs]


def find_layers(model: PreTrainedModel) -> dict[int, DeltaLayer]:
    """By number in the model. Raises ValueError with the reason for one that differs from what is known of its kind."""
    modules: list[Any] = [module for module in model.modules() if type(module).__name__ in READERS]
    return {module.layer_idx: _read(module) for module in modules}


def _read(module: Any) -> DeltaLayer:
    kind = type(module).__name__
    try:
        groups, heads = module.num_k_heads, module.num_v_heads
        shape = StateShape(groups, heads // groups, module.head_k_dim, module.head_v_dim, module.conv_kernel_size)
        conv, norm = module.conv1d, module.norm if hasattr(module, "norm") else module.o_norm
        layer = DeltaLayer(
            module=module,
            shape=shape,
            project=partial(READERS[kind], module, shape),
            conv_weight=conv.weight.squeeze(1),
            log_rate=module.A_log,
            decay_bias=module.dt_bias,
            norm=norm,
            norm_weight=norm.weight,
            norm_eps=norm.variance_epsilon,
            out=module.out_proj if hasattr(module, "out_proj") else module.o_proj,
            beta_scale=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
        )
        activations = {module.activation, norm.activation}
    except AttributeError as error:
        raise ValueError(f"its {kind} is not the one that is known: {error}") from error
    if activations != {"silu"}:
        raise ValueError(f"its {kind} has the activations {sorted(activations)}; only silu is served")
    if conv.bias is not None or conv.weight.shape != (shape.channels, 1, shape.kernel):
        raise ValueError(f"its {kind} has a convolution with a bias, or of an unknown shape")
    return layer


def _by_groups(module: Any, shape: StateShape, hidden: torch.Tensor) -> DeltaInputs:
    """Qwen3-Next: what belongs to a group lies together."""
    values = shape.group_heads * shape.value_dim
    mixed = module.in_proj_qkvz(hidden).view(len(hidden), shape.groups, 2 * shape.key_dim + 2 * values)
    query, key, value, gate = torch.split(mixed, [shape.key_dim, shape.key_dim, values, values], dim=2)
    beta, decay = module.in_proj_ba(hidden).view(len(hidden), shape.groups, -1).chunk(2, dim=2)
    return DeltaInputs(query, key, value, gate, beta, decay)


def _by_parts(module: Any, shape: StateShape, hidden: torch.Tensor) -> DeltaInputs:
    """Qwen3.5: all queries, all keys, all values."""
    rest = module.in_proj_z(hidden), module.in_proj_b(hidden), module.in_proj_a(hidden)
    return _divide(shape, module.in_proj_qkv(hidden), *rest)


def _by_projections(module: Any, shape: StateShape, hidden: torch.Tensor) -> DeltaInputs:
    """OLMo Hybrid: one projection for each."""
    mixed = torch.cat((module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)), dim=1)
    return _divide(shape, mixed, module.g_proj(hidden), module.b_proj(hidden), module.a_proj(hidden))


def _divide(
    shape: StateShape, mixed: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> DeltaInputs:
    keys = shape.groups * shape.key_dim
    parts = torch.split(mixed, [keys, keys, shape.heads * shape.value_dim], dim=1)
    return DeltaInputs(*(part.view(len(part), shape.groups, -1) for part in (*parts, gate, beta, decay)))


READERS: dict[str, Projection] = {
    "OlmoHybridGatedDeltaNet": _by_projections,
    "Qwen3NextGatedDeltaNet": _by_groups,
    "Qwen3_5GatedDeltaNet": _by_parts,
    "Qwen3_5MoeGatedDeltaNet": _by_parts,
}


def hand_over(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a layer with a state: whoever receives the attention of a pass runs it, else transformers does."""
    sink = kwargs.pop("tritandem_sink", None)
    if sink is None:
        result: torch.Tensor = type(module).forward(module, hidden_states, *args, **kwargs)
        return result
    mixed: torch.Tensor = sink.mix(module.layer_idx, hidden_states)
    return mixed


def take_over(layer: DeltaLayer) -> None:
    """Passes with a sink are handed to it from now on."""
    layer.module.forward = partial(hand_over, layer.module)
