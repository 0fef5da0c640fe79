"""Claims about timing steps without a lock, and about what of it is published."""

from __future__ import annotations

import threading

import pytest
from tritandem.telemetry import families as f
from tritandem.telemetry.duration_counts import DurationCounts, LockedDurationCounts
from tritandem.telemetry.registry import Registry
from tritandem.telemetry.step_meter import StepMeter
from tritandem.telemetry.step_report import StepReport


def published(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(change.name, change.labels): change.value for change in registry.changes()}


def test_each_duration_falls_into_the_bucket_that_its_bound_names() -> None:
    counts = DurationCounts(f.DECODE_STEP, engine="e")
    for duration_ns in (1, 10_000, 10_001, 900_000_000):
        counts.note(duration_ns)
    by_bucket, total_s = counts.totals()
    assert by_bucket[:2] == [2, 1]  # up to 10 us, bound included; up to 20 us
    assert by_bucket[-1] == 1  # beyond the last bound
    assert sum(by_bucket) == 4
    assert total_s == pytest.approx(0.900020002)


def test_no_duration_is_lost_between_threads() -> None:
    counts = LockedDurationCounts(f.SEND)
    threads = [threading.Thread(target=lambda: [counts.note(7) for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(counts.totals()[0]), counts.totals()[1]) == (20_000, pytest.approx(140e-6))


def test_only_what_came_since_the_last_period_is_published() -> None:
    meter, registry = StepMeter("e"), Registry()
    report = StepReport(registry, meter, launches=True)
    labels = (("engine", "e"), ("phase", "decode"))
    for expected in (2.0, 1.0):
        for _ in range(int(expected)):
            meter.launched(300_000, prefills=False)
        report()
        found = published(registry)
        assert found["tritandem_cuda_kernel_launch_latency_seconds_count", labels] == expected
        assert found["tritandem_cuda_kernel_launch_latency_seconds_bucket", (*labels, ("le", "0.0005"))] == expected
        assert ("tritandem_cuda_kernel_launch_latency_seconds_bucket", (*labels, ("le", "0.0002"))) not in found
    report()
    assert published(registry) == {}


def test_launches_of_steps_that_prefill_are_kept_apart() -> None:
    meter, registry = StepMeter("e"), Registry()
    meter.launched(300_000, prefills=False)
    meter.launched(9_000_000, prefills=True)
    StepReport(registry, meter, launches=True)()
    sums = {labels[1]: value for (name, labels), value in published(registry).items() if name.endswith("_sum")}
    assert sums == {("phase", "decode"): pytest.approx(0.0003), ("phase", "prefill"): pytest.approx(0.009)}


def test_where_a_launch_is_the_step_itself_it_is_no_launch_latency() -> None:
    meter, registry = StepMeter("e"), Registry()
    meter.launched(300_000, prefills=False)
    meter.decode_step.note(300_000)
    StepReport(registry, meter, launches=False)()
    assert {name.removesuffix("_count") for name, _ in published(registry) if name.endswith("_count")} == {
        "tritandem_decode_step_seconds"
    }


def test_staged_bytes_are_counters_by_kind() -> None:
    meter, registry = StepMeter("e"), Registry()
    meter.staged_bytes = lambda: {"pinned": 4096, "zero_copy": 0}
    report = StepReport(registry, meter, launches=True)
    report()
    assert published(registry) == {
        ("tritandem_staging_bytes_total", (("engine", "e"), ("kind", "pinned"))): 4096.0,
        ("tritandem_staging_bytes_total", (("engine", "e"), ("kind", "zero_copy"))): 0.0,
    }
    report()
    assert published(registry) == {}
