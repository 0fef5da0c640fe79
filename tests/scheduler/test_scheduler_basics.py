"""Claims: submit -> dispatch -> stream -> sink, in the simplest cases."""

from __future__ import annotations

from tritandem.contracts.errors import Outcome
from tritandem.contracts.requests import OutputOptions
from tritandem.contracts.stream import FinishReason

from tests.fakes.engine_port import FakeEngine, answer_tokens
from tests.fakes.scheduling import Start, request
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import text_of


def test_an_answer_arrives_whole_and_ends_once(start: Start) -> None:
    running = start([FakeEngine()])
    sink = RecordingSink()
    running.service.submit(request(7, max_tokens=20, output=OutputOptions(stream=True)), sink)
    sink.wait_end()
    assert sink.text == text_of(answer_tokens(7, 20))
    assert sink.num_tokens == 20
    last = sink.chunks[-1]
    assert (last.finish_reason, last.outcome) == (FinishReason.LENGTH, Outcome.COMPLETED)
    assert last.stamps is not None
    assert last.stamps.dispatched_ns > 0


def test_without_streaming_there_is_exactly_one_response(start: Start) -> None:
    running = start([FakeEngine()])
    sink = RecordingSink()
    running.service.submit(request(7, max_tokens=20), sink)
    sink.wait_end()
    assert len(sink.chunks) == 1
    assert sink.text == text_of(answer_tokens(7, 20))
