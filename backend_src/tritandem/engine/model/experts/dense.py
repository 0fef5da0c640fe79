"""Experts with weights in the model's own dtype: our kernels for few tokens an expert, the vendor's library for many.

Which gate a family means is found by asking its modelling code about random values, and so is whether the product
gives what transformers' own gives. The module keeps views of the weights: transformers' code goes on working.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..linear.interface import Unfusable
from .interface import LIBRARY, Gate
from .launches import Weights, by_pairs, by_tiles, choose_tokens_a_tile

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def handles(module: nn.Module) -> bool:
    """Experts as transformers' interface has them: fused parameters of three dimensions."""
    weights = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


class DenseExperts:
    """`ExpertsProduct`."""

    def __init__(self, module: nn.Module) -> None:
        """Raises Unfusable for what the kernels do not compute."""
        experts: Any = module
        if getattr(experts, "has_post_expert_norm", False):
            raise Unfusable("its experts have a norm of their own")
        if experts.gate_up_proj.dtype not in _DTYPES:
            raise Unfusable(f"its experts are {experts.gate_up_proj.dtype}")
        gate = find_gate(experts, experts.down_proj.shape[1 if experts.is_transposed else 2])
        gate_up, down = _rows_of_inner(experts, "gate_up_proj"), _rows_of_inner(experts, "down_proj")
        bias, down_bias = None, None
        if experts.has_bias:
            bias, down_bias = experts.gate_up_proj_bias.data, experts.down_proj_bias.data
        self.module = experts
        self.weights = Weights(gate_up, down, bias, down_bias, gate)

    def __call__(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        scores: torch.Tensor,
        residual: torch.Tensor | None = None,
        overlap: bool = False,
    ) -> torch.Tensor | None:
        tokens = choose_tokens_a_tile(x.shape[0], index.shape[1], self.weights.experts)
        if tokens is None:
            return cast(torch.Tensor, ALL_EXPERTS_FUNCTIONS[LIBRARY](self.module, x, index, scores))
        if tokens == 1:
            out = by_pairs(x, index, scores, self.weights, residual, overlap)
        else:
            out = by_tiles(x, index, scores, self.weights, tokens, residual, overlap)
        return None if residual is not None else out


def find_gate(experts: Any, columns: int) -> Gate:
    """The gate that gives what the module's own code gives for random values [.., 2 * columns]. Raises Unfusable."""
    device = experts.gate_up_proj.device
    values = 4.0 * torch.randn(8, 2 * columns, generator=torch.Generator().manual_seed(1)).to(device)
    wanted = experts._apply_gate(values)
    for gate in _gates(experts):
        if wanted.shape == (8, columns) and torch.allclose(apply_gate(gate, values), wanted, atol=1e-4, rtol=1e-4):
            return gate
    raise Unfusable("its experts have another gate")


def _gates(experts: Any) -> Iterator[Gate]:
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    for interleaved in (False, True):
        yield Gate("silu", interleaved)
        yield Gate("gelu_tanh", interleaved)
        if isinstance(alpha, (int, float)) and isinstance(limit, (int, float)):
            yield Gate("clamped", interleaved, float(alpha), float(limit))


def apply_gate(gate: Gate, values: torch.Tensor) -> torch.Tensor:
    """[.., 2 * columns] -> [.., columns], as the kernels do it."""
    half = values.shape[-1] // 2
    g, u = (values[..., ::2], values[..., 1::2]) if gate.interleaved else (values[..., :half], values[..., half:])
    if gate.kind == "clamped":
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
        return (u + 1.0) * g * torch.sigmoid(gate.alpha * g)
    turned = functional.silu(g) if gate.kind == "silu" else functional.gelu(g, approximate="tanh")
    return turned * u


def _rows_of_inner(experts: Any, name: str) -> torch.Tensor:
    """A weight as [E, rows, inner], inner contiguous; the module keeps a view of it in its own form."""
    parameter: nn.Parameter = getattr(experts, name)
    if not experts.is_transposed:
        parameter.data = parameter.data.contiguous()
        return parameter.data
    parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)
    return parameter.data.transpose(1, 2)
