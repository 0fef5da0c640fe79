"""What the report says is what the engine did: percentiles against injected times, and no coordinated omission."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from fakes.timed_engine import Plan
from tritandem_loadtest import Report, RunConfig, run
from tritandem_loadtest.metrics import PERCENTILES, percentile

Engine = dict[str, str]
TOKENS = 12


def loaded(url: str, rps: float, duration_s: float, **more: object) -> Report:
    settings = {"output_tokens": str(TOKENS), "duration_s": duration_s, "timeout_s": 20.0, **more}
    return run(RunConfig(url=url, rps=rps, **settings))  # type: ignore[arg-type]


def assert_close(reported: float, injected: float, what: str, timer_ms: float = 0.0) -> None:
    allowed = max(2.0, 0.02 * injected) + timer_ms
    assert abs(reported - injected) <= allowed, f"{what}: reported {reported:.2f} ms, injected {injected:.2f} ms"


class HostProbe:
    """A thread of the test that sleeps 5 ms again and again: when its own wake-ups are late, so are everybody's."""

    def __enter__(self) -> HostProbe:
        self._stop = threading.Event()
        self._late_ms: list[float] = []
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._stop.wait(0.005):
            now = time.monotonic()
            self._late_ms.append((now - began - 0.005) * 1e3)
            began = now

    def skip_if_busy(self) -> None:
        late_ms = percentile(sorted(self._late_ms), 99)
        if late_ms > 1.0:
            pytest.skip(f"no core is free on this host: a sleeping thread woke {late_ms:.1f} ms late (p99)")


@pytest.mark.parametrize(("rps", "duration_s"), [(8, 3.0), (50, 2.0), (200, 1.5)])
def test_every_percentile_is_the_injected_one(engine: Engine, rps: float, duration_s: float) -> None:
    with HostProbe() as host:
        report = loaded(engine["raw_grpc"], rps, duration_s)
    assert report.summary["completed"] == report.summary["requests"] == int(rps * duration_s)
    host.skip_if_busy()
    assert report.valid, report.reasons
    # The engine's stamps say when its timers really fired: `prefill` is receipt to first token, `decode` first to last.
    ttft = sorted(r.server["prefill"] for r in report.records)
    e2e = sorted(r.server["prefill"] + r.server["decode"] for r in report.records)
    tpot = sorted(r.server["decode"] / (TOKENS - 1) for r in report.records)
    for p in PERCENTILES:
        for name, injected in (("ttft", ttft), ("e2e", e2e), ("tpot", tpot)):
            assert_close(report.summary[f"{name}_ms_p{p}"], percentile(injected, p), f"{name} p{p} at {rps}/s")
    # Independent of the stamps, the plan predicts the medians; the engine's timers have a granularity of a millisecond.
    plan, numbers = Plan(), range(len(report.records))
    ttft_p50, gap_p50 = (percentile(sorted(map(of, numbers)), 50) for of in (plan.ttft, plan.gap))
    assert_close(report.summary["ttft_ms_p50"], ttft_p50, "ttft p50", timer_ms=1.5)
    assert_close(report.summary["itl_ms_p50"], gap_p50, "itl p50", timer_ms=1.5)
    assert_close(report.summary["second_token_ms_p50"], gap_p50, "second token p50", timer_ms=1.5)


def test_a_stall_of_three_seconds_is_in_the_tail(start_engine: Callable[[Plan], Engine]) -> None:
    urls = start_engine(Plan(ttft_spread_ms=0, gap_ms=1, gap_spread_ms=0, stall_after_s=1.0, stall_s=3.0))
    report = loaded(urls["raw_grpc"], 50, 5.0, output_tokens="2")
    assert 2800 <= report.summary["ttft_ms_p99"] <= 3300
    # Requests that were due while the server stood still waited for the rest of the stall, each counted in full.
    waited = [r for r in report.records if r.arrived_ns[0] - r.intended_ns > 500e6]
    assert len(waited) == pytest.approx(50 * 2.5, abs=10)


def test_too_few_users_make_the_run_invalid_with_that_reason(engine: Engine) -> None:
    report = loaded(engine["raw_grpc"], 30, 1.0, users=2)
    assert not report.valid
    assert "too few users" in report.reasons[0]
    assert report.summary["missed_schedule_rate"] > 0.5
    # The late ones count from when they were due: the queue in front of the two users is in the figures.
    assert report.summary["e2e_ms_max"] > 1000
