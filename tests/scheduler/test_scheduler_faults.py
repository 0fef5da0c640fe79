"""Claims about engines that die, hang and return, and about a random walk through all of it at once."""

from __future__ import annotations

import random
import threading
import time

import pytest
from tritandem.config import SchedulerConfig
from tritandem.contracts.answers import Chunk
from tritandem.contracts.errors import Outcome
from tritandem.contracts.requests import OutputOptions, PriorityClass
from tritandem.contracts.stream import FinishCode, LoadSnapshot
from tritandem.scheduler import SchedulerService
from tritandem.scheduler.core import CONNECT_GRACE_NS

from tests.fakes.clock import FakeClock
from tests.fakes.engine_port import FakeEngine, answer_tokens
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import text_of

STREAM = OutputOptions(stream=True)


def test_a_dead_engine_makes_the_service_unready_and_a_returned_one_ready_again(start: Start) -> None:
    engine = FakeEngine()
    running = start([engine], engine_silence_s=0.01)
    engine.kill()
    wait_until(lambda: not running.service.ready())
    engine.revive()
    wait_until(running.service.ready)
    sink = RecordingSink()
    running.service.submit(request(3), sink)
    sink.wait_end()
    assert sink.error is None


def test_without_any_engine_what_waits_and_what_comes_is_failed_soon(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=LoadSnapshot(max_sequences=1, max_context_tokens=99))
    running = start([engine])
    sinks = [RecordingSink() for _ in range(5)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1), sink)
    engine.wait_live(2)
    began_s = time.monotonic()
    engine.kill()
    for sink in sinks:
        sink.wait_end()
        assert sink.error is not None
        assert sink.error.outcome is Outcome.FAILED
    assert time.monotonic() - began_s < 3.0
    late = RecordingSink()
    running.service.submit(request(9), late)
    late.wait_end()
    assert late.error is not None


def test_an_engine_that_does_not_answer_a_call_is_left_out_and_its_requests_move(start: Start) -> None:
    hung, healthy = FakeEngine("hung", automatic=False), FakeEngine("healthy", load=LoadSnapshot(max_sequences=4))
    running = start([hung, healthy], engine_answer_s=0.05, engine_silence_s=0.02)
    wait_until(lambda: all(engine.health == "up" for engine in running.service.snapshot().engines))
    hung.hang = threading.Event()
    wait_until(lambda: running.service.snapshot().engines[0].health == "down")
    sinks = [RecordingSink() for _ in range(4)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1, max_tokens=5), sink)
    for i, sink in enumerate(sinks):
        sink.wait_end()
        assert sink.text == text_of(answer_tokens(i + 1, 5))
    assert not hung.submits
    hung.hang.set()
    wait_until(lambda: running.service.snapshot().engines[0].health == "up")


def test_sequences_left_in_an_engine_are_cancelled_when_it_is_back(start: Start) -> None:
    """Its stream broke, but the engine itself lives on: what it still runs belongs to nobody."""
    engine = FakeEngine(automatic=False)
    running = start([engine])
    sink = RecordingSink()
    running.service.submit(request(3, max_tokens=50, output=STREAM), sink)
    [seq_id] = engine.wait_live(1)
    engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    sink.wait_chunks(1)
    with engine.changed:
        engine.dead = True
        engine.changed.notify_all()
    sink.wait_end()
    engine.revive()
    wait_until(lambda: seq_id in engine.cancelled_ids)
    assert not engine.live_ids()


