"""What a layer with a state is: a convolution and a gated delta rule, whose states have one size however long the text.

Knows the shapes and how packed projections are laid out; nothing about models, rows of a batch or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from ...attention.interface import AttentionBatch


@dataclass(frozen=True, slots=True)
class StateShape:
    """Of one layer. `groups` key heads serve `group_heads` value heads each."""

    groups: int
    group_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that the convolution sees, its own included

    @property
    def heads(self) -> int:
        return self.groups * self.group_heads

    @property
    def channels(self) -> int:
        """Of the convolution: queries and keys of all groups, then values of all heads."""
        return 2 * self.groups * self.key_dim + self.heads * self.value_dim

    @property
    def conv_state(self) -> tuple[int, int]:
        """The last inputs of the convolution, in the model's type."""
        return self.channels, self.kernel - 1

    @property
    def recurrent_state(self) -> tuple[int, int, int]:
        """What the rule has accumulated, in float32."""
        return self.heads, self.key_dim, self.value_dim

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Of one sequence."""
        return math.prod(self.conv_state) * dtype.itemsize + math.prod(self.recurrent_state) * 4


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Projections of T packed tokens. Queries, keys and values are views of one tensor, so are gates; the last
    dimension is contiguous."""

    query: torch.Tensor  # [T, groups, key_dim]
    key: torch.Tensor  # [T, groups, key_dim]
    value: torch.Tensor  # [T, groups, group_heads * value_dim]
    gate: torch.Tensor  # [T, groups, group_heads * value_dim] of the norm
    beta: torch.Tensor  # [T, groups, group_heads] before the sigmoid
    decay: torch.Tensor  # [T, groups, group_heads] before softplus


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A layer of a model: `project` maps its input [T, hidden] to what the rule reads."""

    module: nn.Module
    shape: StateShape
    project: Callable[[torch.Tensor], DeltaInputs]
    conv_weight: torch.Tensor  # [channels, kernel]
    log_rate: torch.Tensor  # [heads]
    decay_bias: torch.Tensor  # [heads]
    norm: nn.Module  # of each head's result, with a gate
    norm_weight: torch.Tensor  # [value_dim]
    norm_eps: float
    out: nn.Module
    beta_scale: float = 1.0


class DeltaRule(Protocol):
    """One implementation of convolution, rule and gated norm."""

    def __call__(
        self, layer: DeltaLayer, inputs: DeltaInputs, conv: torch.Tensor, recurrent: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """[T, heads * value_dim]; brings the states of the rows `batch.slots` up to date.

        `conv` is [rows, channels, kernel - 1], `recurrent` float32 [rows, heads, key_dim, value_dim]. A sequence whose
        first token is in this pass begins with a state of zeros. One with context length 0 changes nothing.
        """
