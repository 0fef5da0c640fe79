"""What the report says is what the engine did: percentiles against injected times, and no coordinated omission."""

from __future__ import annotations

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


def assert_close(reported: float, injected: float, what: str) -> None:
    allowed = max(2.0, 0.02 * injected)
    assert abs(reported - injected) <= allowed, f"{what}: reported {reported:.2f} ms, injected {injected:.2f} ms"


def skip_if_the_host_is_too_busy(report: Report) -> None:
    """The engine's own timers are the measure: they fire within 1 ms on a host that has a core left for them."""
    plan = Plan()
    late_ms = percentile(sorted(r.server["prefill"] - plan.ttft(r.index) for r in report.records), 90)
    if late_ms > 2.0:
        pytest.skip(f"no core is free here: one in ten of the engine's own timers fired {late_ms:.1f} ms late or more")


@pytest.mark.parametrize(("rps", "duration_s"), [(8, 4.0), (50, 3.0), (200, 2.0)])
def test_every_percentile_is_the_injected_one(engine: Engine, rps: float, duration_s: float) -> None:
    report = loaded(engine["raw_grpc"], rps, duration_s)
    assert report.summary["completed"] == report.summary["requests"] == int(rps * duration_s)
    skip_if_the_host_is_too_busy(report)
    assert report.valid, report.reasons
    # The engine's stamps say when its timers really fired: `prefill` is receipt to first token, `decode` first to last.
    ttft = sorted(r.server["prefill"] for r in report.records)
    e2e = sorted(r.server["prefill"] + r.server["decode"] for r in report.records)
    tpot = sorted(r.server["decode"] / (TOKENS - 1) for r in report.records)
    for p in PERCENTILES:
        for name, injected in (("ttft", ttft), ("e2e", e2e), ("tpot", tpot)):
            assert_close(report.summary[f"{name}_ms_p{p}"], percentile(injected, p), f"{name} p{p} at {rps}/s")
    # Independent of the stamps: the plan alone predicts the medians.
    plan, numbers = Plan(), range(len(report.records))
    gap_p50 = percentile(sorted(map(plan.gap, numbers)), 50)
    assert_close(report.summary["ttft_ms_p50"], percentile(sorted(map(plan.ttft, numbers)), 50), "ttft p50")
    assert_close(report.summary["itl_ms_p50"], gap_p50, "itl p50")
    assert_close(report.summary["second_token_ms_p50"], gap_p50, "second token p50")


def test_a_stall_of_three_seconds_is_in_the_tail(start_engine: Callable[[Plan], Engine]) -> None:
    urls = start_engine(Plan(ttft_spread_ms=0, gap_ms=1, gap_spread_ms=0, stall_after_s=1.0, stall_s=3.0))
    report = loaded(urls["raw_grpc"], 50, 5.0, output_tokens="2")
    assert 2800 <= report.summary["ttft_ms_p99"] <= 3300
    # Requests that were due while the server stood still waited for the rest of the stall, each counted in full.
    waited = [r for r in report.records if r.arrived_ns[0] - r.intended_ns > 500e6]
    assert len(waited) == pytest.approx(50 * 2.5, abs=10)


def test_too_few_users_make_the_run_invalid_with_that_reason(engine: Engine) -> None:
    report = loaded(engine["raw_grpc"], 40, 2.0, users=2)
    assert not report.valid
    assert "too few users" in report.reasons[0]
    assert report.summary["missed_schedule_rate"] > 0.5
    # The late ones count from when they were due: the queue in front of the two users is in the figures.
    assert report.summary["e2e_ms_max"] > 1000
