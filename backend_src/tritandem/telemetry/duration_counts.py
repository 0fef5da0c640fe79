"""Histograms of durations that cost a fraction of a microsecond an observation, whoever publishes them later.

Owns running totals. Knows nothing about registries: `Registry.histogram_up_to` takes the totals over.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Final

from .families import Family


class DurationCounts:
    """Observations by bucket of `family` and their sum, since start.

    One thread writes, any other reads: each update is one store of a whole number, so that a reader is at worst one
    observation late. `LockedDurationCounts` is for several writers.
    """

    def __init__(self, family: Family, **labels: str) -> None:
        self.family: Final = family
        self.labels: Final = labels
        self._bounds_ns = [round(bound * 1e9) for bound in family.buckets]
        self._counts = [0] * (len(family.buckets) + 1)
        self._sum_ns = 0

    def note(self, duration_ns: int) -> None:
        self._counts[bisect_left(self._bounds_ns, duration_ns)] += 1
        self._sum_ns += duration_ns

    def totals(self) -> tuple[list[int], float]:
        """Observations in each bucket (not cumulative; the last one is +Inf) and their sum in seconds."""
        return self._counts[:], self._sum_ns / 1e9


class LockedDurationCounts(DurationCounts):
    """For several writing threads."""

    def __init__(self, family: Family, **labels: str) -> None:
        super().__init__(family, **labels)
        self._lock = threading.Lock()

    def note(self, duration_ns: int) -> None:
        with self._lock:
            super().note(duration_ns)

    def totals(self) -> tuple[list[int], float]:
        with self._lock:
            return super().totals()
