"""Arrival processes: exact, deterministic by seed, and nothing that a server does can move them."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritandem_loadtest.arrivals import constant, ramp, read_trace, schedule, steps
from tritandem_loadtest.config import LoadTestError, RunConfig


def times(config: RunConfig) -> list[float]:
    return [arrival.at_s for arrival in schedule(config)]


def gaps(at_s: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(at_s)]


@given(st.floats(0.01, 1000), st.floats(0.1, 30))
def test_a_constant_rate_sends_every_request_that_is_due_before_the_end(rps: float, duration_s: float) -> None:
    at_s = list(constant(rps, duration_s))
    assert at_s[0] == 0.0
    assert at_s[-1] < duration_s
    assert len(at_s) / rps >= duration_s * (1 - 1e-9)


@pytest.mark.parametrize(("arrival", "cv"), [("poisson", 1.0), ("gamma", 2.0), ("gamma", 0.3)])
def test_random_gaps_have_the_asked_mean_and_spread(arrival: str, cv: float) -> None:
    between = gaps(times(RunConfig(arrival=arrival, burstiness=cv, rps=50, duration_s=400)))
    assert statistics.mean(between) == pytest.approx(1 / 50, rel=0.06)
    assert statistics.stdev(between) / statistics.mean(between) == pytest.approx(cv, rel=0.06)


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    config = RunConfig(arrival="poisson", rps=20, duration_s=10, seed=3)
    assert times(config) == times(config)
    assert times(config) != times(replace(config, seed=4))


def test_a_ramp_follows_the_integral_of_its_rate() -> None:
    at_s = list(ramp(2.0, 10.0, 10.0))
    # 2 t + 0.4 t^2 requests until t: 20 in the first five seconds, 60 in all.
    assert sum(1 for t in at_s if t < 5.0) == 20
    assert len(at_s) == 60
    assert all(b < a for a, b in pairwise(gaps(at_s)))


def test_a_falling_ramp_ends_when_its_rate_reaches_zero() -> None:
    assert len(list(ramp(10.0, 0.0, 10.0))) == 50


def test_steps_give_each_rate_an_equal_part_and_zero_is_a_pause() -> None:
    at_s = list(steps((2.0, 0.0, 8.0), 9.0))
    assert [sum(1 for t in at_s if lo <= t < lo + 3) for lo in (0, 3, 6)] == [6, 0, 24]


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_together_are_the_whole_schedule(shards: int) -> None:
    config = RunConfig(arrival="gamma", rps=30, duration_s=5)
    whole = list(schedule(config))
    parts = [arrival for shard in range(shards) for arrival in schedule(config, shard, shards)]
    assert sorted(parts, key=lambda a: a.index) == whole


def test_max_requests_ends_the_schedule_over_all_shards() -> None:
    config = RunConfig(rps=100, duration_s=10, max_requests=7)
    assert sum(1 for shard in range(3) for _ in schedule(config, shard, 3)) == 7


def test_a_trace_replays_times_and_lengths_from_csv_and_jsonl(tmp_path: Path) -> None:
    table = tmp_path / "trace.csv"
    table.write_text("time,prompt_tokens,output_tokens\n12.5,100,20\n10.0,50,\n")
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"time": 12.5, "prompt_tokens": 100, "output_tokens": 20}\n{"time": 10.0, "prompt_tokens": 50}\n')
    for path in (table, lines):
        first, second = read_trace(path)
        assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 50, None)
        assert (second.at_s, second.prompt_tokens, second.output_tokens) == (2.5, 100, 20)


def test_a_broken_trace_names_the_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time,prompt_tokens\n1.0,5\nsoon,5\n")
    with pytest.raises(LoadTestError, match="record 2"):
        read_trace(path)
