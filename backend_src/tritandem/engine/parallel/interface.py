"""What the ranks of one engine say to each other: sums over their parts of a layer, and choices over their parts of
the vocabulary.

A rank is one device's share of a model that is cut by tensor parallelism (Shoeybi et al. 2019). Every rank makes the
same calls in the same order; a call that one of them leaves out holds the others up until their patience ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

LOADING_PATIENCE_S = 600.0  # while ranks load, compile and capture, each in its own time
STEP_PATIENCE_S = 1.5  # between ranks that run the same step


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count`. Several may share a device."""

    index: int
    count: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class Sizes:
    """The most that one call carries; fixed buffers are made for it."""

    rows: int  # packed tokens of a pass
    width: int  # of the residual
    logit_rows: int
    vocab_size: int  # of all ranks together
    dtype: torch.dtype  # of the model: partial sums, residual and parts of logits on CUDA


class RanksFailed(Exception):
    """A rank raised, or did not come in time: what the others computed since then means nothing."""


class Exchange(Protocol):
    """Held by one rank, used by whoever runs its passes. On CUDA every call enqueues on the current stream, waits for
    nothing on the host and may be captured: what changes from call to call lives on the device. Results have the same
    bits on every rank. On the CPU a call that gets no answer raises RanksFailed.
    """

    rank: Rank

    def add_sum(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        """residual [T, width] += the sum of `partial` [T, width] over the ranks, in place. Contiguous, of one dtype;
        what is in `partial` afterwards means nothing."""

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of `partial` [.., width] over the ranks, in place; returns it."""

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of every rank's best: `values` float32 [R] and `ids` int64 [R], counted in the whole vocabulary.
        Of equal values the lowest id; what is not a number beats every number, as in torch.max."""

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        """[R, V / count] of each rank -> [R, V], rank 0's columns first. The result is the caller's until the next
        call of this kind."""

    def patience(self, seconds: float) -> None:
        """How long this rank waits for the others in calls that begin from now on, captured ones included. On CUDA 0
        is for rehearsals: it waits for nobody and misses nobody. Only so may a rank load, capture and time its graphs
        alone: a kernel that waits can keep the host from loading the next one."""

    def abort(self, reason: str) -> None:
        """Nobody waits any longer, on any rank; from now on all have `failed`. Any thread."""

    def failed(self) -> str | None:
        """Why the ranks are no longer together; None while they are. Any thread, no synchronisation."""

    def close(self) -> None:
        """Free the buffers. Nothing runs any more."""
