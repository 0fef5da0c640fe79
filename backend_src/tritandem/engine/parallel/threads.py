"""Ranks that are threads of one process, with their tensors in its memory: the slow twin of peers on CUDA.

A call is two meetings: everybody has shown its part, everybody has read the others'. Parts are added in the order of
ranks by each rank for itself, so all of them get the same bits. Knows nothing about models.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .interface import STEP_PATIENCE_S, Exchange, Rank, RanksFailed, Sizes


@dataclass(slots=True)
class _Meeting:
    """What the ranks share."""

    count: int
    parts: list[tuple[torch.Tensor, ...]] = field(init=False)
    barrier: threading.Barrier = field(init=False)
    reason: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.parts = [()] * self.count
        self.barrier = threading.Barrier(self.count)

    def end(self, reason: str) -> None:
        with self.lock:
            self.reason = self.reason or reason
        self.barrier.abort()

    def wait(self, rank: int, patience_s: float) -> None:
        try:
            self.barrier.wait(patience_s)
        except threading.BrokenBarrierError:
            self.end(f"rank {rank} waited {patience_s:g} s for the others")  # unless it was said before
            raise RanksFailed(self.reason) from None


class ThreadExchange:
    """`Exchange` of one of them."""

    def __init__(self, rank: Rank, meeting: _Meeting) -> None:
        self.rank, self._meeting, self._patience_s = rank, meeting, STEP_PATIENCE_S

    @classmethod
    def together(cls, ranks: Sequence[Rank], sizes: Sizes) -> list[Exchange]:
        """One each. Nothing here depends on `sizes`: parts stay where they are."""
        meeting = _Meeting(len(ranks))
        return [cls(rank, meeting) for rank in ranks]

    def add_sum(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        residual += self._total(partial)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial.copy_(self._total(partial))

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._shown(values, ids)
        # Parts stand in order and each best is the lowest of its part: the first maximum has the lowest id.
        best, rank = torch.stack([part[0] for part in parts]).max(dim=0)
        chosen = torch.stack([part[1] for part in parts]).gather(0, rank[None])[0]
        self._read()
        return best, chosen

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        whole = torch.cat([columns for [columns] in self._shown(part)], dim=1)
        self._read()
        return whole

    def patience(self, seconds: float) -> None:
        self._patience_s = seconds

    def abort(self, reason: str) -> None:
        self._meeting.end(reason)

    def failed(self) -> str | None:
        return self._meeting.reason

    def close(self) -> None:
        self._meeting.end("the ranks are closed")

    def _total(self, partial: torch.Tensor) -> torch.Tensor:
        first, *others = [part for [part] in self._shown(partial)]
        total = first.clone()
        for other in others:
            total += other
        self._read()
        return total

    def _shown(self, *part: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Every rank's part of this call. Nobody may change its own before `_read`."""
        meeting = self._meeting
        meeting.parts[self.rank.index] = part
        meeting.wait(self.rank.index, self._patience_s)
        return meeting.parts

    def _read(self) -> None:
        self._meeting.wait(self.rank.index, self._patience_s)
