"""Several answers to one request: one prompt, one sink, one end, whatever happens to one of them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from tritandem.contracts.answers import Chunk
from tritandem.contracts.errors import EngineFailed, Outcome, TritandemError
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest, GenerationRequest, OutputOptions
from tritandem.contracts.stream import FinishCode, FinishReason, LoadSnapshot
from tritandem.scheduler.choices import parts

from tests.fakes.engine_port import FakeEngine, answer_tokens
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import text_of


def several(n: int, max_tokens: int = 6, stream: bool = True, sampling: Any = None, **more: Any) -> GenerationRequest:
    asked = request(7, max_tokens=max_tokens, output=OutputOptions(stream=stream), **more)
    return replace(asked, sampling=replace(asked.sampling, n=n, **(sampling or {})))


def of_index(sink: RecordingSink, index: int) -> list[Chunk]:
    return [chunk for chunk in sink.chunks if chunk.index == index]


def test_each_answer_streams_by_itself_and_the_request_ends_once(start: Start) -> None:
    running = start([FakeEngine()])
    sink = RecordingSink()
    running.service.submit(several(3, max_tokens=20), sink)
    sink.wait_end()
    for index in range(3):
        chunks = of_index(sink, index)
        assert "".join(chunk.text for chunk in chunks) == text_of(answer_tokens(7, 20))
        assert sum(chunk.num_output_tokens for chunk in chunks) == 20
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [FinishReason.LENGTH]
        assert {chunk.num_input_tokens for chunk in chunks} == {3}
    wait_until(lambda: bool(running.observer.records))
    [record] = running.observer.records
    assert (record.num_input_tokens, record.num_output_tokens, record.sequences) == (3, 60, 3)
    assert record.outcome is Outcome.COMPLETED


def test_without_streaming_all_answers_are_one_response(start: Start) -> None:
    running = start([FakeEngine()])
    sink = RecordingSink()
    running.service.submit(several(4, max_tokens=9, stream=False), sink)
    sink.wait_end()
    [chunk] = sink.chunks
    assert [one.text for one in chunk.choices] == [text_of(answer_tokens(7, 9))] * 4
    assert [one.index for one in chunk.choices] == [0, 1, 2, 3]
    assert (chunk.num_output_tokens, chunk.num_input_tokens) == (36, 3)
    assert chunk.stamps is not None
    assert chunk.stamps.last_token_ns >= chunk.stamps.first_token_ns > 0


def test_an_engine_gets_a_family_in_one_call_with_seeds_that_follow_each_other(start: Start) -> None:
    engine = FakeEngine(automatic=False)
    running = start([engine, FakeEngine("other")])
    sink = RecordingSink()
    running.service.submit(several(3, sampling={"seed": 2**63 - 2, "temperature": 1.0, "prompt_logprobs": 2}), sink)
    seq_ids = engine.wait_live(3)
    [submitted] = engine.submits
    assert len({one.family for one in submitted}) == 1
    assert submitted[0].family
    assert [one.sampling.seed for one in submitted] == [2**63 - 2, 2**63 - 1, 0]
    assert [one.sampling.prompt_logprobs for one in submitted] == [2, None, None]
    assert all(one.prompt_ids is submitted[0].prompt_ids for one in submitted)
    engine.emit([(seq_id, [7], FinishCode.LENGTH) for seq_id in seq_ids])
    sink.wait_end()


def test_lone_requests_are_no_family() -> None:
    [one] = parts(request(1))
    assert one.sampling == SamplingParams(max_tokens=4)


def test_one_answers_failure_is_that_of_all(start: Start) -> None:
    engine = FakeEngine(automatic=False)
    running = start([engine])
    sink = RecordingSink()
    running.service.submit(several(3), sink)
    first, second, third = engine.wait_live(3)
    engine.emit([(first, [1], FinishCode.LENGTH), (second, [2], FinishCode.RUNNING)])
    sink.wait_chunks(2)
    engine.emit([(second, [], FinishCode.ERROR)], errors={0: "the model's logits are not finite"})
    sink.wait_end()
    assert "finite" in str(sink.error)
    wait_until(lambda: third in engine.cancelled_ids)
    wait_until(lambda: bool(running.observer.records))
    assert [record.outcome for record in running.observer.records] == [Outcome.FAILED]


def test_an_engine_that_refuses_one_ends_the_others(start: Start) -> None:
    refused: list[int] = []

    def refuse(asked: EngineRequest) -> EngineFailed | None:
        refused.append(asked.seq_id)
        return EngineFailed("not this one") if len(refused) == 2 else None

    engine = FakeEngine(automatic=False, refuse=refuse)
    running = start([engine])
    sink = RecordingSink()
    running.service.submit(several(3, stream=False), sink)
    sink.wait_end()
    assert "not this one" in str(sink.error)
    wait_until(lambda: not engine.live_ids())


def test_a_stop_ends_all_of_them_with_what_there_is(start: Start) -> None:
    engine = FakeEngine(automatic=False)
    running = start([engine])
    for stream in (True, False):
        sink = RecordingSink()
        running.service.submit(several(2, stream=stream, request_id="mine"), sink)
        first, second = engine.wait_live(2)
        engine.emit([(first, [1], FinishCode.RUNNING), (second, [2], FinishCode.RUNNING)])
        if stream:
            sink.wait_chunks(2)
        else:
            wait_until(lambda: running.service.snapshot().buffered_chars == 4)
        assert running.service.stop("mine")
        sink.wait_end()
        ended = [one for one in (sink.chunks if stream else sink.chunks[0].choices) if one.finish_reason]
        assert [one.finish_reason for one in ended] == [FinishReason.CANCELLED] * 2
        assert sink.text == ("1.2." if stream else "1.")
        wait_until(lambda: not engine.live_ids())
    wait_until(lambda: len(running.observer.records) == 2)
    assert {record.outcome for record in running.observer.records} == {Outcome.STOPPED}


def test_a_client_that_leaves_frees_every_sequence(start: Start) -> None:
    engine = FakeEngine(automatic=False)
    running = start([engine])
    sink = RecordingSink()
    running.service.submit(several(3), sink)
    first, _, _ = engine.wait_live(3)
    engine.emit([(first, [1], FinishCode.LENGTH)])
    sink.wait_chunks(1)
    sink.gone = True
    sink.wait_end()
    wait_until(lambda: not engine.live_ids())
    wait_until(lambda: bool(running.observer.records))
    assert [record.outcome for record in running.observer.records] == [Outcome.CANCELLED]


def test_a_deadline_ends_them_together(start: Start) -> None:
    engine = FakeEngine(automatic=False)
    running = start([engine])
    sink = RecordingSink()
    running.service.submit(several(3, deadline_ns=time.monotonic_ns() + 100_000_000), sink)
    sink.wait_end()
    assert "deadline" in str(sink.error)
    wait_until(lambda: not engine.live_ids())


def test_unseen_answers_begin_again_where_an_engine_failed_and_seen_ones_fail(start: Start) -> None:
    for seen in (False, True):
        engine = FakeEngine(automatic=False)
        running = start([engine])
        sink = RecordingSink()
        running.service.submit(several(2), sink)
        first, second = engine.wait_live(2)
        if seen:
            engine.emit([(first, [1], FinishCode.RUNNING)])
            sink.wait_chunks(1)
        engine.kill()
        if seen:
            sink.wait_end()
            assert "failed" in str(sink.error)
        engine.revive()
        if not seen:
            again = engine.wait_live(2)
            assert {first, second}.isdisjoint(again)
            engine.emit([(seq_id, [5], FinishCode.LENGTH) for seq_id in again])
            sink.wait_end()
            assert sink.text == "5.5."


def test_more_answers_than_engines_have_places_are_refused_by_name(start: Start) -> None:
    load = LoadSnapshot(total_blocks=4096, free_blocks=4096, block_tokens=16, max_sequences=4, max_context_tokens=4096)
    running = start([FakeEngine(load=load)])
    sink = RecordingSink()
    running.service.submit(several(5), sink)
    sink.wait_end()
    assert str(sink.error).startswith("n: given 5, allowed: at most 4")
    sink = RecordingSink()
    running.service.submit(several(4), sink)
    sink.wait_end()
    assert sink.error is None


def test_a_prompt_waits_and_counts_once(start: Start) -> None:
    """Rows and their tokens count, each of them; eight times the prompt would not find a place."""
    engine = FakeEngine(automatic=False)
    running = start([engine], max_queued_tokens=3000)
    sink = RecordingSink()
    running.service.submit(several(8, prompt_tokens=2000), sink)
    seq_ids = engine.wait_live(8)
    [book] = running.service._core._books.values()
    assert book.prefilling_tokens == 2007
    assert book.committed_tokens < 2 * 2000
    engine.emit([(seq_id, [7], FinishCode.LENGTH) for seq_id in seq_ids])
    sink.wait_end()
    assert sink.error is None


def test_whoever_cannot_even_be_told_of_a_failure_leaves_no_sequence_behind(start: Start) -> None:
    class Deaf(RecordingSink):
        def fail(self, error: TritandemError) -> None:
            super().fail(error)
            raise ConnectionError("nobody is there")

    engine = FakeEngine(automatic=False)
    running = start([engine])
    sink = Deaf()
    running.service.submit(several(3), sink)
    first, _, _ = engine.wait_live(3)
    engine.emit([(first, [], FinishCode.ERROR)], errors={0: "broken"})
    sink.wait_end()
    wait_until(lambda: not engine.live_ids())


def test_a_sink_that_refuses_one_answer_ends_the_request_with_an_error(start: Start) -> None:
    engine = FakeEngine()
    running = start([engine])

    def refuse(chunk: Chunk) -> None:
        if chunk.index == 1:
            raise ConnectionError("not this one")

    sink = RecordingSink(before_send=refuse)
    running.service.submit(several(3, max_tokens=500), sink)
    sink.wait_end()
    assert "delivered" in str(sink.error)
    wait_until(lambda: not engine.live_ids())
