"""Products with weights in the model's own dtype: our kernels for few rows, the vendor's library for many.

Weights of projections that stand side by side are merged, and a norm's weight is folded into the product behind it,
both in place: the model's modules keep views, so that transformers' own code goes on giving the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from .few_rows import choose_linear_tiles, few_row_linear
from .interface import How, Norm, Unfusable
from .rowwise import add_norm, silu_mul


def handles(module: nn.Module) -> bool:
    return type(module) is nn.Linear


class DenseNormed:
    """`NormedLinear`. With `shared` the weights are somebody else's as well (a tied head): nothing is folded."""

    def __init__(self, modules: Sequence[nn.Module], norm: Norm, gated: bool = False, shared: bool = False) -> None:
        """Raises Unfusable for a bias that stands at some of the modules only, or beside a gate."""
        self._weight, self._bias = _merged(modules)
        if gated and self._bias is not None:
            raise Unfusable("its MLP has a bias")
        if shared and self._bias is not None:
            raise Unfusable("its head has a bias")
        self._norm, self._gated, self._folded = norm, gated, not shared
        if self._folded:
            self._weight.copy_(self._weight.float() * norm.weight.data.float())
            norm.weight.data.fill_(1.0)  # what is left of it is a bare 1 / rms
        self.columns = self._weight.shape[0] // 2 if gated else self._weight.shape[0]

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor:
        few = delta is None or not self._folded
        columns, inner = self._weight.shape
        tiles = None
        if how.fuse and few:
            tiles = choose_linear_tiles(residual.shape[0], columns, inner, residual.dtype, self._gated)
        if tiles is not None and self._folded:
            return few_row_linear(
                residual,
                self._weight,
                tiles,
                norm_eps=self._norm.eps,
                bias=self._bias,
                gated=self._gated,
                overlap=how.overlap,
            )
        normed = add_norm(delta, residual, self._norm, how.overlap)
        if tiles is not None:
            return few_row_linear(normed, self._weight, tiles, overlap=how.overlap)
        product = F.linear(normed, self._weight, self._bias)
        return silu_mul(product, how.overlap) if self._gated else product

    def overlaps(self, rows: int) -> bool:
        columns, inner = self._weight.shape
        return choose_linear_tiles(rows, columns, inner, self._weight.dtype) is not None


class DenseResidual:
    """`ResidualLinear`."""

    def __init__(self, module: nn.Module) -> None:
        bias = _bias(module)
        self._bias = bias.data if bias is not None else None
        self._weight = cast(nn.Linear, module).weight.data
        self.inner: int = self._weight.shape[1]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, how: How) -> torch.Tensor | None:
        columns, inner = self._weight.shape
        tiles = choose_linear_tiles(x.shape[0], columns, inner, x.dtype) if how.fuse else None
        if tiles is None:
            return F.linear(x, self._weight, self._bias)
        few_row_linear(x, self._weight, tiles, bias=self._bias, residual=residual, overlap=how.overlap)
        return None

    def product(self, x: torch.Tensor, how: How) -> torch.Tensor:
        columns, inner = self._weight.shape
        tiles = choose_linear_tiles(x.shape[0], columns, inner, x.dtype) if how.fuse else None
        if tiles is None:
            return F.linear(x, self._weight, self._bias)
        return few_row_linear(x, self._weight, tiles, bias=self._bias, overlap=how.overlap)


def _merged(modules: Sequence[nn.Module]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights (and biases) one under the other; the modules keep views, so no memory is held twice."""
    linears = [cast(nn.Linear, module) for module in modules]
    biases = [bias.data for bias in map(_bias, modules) if bias is not None]
    if len(biases) not in (0, len(linears)):
        raise Unfusable("only some projections have a bias")
    if len(linears) == 1:
        return linears[0].weight.data, biases[0] if biases else None
    weight = torch.cat([linear.weight.data for linear in linears])
    bias = torch.cat(biases) if biases else None
    row = 0
    for linear in linears:
        linear.weight.data = weight[row : row + linear.out_features]
        if bias is not None:
            linear.bias.data = bias[row : row + linear.out_features]
        row += linear.out_features
    return weight, bias


def _bias(module: nn.Module) -> torch.Tensor | None:
    return cast("torch.Tensor | None", module.bias)
