"""Claims about the spans of a finished request, as a collector receives them."""

from __future__ import annotations

import importlib.util
import time

import pytest
from tritandem.contracts.answers import Stamps
from tritandem.contracts.errors import ConfigError, Outcome
from tritandem.contracts.requests import PriorityClass
from tritandem.scheduler import FinishedRequest
from tritandem.telemetry import tracing
from tritandem.telemetry.tracing import SpanExporter, refuse_missing_packages
from tritandem.triton_io.reports.request_spans import RequestSpans, stages

from tests.fakes.otlp_collector import OtlpCollector, Received

MS = 1_000_000
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["tokenize", "queue", "prefill", "decode", "send"]


def finished(**changes: object) -> FinishedRequest:
    """A request that ended a moment ago."""
    start = time.monotonic_ns() - 200 * MS
    ends = (2, 10, 11, 12, 32, 132, 34, 140)
    names = ("tokenized", "dispatched", "accepted", "prefill_start", "first_token", "last_token", "first_sent")
    stamps = Stamps(
        start, **{f"{name}_ns": start + ms * MS for name, ms in zip((*names, "finished"), ends, strict=True)}
    )
    fields: dict[str, object] = {
        "request_id": "a",
        "outcome": Outcome.COMPLETED,
        "priority": PriorityClass.NORMAL,
        "tenant": "t",
        "stamps": stamps,
        "num_input_tokens": 7,
        "num_output_tokens": 11,
        "cached_tokens": 3,
        "num_responses": 4,
        "engine": "engine",
        "error": "",
    }
    return FinishedRequest(**{**fields, **changes})  # type: ignore[arg-type]


def sent(*records: FinishedRequest, spans_each: int = 6) -> list[Received]:
    """What a collector gets of these requests: the request's own span first, then its stages in order."""
    with OtlpCollector() as collector:
        spans = RequestSpans(SpanExporter(collector.url))
        for record in records:
            spans.note(record)
        spans.close()
        found = collector.spans(spans_each * len(records))
        assert collector.is_empty()
    return sorted(found, key=lambda span: (span.start_ns, -span.end_ns))


def test_a_request_is_one_span_with_its_stages_below_it() -> None:
    whole, *parts = sent(finished())
    assert whole.name == "generate"
    assert whole.parent == ""
    assert [part.name for part in parts] == STAGES
    assert {part.parent for part in parts} == {whole.span_id}
    assert {part.trace_id for part in parts} == {whole.trace_id}
    assert [(part.end_ns - part.start_ns) // MS for part in (whole, *parts)] == [140, 2, 8, 20, 100, 8]
    assert all(whole.start_ns <= part.start_ns <= part.end_ns <= whole.end_ns for part in parts)


def test_spans_carry_the_walls_clock() -> None:
    before = time.time_ns()
    whole, *_ = sent(finished())
    assert before - 1000 * MS < whole.start_ns < whole.end_ns < time.time_ns()


def test_a_request_continues_the_trace_that_it_came_with() -> None:
    whole, *parts = sent(finished(trace_parent=PARENT))
    assert (whole.trace_id, whole.parent) == tuple(PARENT.split("-")[1:3])
    assert {part.trace_id for part in parts} == {whole.trace_id}


def test_a_caller_that_does_not_sample_gets_no_spans() -> None:
    found = sent(finished(trace_parent=PARENT.removesuffix("01") + "00"), spans_each=0)
    assert found == []


def test_requests_do_not_share_traces() -> None:
    found = sent(finished(), finished(), finished())
    assert len({span.trace_id for span in found}) == 3


def test_the_request_says_how_it_went() -> None:
    whole, *_ = sent(finished())
    assert whole.error == ""
    assert whole.attributes["gen_ai.usage.input_tokens"] == 7
    assert whole.attributes["gen_ai.usage.output_tokens"] == 11
    assert whole.attributes["tritandem.outcome"] == "COMPLETED"
    assert whole.attributes["tritandem.time_to_first_token_s"] == pytest.approx(0.034)
    assert whole.resource["service.name"] == "tritandem"


def test_a_refused_request_is_an_error_without_the_stages_it_never_reached() -> None:
    start = time.monotonic_ns()
    record = finished(
        outcome=Outcome.REJECTED_INVALID,
        error="temperature: given -1",
        stamps=Stamps(received_ns=start, finished_ns=start + MS),
    )
    [whole] = sent(record, spans_each=1)
    assert whole.error == "temperature: given -1"
    assert stages(record.stamps) == []


def test_operators_name_the_service_as_opentelemetry_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    whole, *_ = sent(finished())
    assert whole.resource["service.name"] == "chat"
    assert whole.resource["deployment.environment.name"] == "test"


def test_no_collector_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_MS", 200)
    with OtlpCollector() as collector:
        url = collector.url
    spans = RequestSpans(SpanExporter(url))  # nobody listens there any more
    spans.note(finished())
    started = time.monotonic()
    spans.export()
    assert time.monotonic() - started < 1.0
    spans.close()
    assert time.monotonic() - started < 4.0  # a try and its repetitions take 7 s and more


def test_spans_without_the_packages_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_missing_packages("http://collector:4318/v1/traces")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuse_missing_packages("")
    with pytest.raises(ConfigError, match=r"telemetry.traces_url: given 'http://c', .*tritandem\[tracing\]"):
        refuse_missing_packages("http://c")
