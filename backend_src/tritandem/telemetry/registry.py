"""Accumulates observations in the process that makes them; cheap enough for a token path.

Owns the running totals. Knows nothing about Triton: a publisher drains `changes()` at its own pace, so that
an observation costs a dictionary update and never a process message.
Thread-safe: one lock, held for the update of a few numbers.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .families import Family, Kind

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What one series gained (counter) or is now (gauge) since the last drain."""

    name: str
    kind: Kind
    help: str
    labels: Labels
    value: float


class Registry:
    """Totals of counters, gauges and histograms, keyed by series.

    A histogram becomes the counters `<name>_bucket{le=...}`, `<name>_sum` and `<name>_count` (cumulative
    buckets, as Prometheus defines them): increments can then be published in bulk, one message a series
    and period instead of one an observation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[tuple[Family, Labels, str], float] = {}
        self._gauges: dict[tuple[Family, Labels], float] = {}
        self._published_gauges: dict[tuple[Family, Labels], float] = {}
        self._counter_totals: dict[tuple[Family, Labels], float] = {}

    def add(self, family: Family, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter. Raises ValueError for a wrong kind, wrong labels or a negative amount."""
        key = (family, _labels(family, labels, Kind.COUNTER), "")
        if amount < 0:
            raise ValueError(f"{family.name}: a counter cannot fall by {-amount}")
        with self._lock:
            self._pending[key] = self._pending.get(key, 0.0) + amount

    def add_up_to(self, family: Family, total: float, **labels: str) -> None:
        """Raise a counter to an externally kept total; a smaller total (a restarted source) starts anew."""
        key = (family, _labels(family, labels, Kind.COUNTER))
        with self._lock:
            before = self._counter_totals.get(key, 0.0)
            self._counter_totals[key] = total
            gained = total - before if total >= before else total
            if gained:
                pending = (*key, "")
                self._pending[pending] = self._pending.get(pending, 0.0) + gained

    def set(self, family: Family, value: float, **labels: str) -> None:
        """Set a gauge."""
        key = (family, _labels(family, labels, Kind.GAUGE))
        with self._lock:
            self._gauges[key] = value

    def observe(self, family: Family, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        self.observe_many(family, (value,), **labels)

    def observe_many(self, family: Family, values: Iterable[float], **labels: str) -> None:
        """Add observations to a histogram under one lock."""
        given = _labels(family, labels, Kind.HISTOGRAM)
        with self._lock:
            for value in values:
                place = bisect_left(family.buckets, value)
                for suffix, amount in ((f"bucket:{place}", 1.0), ("sum", value), ("count", 1.0)):
                    key = (family, given, suffix)
                    self._pending[key] = self._pending.get(key, 0.0) + amount

    def changes(self) -> list[Change]:
        """Drain what changed since the last call; gauges appear only when their value differs."""
        with self._lock:
            pending, self._pending = self._pending, {}
            gauges = {k: v for k, v in self._gauges.items() if self._published_gauges.get(k) != v}
            self._published_gauges.update(gauges)
        drained: list[Change] = []
        buckets: dict[tuple[Family, Labels], dict[int, float]] = {}
        for (family, labels, suffix), amount in pending.items():
            if suffix.startswith("bucket:"):
                buckets.setdefault((family, labels), {})[int(suffix[7:])] = amount
            else:
                name = f"{family.name}_{suffix}" if suffix else family.name
                drained.append(Change(name, Kind.COUNTER, family.help, labels, amount))
        for (family, labels), counts in buckets.items():
            drained.extend(_cumulative(family, labels, counts))
        drained.extend(Change(f.name, Kind.GAUGE, f.help, labels, v) for (f, labels), v in gauges.items())
        return drained


def _cumulative(family: Family, labels: Labels, counts: Mapping[int, float]) -> Iterable[Change]:
    running = 0.0
    for place, bound in enumerate((*family.buckets, float("inf"))):
        running += counts.get(place, 0.0)
        if running:
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield Change(f"{family.name}_bucket", Kind.COUNTER, family.help, (*labels, ("le", le)), running)


def _labels(family: Family, given: Mapping[str, str], kind: Kind) -> Labels:
    if family.kind is not kind:
        raise ValueError(f"{family.name} is a {family.kind.value}, not a {kind.value}")
    if tuple(given) != family.labels and set(given) != set(family.labels):
        raise ValueError(f"{family.name}: given labels {sorted(given)}, declared {sorted(family.labels)}")
    return tuple((label, given[label]) for label in family.labels)
