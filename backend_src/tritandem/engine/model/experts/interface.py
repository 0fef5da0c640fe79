"""What a mixture of experts asks of whoever multiplies. `registry.py` knows who that is.

A product owns the weights of one layer's experts and decides how they are read: per (token, expert) pair, in tiles of
tokens that share an expert, or by the vendor's library. No host synchronisation, no shape that follows from a routing:
a CUDA graph may hold any product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

LIBRARY = "grouped_mm"  # transformers' experts function that calls the vendor's grouped product


@dataclass(frozen=True, slots=True)
class Gate:
    """How the results of gate and up meet. `interleaved`: their columns alternate, gate first; else gate's come first.

    `kind` silu: silu(g) * u; gelu_tanh: gelu(g) * u, by tanh; clamped: (u' + 1) * g' * sigmoid(alpha * g') with g' at
    most `limit` and u' between -limit and limit, as in gpt-oss.
    """

    kind: str
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0


class ExpertsProduct(Protocol):
    """The experts of one layer, each down(gate(x)), summed with the routing's weights."""

    def __call__(
        self,
        x: torch.Tensor,
        index: torch.Tensor,
        scores: torch.Tensor,
        residual: torch.Tensor | None = None,
        overlap: bool = False,
    ) -> torch.Tensor | None:
        """`x` [T, inner], contiguous, by the experts `index` (integers [T, per_token]) weighted by `scores`, as many.

        The sum [T, inner], or None where it has been added to `residual`, of that shape. With `overlap` a launch may
        begin while the kernel before it ends (it waits before it reads).
        """
