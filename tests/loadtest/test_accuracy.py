"""What the report says is what the engine did: percentiles against injected times, and no coordinated omission.

Engine and load generator are processes of one host and stamp on its monotonic clock. The truth is computed from when
requests were due and when the engine sent each token, so a late timer of the engine is no error of the report. What
is left is the generator's own delay, and a host without a free core adds to that. So engine and generator go first on
the host where the test may ask for it. Elsewhere the kernel says when they had to wait (`HostWatch`): such a run is
repeated, and a host that is never free is held to what no host can bend.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tritandem_loadtest import Report, RunConfig, run
from tritandem_loadtest.metrics import PERCENTILES, percentile

from tests.fakes.timed_engine import Plan

Engine = dict[str, str]
TOKENS = 12
ATTEMPTS = 4
Samples = dict[str, list[float]]  # metric -> milliseconds


def loaded(url: str, rps: float, duration_s: float, **more: object) -> Report:
    settings = {"output_tokens": str(TOKENS), "duration_s": duration_s, "timeout_s": 20.0, **more}
    return run(RunConfig(url=url, rps=rps, **settings))  # type: ignore[arg-type]


class LoggedEngine:
    """An engine that writes down its sends. Runs against it one after the other: `run` returns report and truth."""

    def __init__(self, url: str, log: Path) -> None:
        self._url, self._log, self._read = url, log, 0

    def run(self, rps: float, duration_s: float, **more: object) -> tuple[Report, Samples]:
        report = loaded(self._url, rps, duration_s, **more)
        lines = self._log.read_text().splitlines()[self._read :]
        self._read += len(lines)
        sent_ns = {entry["index"]: entry["sent_ns"] for entry in map(json.loads, lines)}
        assert len(lines) == len(sent_ns) == len(report.records)
        return report, self._truth({record.index: record.intended_ns for record in report.records}, sent_ns)

    @staticmethod
    def _truth(due_ns: dict[int, int], sent_ns: dict[int, list[int]]) -> Samples:
        gaps = {i: [(b - a) / 1e6 for a, b in pairwise(sends)] for i, sends in sent_ns.items()}
        every_gap = [gap for of_request in gaps.values() for gap in of_request]
        return {
            "ttft": [(sends[0] - due_ns[i]) / 1e6 for i, sends in sent_ns.items()],
            "e2e": [(sends[-1] - due_ns[i]) / 1e6 for i, sends in sent_ns.items()],
            "second_token": [of_request[0] for of_request in gaps.values()],
            "tpot": [sum(of_request) / len(of_request) for of_request in gaps.values()],
            "itl": every_gap,
            "itl_chunk": every_gap,
        }


@pytest.fixture
def ahead_of_others() -> Iterator[None]:
    """This process, and those it starts meanwhile, run before all ordinary ones, if it has the right to say so."""
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield
        return
    yield
    os.sched_setscheduler(0, before, parameters)


@pytest.fixture
def start_logged(
    ahead_of_others: None, start_engine: Callable[[Plan], Engine], tmp_path: Path
) -> Callable[..., LoggedEngine]:
    def start(**plan: float) -> LoggedEngine:
        log = tmp_path / "sends.jsonl"
        return LoggedEngine(start_engine(Plan(log=str(log), **plan))["raw_grpc"], log)  # type: ignore[arg-type]

    return start


class HostWatch:
    """Did this process's children have to wait for a core? Reads, every 5 ms, how long the kernel let them wait.

    `disturbed`: they waited a tenth of the time, or 10 ms at once, or so long did this thread, which only sleeps, not
    wake. A host with a free core stays well below that.
    """

    def __enter__(self) -> HostWatch:
        self._stop = threading.Event()
        self._waited_ms, self._woke_late_ms = [0.0], [0.0]
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._lasted_ms = (time.monotonic() - self._began) * 1e3

    @property
    def disturbed(self) -> bool:
        return sum(self._waited_ms) > 0.1 * self._lasted_ms or max(*self._waited_ms, *self._woke_late_ms) > 10.0

    def __str__(self) -> str:
        waited, longest = sum(self._waited_ms), max(*self._waited_ms, *self._woke_late_ms)
        return f"processes waited for a core for {waited:.0f} of {self._lasted_ms:.0f} ms, {longest:.1f} ms at once"

    def _watch(self) -> None:
        before, slept_from = self._waits_ns(), time.monotonic()
        while not self._stop.wait(0.005):
            self._woke_late_ms.append((time.monotonic() - slept_from - 0.005) * 1e3)
            now = self._waits_ns()
            self._waited_ms += [(now[pid] - before[pid]) / 1e6 for pid in now.keys() & before.keys()]
            before, slept_from = now, time.monotonic()

    @staticmethod
    def _waits_ns() -> dict[str, int]:
        """Child -> time its main thread, which runs its event loop, was ready to run but did not."""
        waits = {}
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                waits[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
        return waits


def errors(report: Report, truth: Samples) -> list[str]:
    """Every percentile that is more than 2 ms and 2 % off the truth, and an invalid run."""
    found = [f"invalid: {reason}" for reason in report.reasons]
    for name, samples in truth.items():
        for p in PERCENTILES:
            reported, expected = report.summary[f"{name}_ms_p{p}"], percentile(sorted(samples), p)
            if abs(reported - expected) > max(2.0, 0.02 * expected):
                found.append(f"{name} p{p}: reported {reported:.2f} ms, true {expected:.2f} ms")
    # The plan itself predicts the medians, whatever the stamps say; the engine's timers tick in milliseconds.
    plan, timer_ms = Plan(), 1.5
    off_ms = {
        "ttft": [(r.arrived_ns[0] - r.intended_ns) / 1e6 - plan.ttft(r.index) for r in report.records],
        "tpot": [(r.arrived_ns[-1] - r.arrived_ns[0]) / 1e6 / (TOKENS - 1) - plan.gap(r.index) for r in report.records],
    }
    for name, values in off_ms.items():
        median = percentile(sorted(values), 50)
        if abs(median) > 2.0 + timer_ms:
            found.append(f"{name}: half the requests are {median:.2f} ms off the plan")
    return found


def understated(report: Report, truth: Samples) -> list[str]:
    """Percentiles below the truth: no host, however busy, lets a token arrive before it was sent."""
    return [
        f"{name} p{p}: reported {report.summary[f'{name}_ms_p{p}']:.2f} ms, true {expected:.2f} ms"
        for name in ("ttft", "e2e")
        for p in PERCENTILES
        if report.summary[f"{name}_ms_p{p}"] < (expected := percentile(sorted(truth[name]), p)) - 0.01
    ]


@pytest.mark.parametrize(("rps", "duration_s"), [(8, 3.0), (50, 2.0), (200, 1.5)])
def test_every_percentile_is_the_injected_one(
    start_logged: Callable[..., LoggedEngine], rps: float, duration_s: float
) -> None:
    engine = start_logged()
    for _ in range(ATTEMPTS):
        with HostWatch() as host:
            report, truth = engine.run(rps, duration_s)
        assert report.summary["completed"] == report.summary["requests"] == int(rps * duration_s)
        assert not understated(report, truth)
        wrong = errors(report, truth)
        if not wrong:
            return
        assert host.disturbed, f"at {rps}/s, {host}: {wrong}"


def test_a_stall_of_three_seconds_is_in_the_tail(start_logged: Callable[..., LoggedEngine]) -> None:
    engine = start_logged(ttft_spread_ms=0, gap_ms=1, gap_spread_ms=0, stall_after_s=1.0, stall_s=3.0)
    report, truth = engine.run(50, 5.0, output_tokens="2")
    true_p99_ms = percentile(sorted(truth["ttft"]), 99)
    assert true_p99_ms > 2800
    assert report.summary["ttft_ms_p99"] == pytest.approx(true_p99_ms, rel=0.02)
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
