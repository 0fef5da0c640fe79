"""Claims about ends: every way a request can end, each exactly once, with one word everywhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
from tritandem.contracts.answers import Chunk
from tritandem.contracts.errors import EngineFailed, InvalidRequest, Outcome, RequestCancelled, TritandemError
from tritandem.contracts.requests import EngineRequest, OutputOptions
from tritandem.contracts.stream import FinishCode, FinishReason, LoadSnapshot
from tritandem.scheduler.lifecycle import (
    ALLOWED,
    CLIENT_GONE,
    STOP_WORD,
    Ending,
    IllegalTransition,
    Life,
    State,
    ended_by_engine,
)

from tests.fakes.engine_port import FakeEngine, answer_tokens
from tests.fakes.scheduling import Running, Start, request, wait_until
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import UNREADABLE_TOKEN, text_of

STREAM = OutputOptions(stream=True)
ONE_SLOT = LoadSnapshot(max_sequences=1, max_context_tokens=100, total_blocks=100, free_blocks=100, block_tokens=16)
IN_50_MS = 50_000_000


class Stage:
    """One request under test, `self.sink` its client; `fill` occupies the engine so that it must wait."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.sink = RecordingSink()
        self.engine = FakeEngine("one", automatic=False, load=ONE_SLOT)
        self._running: Running | None = None
        self._fillers: list[RecordingSink] = []

    def run(self, *others: FakeEngine, **settings: object) -> Running:
        self._running = self._start([self.engine, *others], **settings)
        wait_until(lambda: all(engine.health == "up" for engine in self.service.snapshot().engines))
        return self._running

    @property
    def service(self):  # type: ignore[no-untyped-def]
        if self._running is None:
            self.run()
        assert self._running is not None
        return self._running.service

    def submit(self, **fields: object) -> None:
        self.service.submit(request(9, **{"output": STREAM, "max_tokens": 50, **fields}), self.sink)  # type: ignore[arg-type]

    def running_id(self, **fields: object) -> int:
        self.submit(**fields)
        return self.engine.wait_live(1)[0]

    def answering_id(self, **fields: object) -> int:
        seq_id = self.running_id(**fields)
        self.engine.emit([(seq_id, [1], FinishCode.RUNNING)])
        self.sink.wait_chunks(1)
        return seq_id

    def fill(self) -> None:
        for i in (1, 2):
            filler = RecordingSink()
            self._fillers.append(filler)
            self.service.submit(request(i), filler)
        self.engine.wait_live(2)

    def wait_in_queue(self, **fields: object) -> None:
        self.fill()
        self.submit(**fields)
        wait_until(lambda: sum(self.service.snapshot().waiting.values()) == 1)

    def free(self) -> None:
        """Let the fillers finish."""
        while not all(filler.ends for filler in self._fillers):
            ids = self.engine.live_ids()
            if ids:
                self.engine.emit([(seq_id, [1], FinishCode.LENGTH) for seq_id in ids])
            wait_until(lambda: bool(self.engine.live_ids()) or all(filler.ends for filler in self._fillers))


def completed_by_length(stage: Stage) -> None:
    stage.engine.emit([(stage.running_id(), [1, 2], FinishCode.LENGTH)])


def completed_by_end_token(stage: Stage) -> None:
    stage.engine.emit([(stage.running_id(), [1, 2], FinishCode.STOP)])


def completed_by_stop_word(stage: Stage) -> None:
    seq_id = stage.running_id(stop_words=("2.",))
    stage.engine.emit([(seq_id, [1, 2, 3], FinishCode.RUNNING)])
    wait_until(lambda: seq_id in stage.engine.cancelled_ids)


def completed_although_the_engine_had_died(stage: Stage) -> None:
    other = FakeEngine("two")
    stage.run(other)
    stage.submit(max_tokens=3)
    wait_until(lambda: bool(stage.engine.submits) or bool(other.submits))
    stage.engine.kill()


def refused_by_a_full_queue(stage: Stage) -> None:
    stage.run(max_queued_requests=1)
    stage.fill()
    stage.service.submit(request(3), waiting := RecordingSink())
    wait_until(lambda: sum(stage.service.snapshot().waiting.values()) == 1)
    stage._fillers.append(waiting)
    stage.submit()
    stage.sink.wait_end()
    stage.free()


def refused_while_draining(stage: Stage) -> None:
    assert stage.service.drain(5.0)
    stage.submit()


def too_long(stage: Stage) -> None:
    stage.submit(prompt_tokens=1000)


def refused_by_the_engine(stage: Stage) -> None:
    def refuse(_: EngineRequest) -> TritandemError | None:
        return InvalidRequest("bad_words", 9, "known ids")

    stage.engine = FakeEngine(refuse=refuse)
    stage.submit()


def expired_on_arrival(stage: Stage) -> None:
    stage.submit(deadline_ns=time.monotonic_ns() - 1)


