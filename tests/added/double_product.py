"""A format of weights: linear layers without a bias, multiplied in float64. It counts its products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from tritandem.engine.model.linear.interface import How, Norm

products: Counter[str] = Counter()


def handles(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None


def _weight(module: nn.Module) -> torch.Tensor:
    return cast(nn.Linear, module).weight.data.double()


class DoubleNormed:
    def __init__(self, modules: Sequence[nn.Module], norm: Norm, gated: bool = False, shared: bool = False) -> None:
        self._weight, self._norm, self._gated = torch.cat([_weight(module) for module in modules]), norm, gated
        self.columns = len(self._weight) // 2 if gated else len(self._weight)

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor:
        products["normed"] += 1
        if delta is not None:
            residual += delta
        x = residual.double()
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._norm.eps) * self._norm.weight.double()
        product = F.linear(normed, self._weight)
        if self._gated:
            gate, up = product.chunk(2, dim=-1)
            product = F.silu(gate) * up
        return product.to(residual.dtype)

    def overlaps(self, rows: int) -> bool:
        return False


class DoubleResidual:
    def __init__(self, module: nn.Module) -> None:
        self._weight = _weight(module)
        self.inner: int = self._weight.shape[1]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, how: How) -> torch.Tensor | None:
        products["residual"] += 1
        return F.linear(x.double(), self._weight).to(x.dtype)
