"""Products of ranks that hold a part each: sums that go to the residual at once, and the head's gathered columns."""

from __future__ import annotations

import torch

from ...parallel.interface import Exchange
from .interface import How, NormedLinear, PartialLinear


class SummedResidual:
    """`ResidualLinear`: the part's product, summed over the ranks into the residual."""

    def __init__(self, part: PartialLinear, exchange: Exchange) -> None:
        self._part, self._exchange = part, exchange
        self.inner = part.inner

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, how: How) -> torch.Tensor | None:
        self._exchange.add_sum(self._part.product(x, how), residual)
        return None


class GatheredNormed:
    """`NormedLinear`: every rank's columns, side by side."""

    def __init__(self, part: NormedLinear, exchange: Exchange) -> None:
        self._part, self._exchange = part, exchange
        self.columns = part.columns * exchange.rank.count

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor:
        part = self._part(residual, delta, how)
        return self._exchange.gather_columns(part) if len(part) else part.new_empty((0, self.columns))

    def overlaps(self, rows: int) -> bool:
        return self._part.overlaps(rows)
