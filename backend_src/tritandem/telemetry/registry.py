"""Accumulates observations in the process that makes them; cheap enough for a request's path.

Owns the running totals. Knows nothing about Triton: a publisher drains `changes()` at its own pace, so that
an observation costs a dictionary update and never a process message.
Thread-safe: one lock, held for the update of a few numbers. A token's path takes `DurationCounts` instead.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .families import Family, Kind

Labels = tuple[tuple[str, str], ...]
_Series = tuple[Family, Labels]


@dataclass(frozen=True, slots=True)
class Change:
    """What one series gained (counter) or is now (gauge) since the last drain."""

    name: str
    kind: Kind
    help: str
    labels: Labels
    value: float


@dataclass(slots=True)
class _Histogram:
    counts: list[int]  # by bucket, not cumulative; the last one is +Inf
    total: float = 0.0


@dataclass(slots=True)
class _Gained:
    """Since the last drain."""

    counters: dict[_Series, float] = field(default_factory=dict)
    histograms: dict[_Series, _Histogram] = field(default_factory=dict)


class Registry:
    """Totals of counters, gauges and histograms, keyed by series.

    A histogram becomes the counters `<name>_bucket{le=...}`, `<name>_sum` and `<name>_count` (cumulative
    buckets, as Prometheus defines them): increments can then be published in bulk, one message a series
    and period instead of one an observation.

    Every method raises ValueError for a family of another kind and for labels other than those declared.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gained = _Gained()
        self._gauges: dict[_Series, float] = {}
        self._published_gauges: dict[_Series, float] = {}
        self._counter_totals: dict[_Series, float] = {}
        self._histogram_totals: dict[_Series, _Histogram] = {}

    def add(self, family: Family, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter; by 0 to make it appear. Raises ValueError for a negative amount."""
        key = (family, _labels(family, labels, Kind.COUNTER))
        if amount < 0:
            raise ValueError(f"{family.name}: a counter cannot fall by {-amount}")
        with self._lock:
            self._gained.counters[key] = self._gained.counters.get(key, 0.0) + amount

    def add_up_to(self, family: Family, total: float, **labels: str) -> None:
        """Raise a counter to an externally kept total; a smaller total (a restarted source) starts anew."""
        key = (family, _labels(family, labels, Kind.COUNTER))
        with self._lock:
            before = self._counter_totals.get(key)
            self._counter_totals[key] = total
            gained = total if before is None or total < before else total - before
            if gained or before is None:
                self._gained.counters[key] = self._gained.counters.get(key, 0.0) + gained

    def set(self, family: Family, value: float, **labels: str) -> None:
        """Set a gauge."""
        key = (family, _labels(family, labels, Kind.GAUGE))
        with self._lock:
            self._gauges[key] = value

    def observe(self, family: Family, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        key = (family, _labels(family, labels, Kind.HISTOGRAM))
        with self._lock:
            gained = self._gained_by(key)
            gained.counts[bisect_left(family.buckets, value)] += 1
            gained.total += value

    def histogram_up_to(self, family: Family, counts: Sequence[int], total: float, **labels: str) -> None:
        """Raise a histogram to externally kept totals: observations by bucket (not cumulative, +Inf last) and sum."""
        key = (family, _labels(family, labels, Kind.HISTOGRAM))
        with self._lock:
            before = self._histogram_totals.get(key) or _empty(family)
            if list(counts) != before.counts:
                gained = self._gained_by(key)
                gained.counts = [
                    g + new - old for g, new, old in zip(gained.counts, counts, before.counts, strict=True)
                ]
                gained.total += total - before.total
                self._histogram_totals[key] = _Histogram(list(counts), total)

    def changes(self) -> list[Change]:
        """Drain what changed since the last call; gauges appear only when their value differs."""
        with self._lock:
            gained, self._gained = self._gained, _Gained()
            gauges = {k: v for k, v in self._gauges.items() if self._published_gauges.get(k) != v}
            self._published_gauges.update(gauges)
        drained = [Change(f.name, Kind.COUNTER, f.help, labels, v) for (f, labels), v in gained.counters.items()]
        for (family, labels), histogram in gained.histograms.items():
            drained.extend(_cumulative(family, labels, histogram))
        drained.extend(Change(f.name, Kind.GAUGE, f.help, labels, v) for (f, labels), v in gauges.items())
        return drained

    def _gained_by(self, key: _Series) -> _Histogram:
        """The caller holds the lock."""
        return self._gained.histograms.setdefault(key, _empty(key[0]))


def _empty(family: Family) -> _Histogram:
    return _Histogram([0] * (len(family.buckets) + 1))


def _cumulative(family: Family, labels: Labels, histogram: _Histogram) -> Iterable[Change]:
    running = 0
    for bound, count in zip((*family.buckets, float("inf")), histogram.counts, strict=True):
        running += count
        if running:
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield Change(f"{family.name}_bucket", Kind.COUNTER, family.help, (*labels, ("le", le)), float(running))
    yield Change(f"{family.name}_sum", Kind.COUNTER, family.help, labels, histogram.total)
    yield Change(f"{family.name}_count", Kind.COUNTER, family.help, labels, float(running))


def _labels(family: Family, given: Mapping[str, str], kind: Kind) -> Labels:
    if family.kind is not kind:
        raise ValueError(f"{family.name} is a {family.kind.value}, not a {kind.value}")
    if tuple(given) != family.labels and set(given) != set(family.labels):
        raise ValueError(f"{family.name}: given labels {sorted(given)}, declared {sorted(family.labels)}")
    return tuple((label, given[label]) for label in family.labels)
