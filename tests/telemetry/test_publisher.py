"""Claims about publishing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
from tritandem.telemetry import families as f
from tritandem.telemetry.process_report import ProcessReport
from tritandem.telemetry.publisher import Publisher
from tritandem.telemetry.registry import Change, Registry


class Recorder:
    def __init__(self, failures: int = 0) -> None:
        self.names: list[str] = []
        self.failures = failures
        self.closed = False
        self.arrived = threading.Event()

    def publish(self, changes: Sequence[Change]) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the pipe is broken")
        self.names += [change.name for change in changes]
        self.arrived.set()

    def close(self) -> None:
        self.closed = True


def test_closing_publishes_what_is_left_and_ends_the_thread() -> None:
    registry, sink = Registry(), Recorder()
    publisher = Publisher(registry, sink, period_s=3600, reports=[ProcessReport(registry, "engine", "engine")])
    publisher.start()
    registry.add(f.OUTPUT_TOKENS, 3)
    publisher.close()
    assert "tritandem_output_tokens_total" in sink.names
    assert "tritandem_process_cpu_seconds_total" in sink.names
    assert not [t for t in threading.enumerate() if t.name == "metrics-publisher"]
    assert sink.closed


def test_a_failing_sink_does_not_end_the_publishing() -> None:
    registry, sink = Registry(), Recorder(failures=2)
    publisher = Publisher(registry, sink, period_s=0.001, reports=[lambda: registry.add(f.OUTPUT_TOKENS)])
    publisher.start()
    assert sink.arrived.wait(10)
    publisher.close()


def test_gauges_that_are_read_are_read_before_each_period() -> None:
    registry, sink = Registry(), Recorder()
    publisher = Publisher(registry, sink, reports=[lambda: registry.set(f.REQUESTS_WAITING, 4)])
    publisher.publish_once()
    assert "tritandem_requests_waiting" in sink.names


def test_a_report_that_fails_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise PermissionError("/proc/1/fd")

    registry, sink = Registry(), Recorder()
    with caplog.at_level(logging.ERROR):
        Publisher(registry, sink, reports=[broken, lambda: registry.set(f.REQUESTS_WAITING, 4)]).publish_once()
    assert sink.names == ["tritandem_requests_waiting"]
    assert "/proc/1/fd" in caplog.text
