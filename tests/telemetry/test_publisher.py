"""Claims about publishing and about reading the CPU's state."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tritandem.telemetry import families as f
from tritandem.telemetry.pressure import read_cpu
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
    publisher = Publisher(registry, sink, "engine", period_s=3600)
    publisher.start()
    registry.add(f.OUTPUT_TOKENS, 3)
    publisher.close()
    assert "tritandem_output_tokens_total" in sink.names
    assert "tritandem_process_cpu_seconds_total" in sink.names
    assert not [t for t in threading.enumerate() if t.name == "metrics-publisher"]
    assert sink.closed


def test_a_failing_sink_does_not_end_the_publishing() -> None:
    registry, sink = Registry(), Recorder(failures=2)
    publisher = Publisher(registry, sink, "engine", period_s=0.001)
    publisher.start()
    assert sink.arrived.wait(10)
    publisher.close()


def test_gauges_that_are_read_are_read_before_each_period() -> None:
    registry, sink = Registry(), Recorder()
    publisher = Publisher(registry, sink, "x", before=[lambda: registry.set(f.REQUESTS_WAITING, 4)])
    publisher.publish_once()
    assert "tritandem_requests_waiting" in sink.names


def test_reading_the_cpu_counts_the_work_of_this_process() -> None:
    before = read_cpu()
    sum(i * i for i in range(2_000_000))
    after = read_cpu()
    assert after.process_cpu_s > before.process_cpu_s
    assert after.resident_bytes > 1_000_000
    assert after.cores_allowed == len(os.sched_getaffinity(0))
    other = read_cpu(os.getpid())
    assert other.process_cpu_s > 0


def test_a_kernel_that_tells_nothing_reads_as_none(tmp_path: Path) -> None:
    reading = read_cpu(proc=tmp_path, cgroup=tmp_path)
    assert reading.run_queue_wait_s is None
    assert reading.pressure_s is None
    assert reading.throttled_s is None


def test_pressure_and_throttling_are_read_from_the_processes_own_cgroup(tmp_path: Path) -> None:
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text("3:cpu:/x\n0::/pod/7\n")
    folder = tmp_path / "cg" / "pod" / "7"
    folder.mkdir(parents=True)
    (folder / "cpu.pressure").write_text("some avg10=1.00 avg60=0 avg300=0 total=2500000\nfull avg10=0 total=7\n")
    (folder / "cpu.stat").write_text("usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000\n")
    reading = read_cpu(proc=tmp_path / "proc", cgroup=tmp_path / "cg")
    assert reading.pressure_s == 2.5
    assert reading.throttled_s == 1.5
