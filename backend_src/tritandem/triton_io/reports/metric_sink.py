"""Publishes metric changes as Triton's custom metrics, which appear on the server's own /metrics.

Owns the mapping from a series to its Triton objects. Called from the publisher's thread only: every change
costs a process message, so it must never run in a token path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from ...telemetry.families import Kind
from ...telemetry.registry import Change, Labels


class TritonMetricSink:
    """Creates families and series when they first change."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[str, Labels], Any] = {}

    def publish(self, changes: Sequence[Change]) -> None:
        for change in changes:
            series = self._series_of(change)
            if change.kind is Kind.COUNTER:
                series.increment(change.value)
            else:
                series.set(change.value)

    def close(self) -> None:
        """Give the objects back while the stub still can: freed with the interpreter, they crash its exit."""
        self._series.clear()
        self._families.clear()

    def _series_of(self, change: Change) -> Any:
        key = (change.name, change.labels)
        if key not in self._series:
            family = self._families.get(change.name)
            if family is None:
                kind = pb_utils.MetricFamily.COUNTER if change.kind is Kind.COUNTER else pb_utils.MetricFamily.GAUGE
                family = pb_utils.MetricFamily(name=change.name, description=change.help, kind=kind)
                self._families[change.name] = family
            self._series[key] = family.Metric(labels=dict(change.labels))
        return self._series[key]
