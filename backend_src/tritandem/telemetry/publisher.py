"""Carries what a registry gathered to wherever metrics are shown, at a fixed pace, on its own thread.

Owns the thread and the pace. Knows nothing about Triton: a `MetricSink` does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from .registry import Change, Registry

_log = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Where changes go; may block for a process message per change."""

    def publish(self, changes: Sequence[Change]) -> None: ...

    def close(self) -> None:
        """Nothing is published afterwards."""


class DiscardingSink:
    """For a server whose metrics are switched off."""

    def publish(self, changes: Sequence[Change]) -> None:
        del changes

    def close(self) -> None: ...


class Publisher:
    """Publishes `registry` every `period_s` seconds until `close`, which publishes once more.

    `reports` run first in each period, on this thread: what is read rather than observed belongs there. `closing` runs
    once, when nothing more is reported.
    """

    def __init__(
        self,
        registry: Registry,
        sink: MetricSink,
        period_s: float = 2.0,
        reports: Sequence[Callable[[], None]] = (),
        closing: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._registry, self._sink = registry, sink
        self._period_s, self._reports, self._closing = period_s, tuple(reports), tuple(closing)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish what is left and end the thread; no message is sent after this returned."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._sink.close()
            for close in self._closing:
                close()

    def publish_once(self) -> None:
        """One period's work, on the calling thread."""
        for report in self._reports:
            try:
                report()
            except Exception:  # what one report cannot read must not hide what the others can
                _log.exception("a report for the metrics failed")
        self._sink.publish(self._registry.changes())

    def _run(self) -> None:
        while True:
            last = self._stopping.wait(self._period_s)
            try:
                self.publish_once()
            except Exception:
                _log.exception("metrics could not be published; trying again in %.0f s", self._period_s)
            if last:
                return