def test_an_engine_that_lost_its_sequences_without_a_word_is_found_out(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    running = start([engine])
    running.service.submit(request(3), sink)
    engine.wait_live(1)
    engine.forget()
    while not sink.ends:
        wait_until(lambda: bool(sink.ends) or bool(engine.live_ids()))
        engine.forget()
    sink.wait_end()
    assert sink.error is not None
    assert "lost its sequences" in str(sink.error)
    assert len(engine.submits) == 3, "it was moved back twice before it was given up"


def test_an_engine_that_was_replaced_under_its_name_is_found_out(start: Start) -> None:
    engine, lost, fresh = FakeEngine(automatic=False), RecordingSink(), RecordingSink()
    running = start([engine])
    running.service.submit(request(3, max_tokens=50, output=STREAM), lost)
    [seq_id] = engine.wait_live(1)
    engine.set_load(steps=1000)
    engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    lost.wait_chunks(1)
    running.service.submit(request(4, max_tokens=50), fresh)
    other = engine.wait_live(2)[1]
    engine.set_load(steps=3)
    engine.emit([(other, [1], FinishCode.RUNNING)])
    lost.wait_end()
    assert "restarted" in str(lost.error)
    wait_until(lambda: len(engine.submits) == 3)
    [again] = engine.wait_live(1)
    engine.emit([(again, [5, 6], FinishCode.LENGTH)])
    fresh.wait_end()
    assert fresh.text == "5.6."


def test_a_stream_that_lags_behind_the_answers_to_calls_is_no_other_engine(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    running = start([engine])
    running.service.submit(request(3, max_tokens=2, output=STREAM), sink)
    [seq_id] = engine.wait_live(1)
    engine.set_load(steps=1000)
    engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    sink.wait_chunks(1)
    [link] = running.service._core.links
    engine.set_load(steps=5000)
    link.probe()
    wait_until(lambda: link.load.steps == 5000)
    engine.set_load(steps=1100)
    engine.emit([(seq_id, [2], FinishCode.LENGTH)])
    sink.wait_end()
    assert sink.error is None
    assert link.load.steps == 5000


def test_a_stream_that_never_ends_does_not_keep_a_restarted_engine_out(start: Start) -> None:
    engine, lost = FakeEngine(automatic=False), RecordingSink()
    running = start([engine], engine_silence_s=0.02)
    engine.strand = threading.Event()
    running.service.submit(request(3, max_tokens=50, output=STREAM), lost)
    [seq_id] = engine.wait_live(1)
    engine.set_load(steps=1000)
    engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    lost.wait_chunks(1)
    engine.kill()
    engine.revive()
    lost.wait_end()
    assert lost.error is not None
    fresh = RecordingSink()
    wait_until(running.service.ready)
    running.service.submit(request(4), fresh)
    [seq_id] = engine.wait_live(1)
    engine.emit([(seq_id, [7], FinishCode.LENGTH)])
    fresh.wait_end()
    assert fresh.text == "7."
    engine.strand.set()


def test_a_request_that_is_handed_over_twice_to_an_engine_runs_there_once(start: Start) -> None:
    """As happens where an engine is back before the scheduling thread has dealt with its going."""
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    service = start([engine]).service
    service.submit(request(3, max_tokens=3), sink)
    [seq_id] = engine.wait_live(1)
    [ticket] = service._open.values()
    engine.emit([(seq_id, [3000, 3001], FinishCode.RUNNING)])
    wait_until(lambda: ticket.tokens == 2)
    service._core.links[0].submit([ticket])
    service.submit(request(5), RecordingSink())
    later = engine.wait_live(2)[1]
    assert [asked.prompt_ids[0] for asked in engine.submits[-1]] == [5]
    engine.emit([(seq_id, [3002], FinishCode.LENGTH), (later, [5000], FinishCode.LENGTH)])
    sink.wait_end()
    assert sink.text == text_of(answer_tokens(3, 3))


def test_requests_wait_for_an_engine_that_is_still_loading(start: Start) -> None:
    engine = FakeEngine()
    engine.dead = True
    running = start([engine], connect=False)
    sink = RecordingSink()
    running.service.submit(request(3), sink)
    assert not running.service.ready()
    engine.revive()
    sink.wait_end()
    assert sink.error is None


def test_waiting_for_a_loading_engine_is_not_for_ever() -> None:
    engine, clock, sink = FakeEngine(), FakeClock(), RecordingSink()
    engine.dead = True
    from tests.fakes.text_streams import FakeTextStreams

    service = SchedulerService([engine], FakeTextStreams(), SchedulerConfig(), clock=clock)
    service.start()
    service.submit(request(3), sink)
    wait_until(lambda: sum(service.snapshot().waiting.values()) == 1)
    clock.advance(CONNECT_GRACE_NS / 1e9 + 1)
    service.stop("nobody")
    other = RecordingSink()
    service.submit(request(4), other)
    sink.wait_end()
    other.wait_end()
    service.close()


def test_draining_refuses_newcomers_with_a_clear_word_and_lets_the_others_finish(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=LoadSnapshot(max_sequences=1, max_context_tokens=99))
    running = start([engine])
    sinks = [RecordingSink() for _ in range(3)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1), sink)
    engine.wait_live(2)
    drained: list[bool] = []
    drain = threading.Thread(target=lambda: drained.append(running.service.drain(10.0)))
    drain.start()
    wait_until(lambda: not running.service.ready())
    late = RecordingSink()
    running.service.submit(request(9), late)
    late.wait_end()
    assert late.error is not None
    assert "draining" in str(late.error)
    while not all(sink.ends for sink in sinks):
        engine.emit([(seq_id, [1], FinishCode.LENGTH) for seq_id in engine.live_ids()])
        wait_until(lambda: bool(engine.live_ids()) or all(sink.ends for sink in sinks))
    drain.join(5.0)
    assert drained == [True]
    assert all(sink.error is None for sink in sinks), "queued ones had been accepted: they run too"


def test_a_drain_that_takes_too_long_says_so(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    running = start([engine])
    running.service.submit(request(3), sink)
    [seq_id] = engine.wait_live(1)
    assert not running.service.drain(0.01)
    engine.emit([(seq_id, [1], FinishCode.LENGTH)])
    sink.wait_end()


def test_after_close_everything_is_refused_and_no_thread_is_left(start: Start) -> None:
    running = start([FakeEngine()])
    running.service.close()
    sink = RecordingSink()
    running.service.submit(request(3), sink)
    sink.wait_end()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tritandem")]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_every_request_ends_exactly_once(start: Start, seed: int) -> None:
    """Three engines, 400 requests; engines die and return; clients leave, stop, read slowly, break, miss deadlines."""
    rng = random.Random(seed)
    load = LoadSnapshot(max_sequences=12, max_context_tokens=4096, total_blocks=200, free_blocks=200, block_tokens=16)
    engines = [FakeEngine(str(i), load=load) for i in range(3)]
    running = start(engines, max_queued_requests=150, engine_silence_s=0.02, sender_threads=3, tick_s=0.0)
    service = running.service
    pause = threading.Event()

    def temper(_: Chunk) -> None:
        fate = rng.random()
        if fate < 0.01:
            raise ConnectionError("broken pipe")
        if fate < 0.03:
            pause.wait(0.002)

    sinks: dict[int, RecordingSink] = {}
    lengths: dict[int, int] = {}
    for i in range(1, 401):
        lengths[i] = rng.randrange(1, 120)
        sinks[i] = RecordingSink(before_send=temper)
        service.submit(
            request(
                i,
                max_tokens=lengths[i],
                prompt_tokens=rng.randrange(1, 200),
                priority=rng.choice(list(PriorityClass)),
                tenant=rng.choice("abc"),
                deadline_ns=time.monotonic_ns() + rng.randrange(50_000_000) if rng.random() < 0.1 else None,
                output=OutputOptions(stream=rng.random() < 0.7),
            ),
            sinks[i],
        )
        fate = rng.random()
        if fate < 0.05:
            rng.choice(engines).kill()
        elif fate < 0.3:
            rng.choice(engines).revive()
        elif fate < 0.4:
            service.stop(f"r{rng.randrange(1, i + 1)}")
        elif fate < 0.5:
            sinks[rng.randrange(1, i + 1)].gone = True
        elif fate < 0.55:
            service.check_integrity()
        if i % 40 == 0:
            pause.wait(0.02)
    for engine in engines:
        engine.revive()
    for i, sink in sinks.items():
        sink.wait_end(10.0)
        if sink.chunks and sink.chunks[-1].outcome is Outcome.COMPLETED:
            assert sink.text == text_of(answer_tokens(i, lengths[i]))
        elif sink.chunks:
            assert text_of(answer_tokens(i, lengths[i])).startswith(sink.text)
    wait_until(lambda: len(running.observer.records) == 400)
    outcomes = running.outcomes()
    assert sum(outcomes.values()) == 400
    assert outcomes[Outcome.COMPLETED] > 0
    wait_until(lambda: not any(engine.live_ids() for engine in engines))
