"""One look at a server's /metrics: every series by name and labels, and what several say about the time between.

Knows nothing about what a metric means. `fetch` is the only thing here that does I/O.
"""

from __future__ import annotations

import http.client
import re
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tritandem.contracts.errors import ConfigError

TIMEOUT_S = 5.0  # of each wait for the server
WHOLE_TIMEOUT_S = 15.0
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Sample:
    """`at_s` is any clock that both samples of a pair share."""

    at_s: float
    series: Mapping[str, Sequence[Series]]

    def has(self, name: str) -> bool:
        return name in self.series

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series that carry these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(series.value for series in self.series.get(name, ()) if wanted <= series.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of a label."""
        sums: dict[str, float] = defaultdict(float)
        for series in self.series.get(name, ()):
            sums[series.labels[label]] += series.value
        return dict(sums)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples of one server, and looks in between at what comes and goes."""

    before: Sample
    after: Sample
    between: Sequence[Sample] = ()

    @property
    def seconds(self) -> float:
        return self.after.at_s - self.before.at_s

    def gained(self, name: str, **labels: str) -> float:
        """What a counter gained; from zero where the server restarted in between."""
        before, after = self.before.total(name, **labels), self.after.total(name, **labels)
        return after - before if after >= before else after

    def rate(self, name: str, **labels: str) -> float:
        """Per second."""
        return self.gained(name, **labels) / self.seconds

    def rates(self, name: str, label: str) -> dict[str, float]:
        """Per second, for each value of a label."""
        values = self.after.by(name, label)
        return {value: self.rate(name, **{label: value}) for value in values}

    def continued_rates(self, name: str, label: str) -> dict[str, float]:
        """As `rates`, of the series that both samples have: a total since a process's start is no gain."""
        gains: dict[str, float] = defaultdict(float)
        known = {frozenset(series.labels.items()): series.value for series in self.before.series.get(name, ())}
        for series in self.after.series.get(name, ()):
            before = known.get(frozenset(series.labels.items()))
            if before is not None:
                gains[series.labels[label]] += max(0.0, series.value - before) / self.seconds
        return dict(gains)

    def mean(self, histogram: str, **labels: str) -> float | None:
        """The mean of what was observed in between; None without an observation."""
        count = self.gained(f"{histogram}_count", **labels)
        return self.gained(f"{histogram}_sum", **labels) / count if count else None

    def mostly(self, gauge: str, **labels: str) -> float:
        """What a gauge was in half of the looks at least; with two of them, in both."""
        looks = (self.before, *self.between, self.after)
        return statistics.median_low(sample.total(gauge, **labels) for sample in looks)

    def average(self, gauge: str) -> float | None:
        """The mean over both ends and all series; None where there is none."""
        values = [series.value for sample in (self.before, self.after) for series in sample.series.get(gauge, ())]
        return sum(values) / len(values) if values else None


def parse(text: str, at_s: float) -> Sample:
    """Prometheus's text format. Raises ValueError for anything else, or IndexError: its parser looks beyond the end."""
    from prometheus_client.parser import text_string_to_metric_families

    written = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    series: dict[str, list[Series]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            # The parser adds _total to every counter without it: our histograms are counters, some of Triton's as well.
            shorter = one.name.removesuffix("_total")
            name = shorter if shorter in written and one.name not in written else one.name
            series[name].append(Series(one.labels, one.value))
    return Sample(at_s, dict(series))


def metrics_url(given: str) -> str:
    """`host:port`, a server's address or the full URL -> the full URL. Raises ConfigError."""
    url = given if "://" in given else f"http://{given}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not match
        good = False
    if not good or re.search(r"\s", url):
        raise ConfigError(f"--url: given {given!r}, allowed: host:port or an http(s) URL of the metrics port")
    return url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"


def fetch(url: str) -> Sample:
    """Raises ConfigError where nobody answers, or not with the metrics of a Tritandem server."""
    try:
        sample = parse(_read(url), time.monotonic())
    except UnicodeDecodeError:
        raise _refusal(url, "the answer is not text") from None
    except http.client.BadStatusLine as error:
        silent = isinstance(error, http.client.RemoteDisconnected)
        raise _refusal(url, "it hung up" if silent else "it does not speak HTTP") from error
    except (OSError, ValueError, IndexError, http.client.HTTPException) as error:  # IndexError: half a line of metrics
        raise _refusal(url, str(getattr(error, "reason", error)) or type(error).__name__) from error
    if not any(name.startswith("tritandem_") for name in sample.series):
        raise ConfigError(
            f"{url}: Triton's metrics without any tritandem_*; is telemetry.metrics off, or is it another server?"
        )
    return sample


def _read(url: str) -> str:
    """Raises OSError, HTTPException, or ValueError for an answer that does not end."""
    parts, length, end_s = [], 0, time.monotonic() + WHOLE_TIMEOUT_S
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        while part := response.read1(1 << 16):
            parts.append(part)
            length += len(part)
            if length > MOST_BYTES or time.monotonic() > end_s:
                raise ValueError(f"the answer is too large or too slow; gave up after {length} bytes")
    return b"".join(parts).decode()


def _refusal(url: str, reason: str) -> ConfigError:
    return ConfigError(f"{url}: no metrics ({reason}); --url takes the metrics port of a running server")