def expired_in_the_queue(stage: Stage) -> None:
    stage.fill()
    stage.submit(deadline_ns=time.monotonic_ns() + IN_50_MS)  # a slow machine may see it waiting for no time at all
    stage.sink.wait_end()
    stage.free()
    assert all(int(r.prompt_ids[0]) != 9 for submit in stage.engine.submits for r in submit), "no work was wasted"


def expired_while_running(stage: Stage) -> None:
    # Far enough for a loaded machine to have it running by then.
    seq_id = stage.running_id(deadline_ns=time.monotonic_ns() + 10 * IN_50_MS)
    wait_until(lambda: seq_id in stage.engine.cancelled_ids)


def cancelled_in_the_queue(stage: Stage) -> None:
    stage.wait_in_queue()
    stage.sink.gone = True
    stage.sink.wait_end()
    stage.free()


def cancelled_while_running(stage: Stage) -> None:
    seq_id = stage.answering_id()
    stage.sink.gone = True
    wait_until(lambda: seq_id in stage.engine.cancelled_ids)


def stopped_in_the_queue(stage: Stage) -> None:
    stage.wait_in_queue()
    assert stage.service.stop("r9")
    stage.sink.wait_end()
    stage.free()


def stopped_while_running(stage: Stage) -> None:
    seq_id = stage.answering_id()
    assert stage.service.stop("r9")
    wait_until(lambda: seq_id in stage.engine.cancelled_ids)
    assert not stage.service.stop("r9")


def engine_died_with_no_other(stage: Stage) -> None:
    stage.running_id()
    stage.engine.kill()


def engine_died_in_mid_answer(stage: Stage) -> None:
    stage.run(FakeEngine("two", load=LoadSnapshot(max_sequences=4, prefill_token_ns=10**9, max_context_tokens=100)))
    stage.answering_id()
    stage.engine.kill()


def engine_reports_an_error(stage: Stage) -> None:
    stage.engine.emit([(stage.running_id(), [], FinishCode.ERROR)], errors={0: "poisoned"})


def engine_gives_up(stage: Stage) -> None:
    stage.engine.emit([(stage.running_id(), [], FinishCode.CANCELLED)])


def response_cannot_be_sent(stage: Stage) -> None:
    def broken(_: Chunk) -> None:
        raise ConnectionError("gone")

    stage.sink = RecordingSink(before_send=broken)
    seq_id = stage.running_id()
    stage.engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    wait_until(lambda: seq_id in stage.engine.cancelled_ids)


def reader_is_too_slow(stage: Stage) -> None:
    stage.run(max_buffered_chars=10, sender_threads=1)
    taken, gate = itertools.count(), __import__("threading").Event()

    def slow(_: Chunk) -> None:
        next(taken)
        assert gate.wait(5.0)

    stage.sink = RecordingSink(before_send=slow)
    seq_id = stage.running_id()
    stage.engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    wait_until(lambda: repr(taken) != "count(0)")
    stage.engine.emit([(seq_id, [10, 11, 12, 13, 14], FinishCode.RUNNING)])
    wait_until(lambda: seq_id in stage.engine.cancelled_ids)
    gate.set()


def tokens_are_unreadable(stage: Stage) -> None:
    seq_id = stage.running_id()
    stage.engine.emit([(seq_id, [UNREADABLE_TOKEN], FinishCode.RUNNING)])
    wait_until(lambda: seq_id in stage.engine.cancelled_ids)


def text_cannot_be_opened(stage: Stage) -> None:
    running = stage.run()
    running.text.fail_to_open = True
    stage.submit()


def server_shuts_down(stage: Stage) -> None:
    stage.running_id()
    stage.service.close()


EVERY_END: list[tuple[Callable[[Stage], None], Outcome, FinishReason | None]] = [
    (completed_by_length, Outcome.COMPLETED, FinishReason.LENGTH),
    (completed_by_end_token, Outcome.COMPLETED, FinishReason.STOP),
    (completed_by_stop_word, Outcome.COMPLETED, FinishReason.STOP),
    (completed_although_the_engine_had_died, Outcome.COMPLETED, FinishReason.LENGTH),
    (refused_by_a_full_queue, Outcome.REJECTED_SATURATED, None),
    (refused_while_draining, Outcome.REJECTED_SATURATED, None),
    (too_long, Outcome.REJECTED_INVALID, None),
    (refused_by_the_engine, Outcome.REJECTED_INVALID, None),
    (expired_on_arrival, Outcome.EXPIRED, None),
    (expired_in_the_queue, Outcome.EXPIRED, None),
    (expired_while_running, Outcome.EXPIRED, None),
    (cancelled_in_the_queue, Outcome.CANCELLED, None),
    (cancelled_while_running, Outcome.CANCELLED, None),
    (stopped_in_the_queue, Outcome.STOPPED, FinishReason.CANCELLED),
    (stopped_while_running, Outcome.STOPPED, FinishReason.CANCELLED),
    (engine_died_with_no_other, Outcome.FAILED, None),
    (engine_died_in_mid_answer, Outcome.FAILED, None),
    (engine_reports_an_error, Outcome.FAILED, None),
    (engine_gives_up, Outcome.FAILED, None),
    (response_cannot_be_sent, Outcome.FAILED, None),
    (reader_is_too_slow, Outcome.FAILED, None),
    (tokens_are_unreadable, Outcome.FAILED, None),
    (text_cannot_be_opened, Outcome.FAILED, None),
    (server_shuts_down, Outcome.FAILED, None),
]


