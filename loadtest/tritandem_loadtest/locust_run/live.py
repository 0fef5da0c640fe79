"""Figures of a running test for Locust's web page: mergeable histograms, so that workers send buckets and not stamps.

Percentiles are within 1 % of the exact ones. The report of a run does not use this: it is computed from raw stamps.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

from ..metrics import METRICS, itl_per_chunk_ms, itl_per_token_ms, request_metrics_ms
from ..page import BLUE, GREEN, ORANGE, RED, Document, line_chart
from ..stamps import COMPLETED, RequestRecord

_LOG_BASE = math.log(1.01)
_CHARTED = ("ttft", "itl")
SHOWN = (50, 90, 95, 99)
_OPEN_SECONDS = 15


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


def _merge_histograms(mine: dict[str, Histogram], theirs: dict[str, dict[int, int]]) -> None:
    for name, buckets in theirs.items():
        mine[name].buckets.update({int(bucket): count for bucket, count in buckets.items()})


class _Second:
    """What ended within one second of a test."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.histograms = {name: Histogram() for name in _CHARTED}

    def row(self) -> dict[str, float | None]:
        """A point of each chart; None: no sample."""
        row: dict[str, float | None] = {name: self.counts[name] for name in ("completed", "failed", "tokens")}
        for name, histogram in self.histograms.items():
            for p in (50, 99):
                row[f"{name}_p{p}"] = round(histogram.percentile(p), 2) if histogram.buckets else None
        return row

    def said(self) -> dict[str, Any]:
        histograms = {name: dict(histogram.buckets) for name, histogram in self.histograms.items()}
        return {"counts": dict(self.counts), "histograms": histograms}

    def merge(self, said: dict[str, Any]) -> None:
        self.counts.update(said["counts"])
        _merge_histograms(self.histograms, said["histograms"])


class LiveFigures:
    """All metrics since the start, and rows for the charts, one a second.

    `take` and `close_second` on every process that sends requests; workers `drain`, the master merges. Seconds count
    from the start of the test on each process; the last ones stay open for what workers have yet to say.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.total = {name: Histogram() for name in METRICS}
        self.outcomes: Counter[str] = Counter()
        self.output_tokens = 0
        self._settled: list[dict[str, float | None]] = []
        self._open = [_Second()]  # the last is the current one
        self._first_open = 0

    @property
    def rows(self) -> list[dict[str, float | None]]:
        """Of every second but the current one."""
        return self._settled + [second.row() for second in self._open[:-1]]

    def take(self, record: RequestRecord) -> None:
        """Add one request when it has ended."""
        second = self._open[-1]
        self.outcomes[record.outcome] += 1
        second.counts["completed" if record.outcome == COMPLETED else "failed"] += 1
        second.counts["tokens"] += record.output_tokens
        self.output_tokens += record.output_tokens
        if record.outcome != COMPLETED:
            return
        samples = {name: [value] for name, value in request_metrics_ms(record).items()}
        samples |= {"itl": itl_per_token_ms(record), "itl_chunk": itl_per_chunk_ms(record)}
        for name, values in samples.items():
            for value in values:
                self.total[name].add(value)
                if name in _CHARTED:
                    second.histograms[name].add(value)

    def close_second(self) -> None:
        """Begin the next second. One that is long past becomes a row for good, for a test may last for hours."""
        self._open.append(_Second())
        if len(self._open) > _OPEN_SECONDS:
            self._settled.append(self._open.pop(0).row())
            self._first_open += 1

    def drain(self) -> dict[str, Any]:
        """What a worker tells the master since the last time, as plain types; its counts start again from zero."""
        said = {
            "outcomes": dict(self.outcomes),
            "tokens": self.output_tokens,
            "total": {name: dict(histogram.buckets) for name, histogram in self.total.items()},
            "first": self._first_open,
            "seconds": [second.said() for second in self._open],
        }
        now = self._first_open + len(self._open) - 1
        self.clear()
        self._first_open = now
        return said

    def merge(self, said: dict[str, Any]) -> None:
        """Add what a worker said. JSON and msgpack may have turned bucket numbers into text."""
        if not self.outcomes and not self.rows:
            self._first_open = said["first"]  # the first word since a reset in the middle of a test
        self.outcomes.update(said["outcomes"])
        self.output_tokens += said["tokens"]
        _merge_histograms(self.total, said["total"])
        for number, second in enumerate(said["seconds"], start=said["first"]):
            while number >= self._first_open + len(self._open):
                self.close_second()
            self._open[max(0, number - self._first_open)].merge(second)

    def figures(self) -> Document:
        """Everything that the page shows."""
        ended = ", ".join(f"{word} {count}" for word, count in self.outcomes.items())
        rows, table = self.rows, self.table()
        chart = partial(line_chart, range(len(rows)), "s", rows)
        return {
            "title": "Token charts",
            "facts": f"{ended}; {self.output_tokens:,} output tokens" if ended else "waiting for the first request",
            "tables": [{"title": "", "head": [*table[0]], "rows": [[*r.values()] for r in table]}] if table else [],
            "charts": [
                chart("Time to first token, ms", ("p50", BLUE, "ttft_p50"), ("p99", ORANGE, "ttft_p99")),
                chart("Inter-token latency, ms", ("p50", BLUE, "itl_p50"), ("p99", ORANGE, "itl_p99")),
                chart("Output tokens of ended requests, per second", ("tokens", GREEN, "tokens")),
                chart("Ended requests, per second", ("completed", GREEN, "completed"), ("failed", RED, "failed")),
            ],
        }

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
