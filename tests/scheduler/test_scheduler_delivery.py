"""Claims about the way from an engine's rows to a client's responses."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from tritandem.contracts.answers import Chunk
from tritandem.contracts.errors import Outcome
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import OutputOptions
from tritandem.contracts.stream import FinishCode, LoadSnapshot
from tritandem.scheduler.delivery import text_tokens

from tests.fakes.engine_port import FakeEngine, answer_tokens, token_batch
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import UNREADABLE_TOKEN, text_of

RUNNING, STOP, LENGTH = FinishCode.RUNNING, FinishCode.STOP, FinishCode.LENGTH
STREAM = OutputOptions(stream=True)


def test_256_streams_with_random_slow_readers_are_complete_and_in_order(start: Start) -> None:
    rng = random.Random(1)
    stuck = threading.Event()

    def slow(_: Chunk) -> None:
        if rng.random() < 0.02:
            stuck.wait(rng.random() * 0.004)  # nobody sets it: a reader that takes its time

    engine = FakeEngine(load=LoadSnapshot(max_sequences=256, max_context_tokens=4096))
    running = start([engine], sender_threads=4)
    lengths = {i: rng.randrange(1, 80) for i in range(1, 257)}
    sinks = {i: RecordingSink(before_send=slow if i % 3 == 0 else None) for i in lengths}
    for i, length in lengths.items():
        running.service.submit(request(i, max_tokens=length, output=STREAM), sinks[i])
    for i, length in lengths.items():
        sinks[i].wait_end(20.0)
        assert sinks[i].text == text_of(answer_tokens(i, length))
        assert sinks[i].num_tokens == length
    assert running.text.pushes < sum(lengths.values()) / 4, "a flush is detokenized in one call"


def test_a_slow_path_makes_responses_longer_and_loses_nothing(start: Start) -> None:
    gate = threading.Event()

    def wait(_: Chunk) -> None:
        assert gate.wait(5.0)

    engine, sink = FakeEngine(), RecordingSink(before_send=wait)
    running = start([engine])
    running.service.submit(request(3, max_tokens=200, output=STREAM), sink)
    wait_until(lambda: running.outcomes().get(Outcome.COMPLETED) == 1)
    assert not sink.chunks, "the engine finished long before the first response was through"
    gate.set()
    sink.wait_end()
    assert len(sink.chunks) <= 2, "all that had waited went in one response"
    assert sink.text == text_of(answer_tokens(3, 200))


def test_a_flood_of_refusals_takes_turns_with_the_streams_that_run(start: Start) -> None:
    """One sender, held in a response while 50 refusals and one more token come to wait."""
    held, gate, refused = threading.Event(), threading.Event(), list[RecordingSink]()
    refused_before: list[int] = []

    def stream(chunk: Chunk) -> None:
        refused_before.append(sum(sink.ends for sink in refused))
        held.set()
        assert gate.wait(5.0)

    engine = FakeEngine(automatic=False)
    running = start([engine], sender_threads=1)
    running.service.submit(request(1, output=STREAM), streamed := RecordingSink(before_send=stream))
    engine.wait_live(1)
    [seq_id] = engine.live_ids()
    engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    assert held.wait(5.0)
    refused += [RecordingSink() for _ in range(50)]
    for sink in refused:
        running.service.submit(request(2, deadline_ns=1), sink)
    wait_until(lambda: running.outcomes().get(Outcome.EXPIRED) == 50)
    engine.emit([(seq_id, [2], FinishCode.LENGTH)])
    wait_until(lambda: running.outcomes().get(Outcome.COMPLETED) == 1)
    gate.set()
    streamed.wait_end()
    assert refused_before[0] == 0
    assert refused_before[1] <= 1


def test_log_probabilities_count_as_what_waits_for_a_slow_reader(start: Start) -> None:
    gate = threading.Event()
    engine, sink = FakeEngine(), RecordingSink(before_send=lambda chunk: gate.wait(5.0))
    running = start([engine], max_buffered_chars=10_000)
    output = OutputOptions(stream=True, logprobs=True)
    running.service.submit(request(3, max_tokens=2000, output=output), sink)
    wait_until(lambda: running.outcomes().get(Outcome.FAILED) == 1)
    gate.set()
    sink.wait_end()
    assert "reads too slowly" in str(sink.error)
    assert sum(len(chunk.logprobs) for chunk in sink.chunks) < 200


def test_a_first_answer_overtakes_the_rest(start: Start) -> None:
    """One sender, held inside a response: a newcomer queued last goes before two that have answered already."""
    gate, order = threading.Event(), []

    def client(name: str, held: bool = False) -> RecordingSink:
        def before(chunk: Chunk) -> None:
            order.append((name, chunk.text))
            if held and len(order) > 3:
                assert gate.wait(5.0)

        return RecordingSink(before_send=before)

    engine = FakeEngine(automatic=False)
    running = start([engine], sender_threads=1)
    sinks = [client("a", held=True), client("b"), client("c")]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1, max_tokens=50, output=STREAM), sink)
    a, b, c = engine.wait_live(3)
    engine.emit([(a, [1], RUNNING), (b, [1], RUNNING), (c, [1], RUNNING)])
    for sink in sinks:
        sink.wait_chunks(1)
    engine.emit([(a, [2], RUNNING)])
    wait_until(lambda: len(order) == 4)
    newcomer = client("new")
    running.service.submit(request(4, max_tokens=50, output=STREAM), newcomer)
    new = engine.wait_live(4)[-1]
    engine.emit([(b, [2], RUNNING), (c, [2], RUNNING), (new, [1], RUNNING)])
    wait_until(lambda: running.service.snapshot().buffered_chars == len(text_of([2, 2, 1])))
    gate.set()
    newcomer.wait_chunks(1)
    assert order[4] == ("new", "1.")
    engine.emit([(seq_id, [9], LENGTH) for seq_id in (a, b, c, new)])
    for sink in [*sinks, newcomer]:
        sink.wait_end()


def test_the_longest_pause_of_a_stream_is_told_and_none_of_an_answer_in_one_piece(start: Start) -> None:
    engine, halting, whole = FakeEngine(automatic=False), RecordingSink(), RecordingSink()
    running = start([engine])
    running.service.submit(request(1, max_tokens=50, output=STREAM), halting)
    running.service.submit(request(2, max_tokens=50, output=STREAM), whole)
    first, second = engine.wait_live(2)
    engine.emit([(first, [1], RUNNING), (second, [1], LENGTH)])
    halting.wait_chunks(1)
    engine.emit([(first, [2], LENGTH)])
    for sink in (halting, whole):
        sink.wait_end()
    wait_until(lambda: len(running.observer.records) == 2)
    pauses = {record.num_responses: record.longest_pause_ns for record in running.observer.records}
    assert pauses[1] == 0 < pauses[2]


def test_text_and_end_that_arrive_together_leave_in_one_response(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    start([engine]).service.submit(request(3, max_tokens=50, output=STREAM), sink)
    engine.emit([(engine.wait_live(1)[0], [1, 2, 3], LENGTH)])
    sink.wait_end()
    assert [(chunk.text, chunk.num_output_tokens) for chunk in sink.chunks] == [("1.2.3.", 3)]


def test_the_end_token_counts_but_is_no_text(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    start([engine]).service.submit(request(3, max_tokens=50), sink)
    engine.emit([(engine.wait_live(1)[0], [1, 2, 99], STOP)])
    sink.wait_end()
    assert (sink.text, sink.num_tokens) == ("1.2.", 3)


def test_nothing_past_a_stop_word_is_delivered_or_counted(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    start([engine]).service.submit(request(3, max_tokens=50, stop_words=("7.",), output=STREAM), sink)
    [seq_id] = engine.wait_live(1)
    engine.emit([(seq_id, [1, 7, 8], RUNNING)])
    sink.wait_end()
    wait_until(lambda: engine.cancelled_ids == [seq_id])
    assert (sink.text, sink.num_tokens) == ("1.", 2)
    assert sink.chunks[-1].stop_reason == "7."


@pytest.mark.parametrize(("named", "reason"), [(((99, 99),), 99), (((99, "<|end|>"),), "<|end|>"), (((3, 3),), None)])
def test_a_token_that_the_client_named_is_the_reason_and_the_models_own_is_none(
    start: Start, named: tuple[tuple[int, str | int], ...], reason: str | int | None
) -> None:
    engine, sink, other = FakeEngine(automatic=False), RecordingSink(), RecordingSink()
    service = start([engine]).service
    service.submit(request(3, max_tokens=50, named_stops=named), sink)
    service.submit(request(3, max_tokens=50), other)
    first, second = engine.wait_live(2)
    engine.emit([(first, [1, 99], STOP), (second, [2, 98], STOP)])
    sink.wait_end()
    other.wait_end()
    assert (sink.chunks[-1].stop_reason, other.chunks[-1].stop_reason) == (reason, None)


def test_the_prompt_comes_first_and_once_when_asked_for(start: Start) -> None:
    running = start([FakeEngine()])
    sink = RecordingSink()
    output = OutputOptions(stream=True, exclude_input=False)
    running.service.submit(request(3, max_tokens=30, output=output, prompt_text="Hello "), sink)
    sink.wait_end()
    assert sink.text == "Hello " + text_of(answer_tokens(3, 30))


def test_numbers_on_the_last_response(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    start([engine]).service.submit(request(3, prompt_tokens=5, max_tokens=50), sink)
    engine.emit([(engine.wait_live(1)[0], [1, 2], LENGTH)])
    sink.wait_end()
    last = sink.chunks[-1]
    assert (last.num_input_tokens, last.num_output_tokens, last.cached_tokens) == (5, 2, 2)
    assert last.stamps is not None
    assert (last.stamps.accepted_ns, last.stamps.last_token_ns) == (1, 4)
    assert 0 < last.stamps.received_ns <= last.stamps.dispatched_ns <= last.stamps.finished_ns


def test_logprobs_follow_their_tokens(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    output = OutputOptions(stream=True, logprobs=True, cumulative_logprob=True)
    running = start([engine])
    asked = request(3, output=output)
    running.service.submit(replace_sampling(asked, SamplingParams(max_tokens=50, logprobs=1)), sink)
    running.service.submit(request(4, max_tokens=50), plain := RecordingSink())
    first, second = engine.wait_live(2)
    engine.emit([(second, [5], RUNNING), (first, [11, 12], RUNNING)])
    sink.wait_chunks(1)
    engine.emit([(first, [13], LENGTH), (second, [5], LENGTH)])
    sink.wait_end()
    plain.wait_end()
    entries = [entry for chunk in sink.chunks for entry in chunk.logprobs]
    assert [(entry.token_id, entry.logprob, entry.top) for entry in entries] == [
        (token, -(token % 10), ((token, -(token % 10)),)) for token in (11, 12, 13)
    ]
    assert sink.chunks[-1].cumulative_logprob == -6.0
    assert not plain.chunks[0].logprobs


def replace_sampling(asked, sampling: SamplingParams):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(asked, sampling=sampling)


def test_an_unreadable_row_fails_alone(start: Start) -> None:
    engine = FakeEngine(automatic=False)
    running = start([engine])
    sinks = [RecordingSink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1, max_tokens=50), sink)
    a, b, c = engine.wait_live(3)
    engine.emit([(a, [1, 2], RUNNING), (b, [UNREADABLE_TOKEN], RUNNING), (c, [3], RUNNING)])
    engine.emit([(a, [4], LENGTH), (c, [5], LENGTH)])
    for sink in sinks:
        sink.wait_end()
    assert [sink.text for sink in sinks] == ["1.2.4.", "", "3.5."]
    assert sinks[1].error is not None


def test_a_last_response_that_is_refused_still_ends_the_request(start: Start) -> None:
    sink = RecordingSink()
    sink.fail_finish = True
    running = start([FakeEngine()])
    running.service.submit(request(3), sink)
    sink.wait_end()
    assert sink.error is not None
    wait_until(lambda: [record.outcome for record in running.observer.records] == [Outcome.FAILED])
    assert running.outcomes() == {Outcome.FAILED: 1}


def test_after_a_response_that_was_refused_nothing_but_the_error_follows(start: Start) -> None:
    """The engine has finished by then: the gap would otherwise be hidden behind a good end."""
    gate, refused = threading.Event(), []

    def refuse_the_first(chunk: Chunk) -> None:
        assert gate.wait(5.0)
        if not refused:
            refused.append(chunk.text)
            raise ConnectionError("gone")

    sink = RecordingSink(before_send=refuse_the_first)
    running = start([FakeEngine()])
    running.service.submit(request(3, max_tokens=50, output=STREAM), sink)
    wait_until(lambda: running.outcomes().get(Outcome.COMPLETED) == 1)
    gate.set()
    sink.wait_end()
    assert not sink.chunks
    assert sink.error is not None
    wait_until(lambda: [record.outcome for record in running.observer.records] == [Outcome.FAILED])


def test_rows_are_cut_to_known_sequences_and_end_tokens() -> None:
    batch = token_batch([(1, [1, 2], RUNNING), (2, [3], STOP), (3, [4, 5, 6], STOP), (4, [], STOP)], LoadSnapshot())
    tokens, counts = text_tokens(batch, [0, 2, 3])
    assert tokens.tolist() == [1, 2, 4, 5]
    assert counts.tolist() == [2, 2, 0]
    plain = token_batch([(1, [1, 2], RUNNING), (2, [3], LENGTH)], LoadSnapshot())
    tokens, counts = text_tokens(plain, [0, 1])
    assert np.shares_memory(tokens, plain.tokens), "nothing to cut, nothing to copy"
    assert counts.tolist() == [2, 1]
