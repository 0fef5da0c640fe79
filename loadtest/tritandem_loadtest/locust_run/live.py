"""Figures of a running test for Locust's web page: mergeable histograms, so that workers send buckets and not stamps.

Percentiles are within 1 % of the exact ones. The report of a run does not use this: it is computed from raw stamps.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ..metrics import METRICS, itl_per_chunk_ms, itl_per_token_ms, request_metrics_ms
from ..stamps import COMPLETED, RequestRecord

_LOG_BASE = math.log(1.01)
_CHARTED = ("ttft", "itl")
SHOWN = (50, 90, 95, 99)


class Histogram:
    """Counts of positive values in buckets 1 % wide."""

    def __init__(self) -> None:
        self.buckets: Counter[int] = Counter()

    def add(self, value_ms: float) -> None:
        self.buckets[math.ceil(math.log(max(value_ms, 1e-3)) / _LOG_BASE)] += 1

    def percentile(self, percent: float) -> float:
        """The upper edge of the bucket that holds the nearest rank; NaN without values."""
        rank = math.ceil(self.buckets.total() * percent / 100)
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                return math.exp(bucket * _LOG_BASE)
        return math.nan


class LiveFigures:
    """All metrics since the start, and rows for the charts. `take` on every process, `merge` on the master."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.total = {name: Histogram() for name in METRICS}
        self.outcomes: Counter[str] = Counter()
        self.output_tokens = 0
        self.rows: list[dict[str, float | None]] = []
        self._second = {name: Histogram() for name in _CHARTED}
        self._second_counts: Counter[str] = Counter()

    def take(self, record: RequestRecord) -> None:
        """Add one request when it has ended."""
        self.outcomes[record.outcome] += 1
        self._second_counts["completed" if record.outcome == COMPLETED else "failed"] += 1
        self._second_counts["tokens"] += record.output_tokens
        self.output_tokens += record.output_tokens
        if record.outcome != COMPLETED:
            return
        samples = {name: [value] for name, value in request_metrics_ms(record).items()}
        samples |= {"itl": itl_per_token_ms(record), "itl_chunk": itl_per_chunk_ms(record)}
        for name, values in samples.items():
            for value in values:
                self.total[name].add(value)
                if name in _CHARTED:
                    self._second[name].add(value)

    def close_second(self) -> None:
        """End the current interval of the charts with a row."""
        row: dict[str, float | None] = {name: self._second_counts[name] for name in ("completed", "failed", "tokens")}
        for name, histogram in self._second.items():
            for p in (50, 99):
                row[f"{name}_p{p}"] = round(histogram.percentile(p), 2) if histogram.buckets else None
        self.rows.append(row)
        self._second = {name: Histogram() for name in _CHARTED}
        self._second_counts = Counter()

    def drain(self) -> dict[str, Any]:
        """What a worker tells the master since the last time, as plain types; the worker starts again from zero."""
        said = {
            "outcomes": dict(self.outcomes),
            "tokens": self.output_tokens,
            "counts": dict(self._second_counts),
            "total": {name: dict(histogram.buckets) for name, histogram in self.total.items()},
            "second": {name: dict(histogram.buckets) for name, histogram in self._second.items()},
        }
        self.clear()
        return said

    def merge(self, said: dict[str, Any]) -> None:
        """Add what a worker said. JSON and msgpack may have turned bucket numbers into text."""
        self.outcomes.update(said["outcomes"])
        self.output_tokens += said["tokens"]
        self._second_counts.update(said["counts"])
        for mine, theirs in ((self.total, said["total"]), (self._second, said["second"])):
            for name, buckets in theirs.items():
                mine[name].buckets.update({int(bucket): count for bucket, count in buckets.items()})

    def figures(self) -> dict[str, Any]:
        """Everything that the charts show."""
        outcomes, tokens = dict(self.outcomes), self.output_tokens
        return {"rows": self.rows, "table": self.table(), "outcomes": outcomes, "tokens": tokens}

    def table(self) -> list[dict[str, str]]:
        """One row a metric, in milliseconds, for Locust's table."""
        return [
            {
                "metric": f"{METRICS[name]} (ms)",
                "samples": f"{histogram.buckets.total():,}",
                **{f"p{p}": f"{histogram.percentile(p):.2f}" for p in SHOWN},
                "max": f"{histogram.percentile(100):.2f}",
            }
            for name, histogram in self.total.items()
            if histogram.buckets
        ]
