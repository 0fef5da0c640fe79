"""What one CUDA device asks of the others that hold parts of the same model, while it is being built."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from ..model.linear.interface import Unfusable
from ..parallel.interface import LOADING_PATIENCE_S, Exchange
from .rank_threads import RankThreads


class Company:
    """None: the device holds the whole model."""

    shares = 1  # parts of models on this device

    def shared(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The one that `make` made first, on whatever device: what the host tells all of them."""
        return make()

    def least(self, number: int) -> int:
        """Of everybody's numbers."""
        return number

    def agree(self, check: Callable[[], None]) -> None:
        """`check` runs the model. Raises Unfusable where it raises that anywhere."""
        check()


ALONE = Company()


class _Common:
    """What the ranks share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tensors: dict[str, torch.Tensor] = {}
        self.numbers: list[int] = []


class RankCompany(Company):
    """Every rank calls the same, on its own thread. But for `agree`, ranks run alone meanwhile, without patience: a
    kernel that waits for another rank could keep that rank's host from loading what it waits for."""

    def __init__(self, exchange: Exchange, ranks: RankThreads, common: _Common, shares: int) -> None:
        self._exchange, self._ranks, self._common, self.shares = exchange, ranks, common, shares

    @classmethod
    def of(cls, ranks: RankThreads) -> list[RankCompany]:
        devices, common = [exchange.rank.device for exchange in ranks.exchanges], _Common()
        return [cls(e, ranks, common, devices.count(e.rank.device)) for e in ranks.exchanges]

    def shared(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._common.lock:
            if name not in self._common.tensors:
                self._common.tensors[name] = make()
            return self._common.tensors[name]

    def least(self, number: int) -> int:
        self._common.numbers.append(number)  # lists are safe among threads
        self._ranks.meet()
        least = min(self._common.numbers)
        self._ranks.meet()
        self._common.numbers.clear()
        self._ranks.meet()
        return least

    def agree(self, check: Callable[[], None]) -> None:
        reason = ""
        with suppress(Unfusable):
            check()  # what it needs is loaded now; sums over one rank mean nothing
        self._all_idle()
        self._exchange.patience(LOADING_PATIENCE_S)
        self._all_idle()
        try:
            check()
        except Unfusable as unfusable:
            reason = str(unfusable)
        self._all_idle()
        self._exchange.patience(0)
        if not self.least(int(not reason)):
            raise Unfusable(reason or "it differs on another rank")

    def _all_idle(self) -> None:
        torch.cuda.synchronize(self._exchange.rank.device)
        self._ranks.meet()
