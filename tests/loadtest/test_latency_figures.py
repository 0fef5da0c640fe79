"""Figures from stamps, on records whose right answer can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritandem_loadtest.config import LoadTestError, RunConfig, parse_slo
from tritandem_loadtest.metrics import itl_per_token_ms, percentile, request_metrics_ms, server_stages, summarise
from tritandem_loadtest.series import per_second
from tritandem_loadtest.stamps import ProcessRecord, RequestRecord, as_line, outcome_of, read_lines

MS = 1_000_000
SECOND = 1000 * MS


def record(index: int, intended_ms: int, arrivals: list[tuple[int, int]], **more: object) -> RequestRecord:
    """`arrivals`: (ms after the intended time, tokens). Sent 2 ms late, ended 1 ms after the last token."""
    intended_ns = intended_ms * MS
    arrived_ns = [intended_ns + after * MS for after, _ in arrivals]
    values = {
        "sent_ns": intended_ns + 2 * MS,
        "end_ns": (arrived_ns or [intended_ns])[-1] + MS,
        "arrived_ns": arrived_ns,
        "tokens": [tokens for _, tokens in arrivals],
        **more,
    }
    return RequestRecord(index, intended_ns, **values)  # type: ignore[arg-type]


def summary_of(records: list[RequestRecord], unsent: int = 0, cpu: float = 10.0, **config: object) -> dict[str, object]:
    process = ProcessRecord(0, 0, 20 * SECOND, cpu_percent=[cpu], users=4, unsent=unsent)
    return summarise(RunConfig(rps=10, duration_s=10.0, **config), records, [process])  # type: ignore[arg-type]


def test_latency_counts_from_the_intended_time_not_from_sending() -> None:
    late = record(0, 0, [(500, 1), (520, 1)], sent_ns=400 * MS)
    assert request_metrics_ms(late) == {"ttft": 500.0, "e2e": 521.0, "second_token": 20.0, "pause": 20.0, "tpot": 20.0}


def test_tokens_that_arrive_together_share_the_gap_before_them() -> None:
    chunked = record(0, 0, [(100, 1), (160, 3), (180, 1)])
    assert itl_per_token_ms(chunked) == [20.0, 20.0, 20.0, 20.0]
    assert request_metrics_ms(chunked)["tpot"] == 20.0
    assert request_metrics_ms(chunked)["second_token"] == 60.0


def test_a_second_token_in_the_first_response_took_no_time() -> None:
    assert request_metrics_ms(record(0, 0, [(100, 2), (140, 2)]))["second_token"] == 0.0


def test_one_token_has_neither_gaps_nor_time_per_token() -> None:
    assert request_metrics_ms(record(0, 0, [(100, 1)])) == {"ttft": 100.0, "e2e": 101.0}


def test_the_longest_pause_of_each_stream_shows_the_stutter_that_a_mean_hides() -> None:
    smooth = [record(i, i * 100, [(50 + 10 * k, 1) for k in range(11)]) for i in range(98)]
    stutters = [record(98 + i, 9800 + i * 100, [(50, 1), (55, 5), (945, 5), (950, 1)]) for i in range(2)]
    summary = summary_of([*smooth, *stutters])
    assert (summary["pause_ms_p50"], summary["pause_ms_p99"], summary["pause_ms_max"]) == (10.0, 890.0, 890.0)
    assert summary["pause_samples"] == 100  # one a stream
    assert summary["itl_ms_mean"] < 27.0
    assert summary["itl_chunk_ms_p99"] == 10.0  # of 986 gaps two are long
    assert "pause" not in request_metrics_ms(record(0, 0, [(100, 3)]))  # one response has no gap
    assert summary_of(stutters, slo={"pause": 500.0})["slo_met"] is False


def test_what_the_servers_processes_do_not_know_of_is_outside() -> None:
    told = record(0, 1000, [(50, 1), (107, 1)], server={"whole": 80.0})  # sent 2 ms late, ended after 108 ms
    untold = record(1, 1000, [(50, 1)])
    assert server_stages([told, untold])["outside"]["p50"] == 26.0


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50.0, 90.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0


def test_failures_are_counted_by_outcome_and_stay_out_of_latencies() -> None:
    good = [record(i, i * 100, [(50, 1), (60, 1)], input_tokens=30) for i in range(96)]
    bad = [record(96 + i, 9600, [], outcome="EXPIRED", error="EXPIRED: late") for i in range(3)]
    summary = summary_of([*good, *bad, record(99, 9900, [], outcome="TIMEOUT", error="no end")])
    assert summary["failures"] == {"EXPIRED": 3, "TIMEOUT": 1}
    assert (summary["requests"], summary["completed"], summary["failed"]) == (100, 96, 4)
    assert summary["ttft_ms_max"] == 50.0
    assert (summary["ttft_samples"], summary["itl_samples"]) == (96, 96)
    assert summary["output_tokens_per_s"] == pytest.approx(96 * 2 / 10)
    assert summary["total_tokens_per_s"] == pytest.approx(96 * 32 / 10)


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    fast = [record(i, i * 100, [(50, 1), (60, 1)]) for i in range(60)]
    slow_start = [record(60 + i, 6000 + i * 100, [(900, 1), (910, 1)]) for i in range(30)]
    slow_gaps = [record(90 + i, 9000 + i * 100, [(50, 1), (450, 1)]) for i in range(10)]
    summary = summary_of([*fast, *slow_start, *slow_gaps], slo={"ttft": 500.0, "itl": 50.0}, slo_percentile=90.0)
    assert summary["goodput_rps"] == 6.0
    assert summary["slo"]["ttft"]["met"] is False  # type: ignore[index]
    assert summary["slo"]["itl"]["met"] is True  # type: ignore[index]
    assert summary["slo_met"] is False


@pytest.mark.parametrize(
    ("late", "unsent", "cpu", "reason"),
    [(1, 0, 10.0, None), (2, 0, 10.0, "no CPU left"), (0, 5, 10.0, "too few users"), (2, 5, 97.0, "CPU reached 97")],
)
def test_a_missed_schedule_above_one_per_cent_makes_the_run_invalid(
    late: int, unsent: int, cpu: float, reason: str | None
) -> None:
    records = [record(i, i * 100, [(50, 1)]) for i in range(100 - unsent)]
    for i in range(late):
        records[i].sent_ns = records[i].intended_ns + 30 * MS
    summary = summary_of(records, unsent=unsent, cpu=cpu)
    assert summary["missed_schedule_rate"] == pytest.approx((late + unsent) / 100)
    assert summary["valid"] is (reason is None)
    assert reason is None or reason in summary["reasons"][0]  # type: ignore[index]


@pytest.mark.parametrize(("late", "unsent", "valid"), [(1, 0, True), (2, 0, False), (0, 1, False), (1, 1, False)])
def test_a_run_too_short_to_resolve_the_limit_may_have_one_late_request(late: int, unsent: int, valid: bool) -> None:
    records = [record(i, i * 500, [(50, 1)]) for i in range(20 - unsent)]
    for i in range(late):
        records[i].sent_ns = records[i].intended_ns + (30 + i) * MS
    summary = summary_of(records, unsent=unsent)
    assert summary["valid"] is valid
    assert summary["missed_schedule_rate"] == pytest.approx((late + unsent) / 20)  # shown either way
    if late == 2:
        assert "the latest request by 31 ms" in summary["reasons"][0]  # type: ignore[index]


def test_warm_up_requests_are_sent_but_not_counted_while_their_tokens_are() -> None:
    early = record(0, 500, [(100, 1), (1000, 5)])  # five tokens at 1.5 s
    summary = summary_of([early, record(1, 2000, [(100, 1)])], warmup_s=1.0)
    assert summary["completed"] == 1
    assert summary["output_tokens_per_s"] == pytest.approx(6 / 9, abs=0.01)


def test_seconds_of_the_series_add_up_to_the_run() -> None:
    records = [record(i, i * 250, [(100, 1), (1100, 2)]) for i in range(12)]
    rows = per_second(records, 0)
    assert sum(row["sent"] for row in rows) == sum(row["completed"] for row in rows) == 12
    assert sum(row["output_tokens"] for row in rows) == 36
    assert [row["due"] for row in rows] == [4.0, 4.0, 4.0, 0.0]
    assert rows[0]["in_flight"] == 4.0
    assert rows[0]["ttft_ms_p50"] == 100.0


def test_raw_records_survive_the_file(tmp_path: Path) -> None:
    records = [record(3, 10, [(5, 2)], server={"queue": 1.5}), ProcessRecord(0, 1, 2, [3.0], 4, 5)]
    (tmp_path / "stamps.jsonl").write_text("".join(map(as_line, records)))
    assert list(read_lines(tmp_path / "stamps.jsonl")) == records


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("EXPIRED: too late", "EXPIRED"),
        ("in ensemble 'ensemble', REJECTED_SATURATED: full", "REJECTED_SATURATED"),
        ("in model: x", "ERROR"),
    ],
)
def test_an_error_text_begins_with_its_outcome_or_is_just_an_error(text: str, word: str) -> None:
    assert outcome_of(text) == word


def test_limits_are_read_in_milliseconds_and_seconds() -> None:
    assert parse_slo("ttft=500ms, itl=0.05s,e2e=2000") == {"ttft": 500.0, "itl": 50.0, "e2e": 2000.0}
    with pytest.raises(LoadTestError, match="ttft"):
        parse_slo("ttft=soon")
    with pytest.raises(LoadTestError, match="unknown metric 'latency'"):
        RunConfig(slo={"latency": 1.0})
