"""What an engine's core thread notes of every step: a few list updates, no lock, no message.

One thread writes, another reads: each update is one bytecode-level store, so that a reader sees every number whole, at
worst a step late. Knows nothing about steps, devices or where the numbers go. A note costs about 0.2 microseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final

from .families import DECODE_STEP, GRAPH_LAUNCH, STEP_IDLE, Family


class DurationCounts:
    """The totals of one histogram: observations by bucket of `family` and their sum."""

    def __init__(self, family: Family, **labels: str) -> None:
        self.family: Final = family
        self.labels: Final = labels
        self._bounds_ns = [round(bound * 1e9) for bound in family.buckets]
        self._counts = [0] * (len(family.buckets) + 1)
        self._sum_ns = 0

    def note(self, duration_ns: int) -> None:
        """The writing thread only."""
        self._counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self._sum_ns += duration_ns

    def totals(self) -> tuple[list[int], float]:
        """Observations in each bucket (not cumulative; the last one is +Inf) and their sum in seconds, since start."""
        return self._counts[:], self._sum_ns / 1e9


class StepMeter:
    """`busy` is true from the first launch until no sequence is left: a gap between steps counts only then."""

    def __init__(self) -> None:
        self.busy = False
        self.decode_step = DurationCounts(DECODE_STEP)
        self.idle_gap = DurationCounts(STEP_IDLE)
        self.staged_bytes: Callable[[], Mapping[str, int]] = dict  # totals by kind of memory; any thread
        self._decode_launch = DurationCounts(GRAPH_LAUNCH, phase="decode")
        self._prefill_launch = DurationCounts(GRAPH_LAUNCH, phase="prefill")

    def launched(self, duration_ns: int, prefills: bool) -> None:
        """The host spent this on handing a step to the device."""
        self.busy = True
        (self._prefill_launch if prefills else self._decode_launch).note(duration_ns)

    def histograms(self) -> tuple[DurationCounts, ...]:
        return self.decode_step, self.idle_gap, self._decode_launch, self._prefill_launch
