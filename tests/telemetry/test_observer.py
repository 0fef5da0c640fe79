"""Claims about what a finished request leaves behind: metrics and one log line."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from tritandem.contracts.answers import Stamps
from tritandem.contracts.errors import Outcome
from tritandem.contracts.requests import PriorityClass
from tritandem.contracts.stream import LoadSnapshot
from tritandem.scheduler import FinishedRequest, SchedulerSnapshot
from tritandem.scheduler.batch_limits import BatchLimits
from tritandem.scheduler.ports import EngineStatus
from tritandem.telemetry.registry import Registry
from tritandem.triton_io.reports.observer import RequestObserver, durations

MS = 1_000_000
STAMPS = Stamps(
    received_ns=1000 * MS,
    tokenized_ns=1002 * MS,
    dispatched_ns=1010 * MS,
    accepted_ns=1011 * MS,
    prefill_start_ns=1012 * MS,
    first_token_ns=1032 * MS,
    last_token_ns=1132 * MS,
    first_sent_ns=1034 * MS,
    finished_ns=1140 * MS,
)


def record(**changes: object) -> FinishedRequest:
    fields: dict[str, object] = {
        "request_id": "a",
        "outcome": Outcome.COMPLETED,
        "priority": PriorityClass.INTERACTIVE,
        "tenant": "t",
        "stamps": STAMPS,
        "num_input_tokens": 7,
        "num_output_tokens": 11,
        "cached_tokens": 0,
        "num_responses": 4,
        "engine": "engine",
        "error": "",
    }
    return FinishedRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_each_stage_is_measured_between_its_own_stamps() -> None:
    seconds = {family.name: value for family, value in durations(STAMPS, 11).items()}
    assert seconds == {
        "tritandem_tokenize_seconds": 0.002,
        "tritandem_queue_wait_seconds": 0.008,
        "tritandem_prefill_seconds": 0.020,
        "tritandem_time_to_first_token_seconds": 0.034,
        "tritandem_request_latency_seconds": 0.140,
        "tritandem_inter_token_latency_seconds": 0.010,
    }


def test_stages_that_were_not_reached_are_not_measured() -> None:
    rejected = Stamps(received_ns=5 * MS, finished_ns=6 * MS)
    assert [family.name for family in durations(rejected, 0)] == ["tritandem_request_latency_seconds"]


def test_the_longest_pause_of_a_stream_is_counted_where_it_had_one() -> None:
    registry = Registry()
    observer = RequestObserver(registry, None)
    observer.finished(record(longest_pause_ns=250 * MS))
    observer.finished(record(num_responses=1))
    observer.gap.note(40 * MS)
    observer.report()
    found = {c.name: c.value for c in registry.changes()}
    assert found["tritandem_longest_pause_seconds_count"] == found["tritandem_response_gap_seconds_count"] == 1
    assert found["tritandem_longest_pause_seconds_sum"] == pytest.approx(0.25)
    assert found["tritandem_response_gap_seconds_sum"] == pytest.approx(0.04)


def test_a_finished_request_counts_once_under_its_outcome() -> None:
    registry = Registry()
    RequestObserver(registry, None).finished(record(outcome=Outcome.EXPIRED))
    counts = {c.labels: c.value for c in registry.changes() if c.name == "tritandem_requests_total"}
    assert len(counts) == len(Outcome) * len(PriorityClass)  # all of them exist from the start, as zero
    assert {labels: count for labels, count in counts.items() if count} == {
        (("outcome", "EXPIRED"), ("priority", "interactive")): 1.0
    }


def test_times_of_detokenizing_and_sending_are_carried_over_once() -> None:
    registry = Registry()
    observer = RequestObserver(registry, None)
    observer.send.note(30_000)
    observer.detokenize.note(2_000_000)
    for expected in (1.0, None):
        observer.report()
        found = {c.name: c.value for c in registry.changes()}
        assert found.get("tritandem_send_seconds_count") == expected
        assert found.get("tritandem_detokenize_seconds_count") == expected


def test_the_log_line_tells_every_stage_in_ms_after_arrival() -> None:
    lines: list[str] = []
    observer = RequestObserver(Registry(), lines.append)
    observer.finished(record(error="FAILED: the engine died", outcome=Outcome.FAILED))
    assert lines == []
    observer.write_log()
    observer.write_log()
    [line] = [json.loads(text) for text in lines]
    assert line["outcome"] == "FAILED"
    assert line["error"] == "FAILED: the engine died"
    assert {name: value for name, value in line.items() if name.endswith("_ms")} == {
        "longest_pause_ms": 0.0,
        "tokenized_ms": 2.0,
        "dispatched_ms": 10.0,
        "accepted_ms": 11.0,
        "prefill_start_ms": 12.0,
        "first_token_ms": 32.0,
        "last_token_ms": 132.0,
        "first_sent_ms": 34.0,
        "finished_ms": 140.0,
    }
    assert "trace_id" not in line
    assert "seed" not in line, "nothing was drawn"


def test_the_log_line_names_the_seed_of_what_was_drawn() -> None:
    lines: list[str] = []
    observer = RequestObserver(Registry(), lines.append)
    observer.finished(record(seed=0))
    observer.finished(record(seed=2**53 - 1))
    observer.write_log()
    assert [json.loads(line)["seed"] for line in lines] == [0, 2**53 - 1]


def test_the_log_line_has_the_walls_clock_and_the_trace_to_look_for() -> None:
    lines: list[str] = []
    observer = RequestObserver(Registry(), lines.append)
    stamps = replace(STAMPS, received_ns=time.monotonic_ns())
    observer.finished(record(stamps=stamps, trace_parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
    observer.write_log()
    line = json.loads(lines[0])
    assert abs(line["received_unix_s"] - time.time()) < 60
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


def test_nothing_hidden_that_a_client_wrote_comes_into_the_log() -> None:
    lines: list[str] = []
    observer = RequestObserver(Registry(), lines.append)
    hidden = "a\x1b[2J\x85\x9b\u2028\n\ud800"
    observer.finished(record(request_id=hidden, tenant=hidden, error=hidden))
    observer.write_log()
    assert lines[0].isprintable()
    line = json.loads(lines[0])
    assert line["id"] == line["tenant"] == line["error"] == hidden


def test_engine_gauges_carry_the_engines_name_and_counters_follow_its_totals() -> None:
    registry = Registry()
    observer = RequestObserver(registry, None)

    def snapshot(load: LoadSnapshot) -> SchedulerSnapshot:
        engine = EngineStatus("engine", "up", BatchLimits(16, 512), load)
        return SchedulerSnapshot({PriorityClass.NORMAL: 2}, running=3, buffered_chars=0, engines=(engine,))

    observer.gauges(snapshot(LoadSnapshot(running=3, free_blocks=60, total_blocks=100, preemptions=2)))
    first = {c.name: c.value for c in registry.changes()}
    assert first["tritandem_requests_waiting"] == 2
    assert first["tritandem_kv_blocks_used"] == 40
    assert first["tritandem_sequence_limit"] == 16
    assert first["tritandem_preemptions_total"] == 2
    observer.gauges(snapshot(LoadSnapshot(running=3, free_blocks=60, total_blocks=100, preemptions=5)))
    assert {c.name: c.value for c in registry.changes()} == {"tritandem_preemptions_total": 3.0}
