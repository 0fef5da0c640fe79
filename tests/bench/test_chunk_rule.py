"""Claims about the rule for prefill chunks, and about the simulation that shows them."""

from __future__ import annotations

import argparse

import pytest
from tritandem_bench.chunk_rule import Load, measure, read_loads
from tritandem_bench.step_costs import Clock, TimedRunner, decode_ms


def test_loads_are_read() -> None:
    assert read_loads("300/128x64,2000/128@8") == [Load(300, 128, streams=64), Load(2000, 128, rate=8.0)]


@pytest.mark.parametrize("text", ["", "300x64", "300/128", "300/128x", "300/128@x"])
def test_other_loads_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="WORDS/TOKENSxSTREAMS"):
        read_loads(text)


@pytest.mark.parametrize(("rows", "measured_ms"), [(1, 4.07), (32, 5.10), (64, 5.73), (128, 7.35), (256, 11.48)])
def test_decode_steps_take_what_was_measured(rows: int, measured_ms: float) -> None:
    assert decode_ms(rows, rows * 576) == pytest.approx(measured_ms, rel=0.08)


def test_chunks_that_cost_least_are_small_beside_few_rows_and_large_beside_many() -> None:
    efficient = dict(TimedRunner(256, Clock()).spec.efficient_prefill_tokens)
    assert efficient[64] <= 320
    assert efficient[256] >= 512


def test_the_simulation_gives_the_measured_figures_of_64_streams() -> None:
    """7,169 tokens/s and 54 ms through Triton on an H200."""
    row = measure(Load(300, 128, streams=64), seconds=8, warmup_s=3)
    assert row["tokens_per_s"] == pytest.approx(7169, rel=0.1)
    assert 30 < row["ttft_ms_p50"] < 110


def test_the_second_wave_of_a_closed_loop_does_not_starve_and_nobody_pauses_for_it() -> None:
    """Streams that began together end together, after a while in which no prompt was prefilled."""
    row = measure(Load(300, 500, streams=256), seconds=14, warmup_s=3)
    assert row["requests"] >= 200
    assert row["ttft_ms_p50"] < 300
    assert row["pause_ms_max"] < 150
