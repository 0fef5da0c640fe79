"""The states of a model's layers, one row for each slot, and the choice of who computes them.

Owns the tensors. The last row belongs to padding. Knows nothing about who has a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ...attention.interface import AttentionBatch
from .interface import DeltaLayer, DeltaRule
from .layers import find_layers


@dataclass(frozen=True, slots=True)
class StateCache:
    """By number of the layer in the model: conv [rows, channels, kernel - 1] in the model's type, recurrent float32
    [rows, heads, key_dim, value_dim]."""

    layers: dict[int, DeltaLayer]
    conv: dict[int, torch.Tensor]
    recurrent: dict[int, torch.Tensor]
    rule: DeltaRule

    @classmethod
    def allocate(cls, model: PreTrainedModel, slots: int) -> StateCache:
        """With a row for padding behind those of `slots`. Raises torch.OutOfMemoryError."""
        layers, rows = find_layers(model), slots + 1
        conv, recurrent = {}, {}
        for number, layer in layers.items():
            weight, shape = layer.conv_weight, layer.shape
            conv[number] = torch.zeros((rows, *shape.conv_state), dtype=weight.dtype, device=weight.device)
            recurrent[number] = torch.zeros((rows, *shape.recurrent_state), dtype=torch.float32, device=weight.device)
        return cls(layers, conv, recurrent, choose_rule(torch.device(model.device)))

    def mix(self, number: int, hidden: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """What layer `number` makes of packed tokens [1, T, hidden]."""
        layer = self.layers[number]
        inputs = layer.project(hidden[0])
        mixed = self.rule(layer, inputs, self.conv[number], self.recurrent[number], batch)
        out: torch.Tensor = layer.out(mixed)
        return out[None]


def choose_rule(device: torch.device) -> DeltaRule:
    if device.type == "cuda":
        from .launches import delta_rule  # needs the Triton language, which a CPU's torch comes without

        return delta_rule
    from .reference import delta_rule as reference

    return reference


def state_bytes(model: PreTrainedModel) -> int:
    """Of one sequence, in all layers; 0 for a model of attention alone."""
    return sum(layer.shape.row_bytes(layer.conv_weight.dtype) for layer in find_layers(model).values())