@pytest.mark.parametrize(("happening", "outcome", "reason"), EVERY_END, ids=[row[0].__name__ for row in EVERY_END])
def test_every_end_happens_once_with_the_same_word_everywhere(
    start: Start, happening: Callable[[Stage], None], outcome: Outcome, reason: FinishReason | None
) -> None:
    stage = Stage(start)
    happening(stage)
    stage.sink.wait_end()
    running = stage._running
    assert running is not None
    wait_until(lambda: any(record.request_id == "r9" for record in running.observer.records))
    [record] = [record for record in running.observer.records if record.request_id == "r9"]
    assert record.outcome is outcome
    if reason is None:
        assert stage.sink.error is not None
        assert stage.sink.error.outcome is outcome
        assert record.error.startswith(outcome.value)
    else:
        assert stage.sink.chunks[-1].outcome is outcome
        assert stage.sink.chunks[-1].finish_reason is reason
    assert running.outcomes()[outcome] >= 1


def test_every_outcome_word_is_in_the_table() -> None:
    assert {outcome for _, outcome, _ in EVERY_END} == set(Outcome)


def test_late_tokens_of_an_ended_request_are_ignored(start: Start) -> None:
    stage = Stage(start)
    seq_id = stage.answering_id()
    stage.service.stop("r9")
    stage.engine.emit([(seq_id, [2, 3], FinishCode.LENGTH)])
    stage.sink.wait_end()
    wait_until(lambda: stage.service.snapshot().running == 0)
    assert stage.sink.text == "1."


def test_a_moved_request_gives_the_same_answer_with_the_same_seed(start: Start) -> None:
    first, second = FakeEngine("a", automatic=False), FakeEngine("b", load=replace_prefill())
    running = start([first, second])
    wait_until(lambda: all(engine.health == "up" for engine in running.service.snapshot().engines))
    sink = RecordingSink()
    running.service.submit(request(6, max_tokens=5, output=STREAM), sink)
    first.wait_live(1)
    first.kill()
    sink.wait_end()
    assert sink.text == text_of(answer_tokens(6, 5))
    assert second.submits[0][0].sampling == first.submits[0][0].sampling
    assert second.submits[0][0].seq_id != first.submits[0][0].seq_id


def replace_prefill() -> LoadSnapshot:
    """An engine that looks slow, so that it is the second choice."""
    return LoadSnapshot(max_sequences=4, prefill_token_ns=10**9, max_context_tokens=100)


def test_a_request_that_kills_engines_does_not_kill_them_all(start: Start) -> None:
    engines = [FakeEngine(str(i), automatic=False) for i in range(5)]
    running = start(engines)
    wait_until(lambda: all(engine.health == "up" for engine in running.service.snapshot().engines))
    sink, killed = RecordingSink(), 0
    running.service.submit(request(6), sink)
    while not sink.ends:
        wait_until(lambda: bool(sink.ends) or any(engine.live_ids() for engine in engines))
        for engine in engines:
            if engine.live_ids():
                engine.kill()
                killed += 1
    sink.wait_end()
    assert killed == 3
    assert isinstance(sink.error, EngineFailed)


def test_an_error_alone_or_a_reason_alone_ends_a_request() -> None:
    with pytest.raises(IllegalTransition):
        Ending(Outcome.COMPLETED)
    with pytest.raises(IllegalTransition):
        Ending(Outcome.CANCELLED, reason=FinishReason.CANCELLED, error=RequestCancelled("both"))


@pytest.mark.parametrize(("origin", "to"), list(itertools.product(State, State)))
def test_only_the_arrows_of_the_table_exist(origin: State, to: State) -> None:
    life = Life()
    life.state = origin
    if origin is State.ENDED:
        assert not life.advance(to)
    elif to in ALLOWED[origin] and to is not State.ENDED:
        assert life.advance(to)
        assert life.state is to
    else:
        with pytest.raises(IllegalTransition):
            life.advance(to)


def test_only_the_first_end_counts() -> None:
    life = Life()
    assert life.end(STOP_WORD)
    assert not life.end(CLIENT_GONE)
    assert life.ending is STOP_WORD


def test_an_engine_that_gives_up_unasked_has_failed() -> None:
    assert ended_by_engine(FinishCode.CANCELLED, None).outcome is Outcome.FAILED
    assert ended_by_engine(FinishCode.STOP, None).outcome is Outcome.COMPLETED
