"""Claims about settings, the snapshot and the public methods."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from tritandem.config import SchedulerConfig
from tritandem.contracts.answers import Chunk
from tritandem.contracts.errors import Outcome
from tritandem.contracts.requests import PriorityClass
from tritandem.contracts.stream import FinishCode, LoadSnapshot
from tritandem.scheduler import SchedulerService, core
from tritandem.scheduler.core import DUES_KEPT
from tritandem.scheduler.early_stops import MAX_REMEMBERED, EarlyStops
from tritandem.scheduler.ports import SchedulerSnapshot
from tritandem.telemetry.heartbeat import Busy

from tests.fakes.engine_port import FakeEngine
from tests.fakes.scheduling import RecordingObserver, Start, request, wait_until
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import FakeTextStreams

SMALL = LoadSnapshot(max_sequences=1, total_blocks=10, free_blocks=10, block_tokens=16)
SLOW = LoadSnapshot(max_sequences=64, max_context_tokens=4096, decode_step_ns=10**9, prefill_token_ns=1000)


def finish_all(engine: FakeEngine, sinks: list[RecordingSink]) -> None:
    while not all(sink.ends for sink in sinks):
        engine.emit([(seq_id, [1], FinishCode.LENGTH) for seq_id in engine.live_ids()])
        wait_until(lambda: bool(engine.live_ids()) or all(sink.ends for sink in sinks))


def test_limits_follow_a_slow_engine_and_show_in_the_snapshot(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=SLOW)
    running = start([engine])
    engine.set_load(steps=100)
    wait_until(lambda: running.service.snapshot().engines[0].limits.sequences in (8, 64))
    sinks = [RecordingSink() for _ in range(20)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1), sink)
    engine.wait_live(20)
    engine.emit([(engine.live_ids()[0], [1], FinishCode.RUNNING)])
    wait_until(lambda: running.service.snapshot().engines[0].limits.sequences == 17)
    finish_all(engine, sinks)


def test_the_switch_keeps_the_limits_where_the_engine_put_them(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False, load=replace(SLOW, steps=100)), RecordingSink()
    running = start([engine], dynamic_batch=False)
    running.service.submit(request(3), sink)
    [seq_id] = engine.wait_live(1)
    engine.set_load(steps=1000)
    engine.emit([(seq_id, [1], FinishCode.RUNNING)])
    wait_until(lambda: running.service.snapshot().engines[0].limits.decided_at_step == 1000)
    assert running.service.snapshot().engines[0].limits.sequences == 64
    finish_all(engine, [sink])


def test_the_snapshot_counts_what_waits_runs_and_has_ended(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=SMALL)
    running = start([engine])
    sinks = [RecordingSink() for _ in range(4)]
    for i, sink in enumerate(sinks):
        priority = PriorityClass.BATCH if i > 1 else PriorityClass.NORMAL
        running.service.submit(request(i + 1, priority=priority), sink)
    engine.wait_live(2)
    wait_until(lambda: running.service.snapshot().waiting[PriorityClass.BATCH] == 2)
    snapshot = running.service.snapshot()
    assert (snapshot.running, sum(snapshot.waiting.values())) == (2, 2)
    finish_all(engine, sinks)
    wait_until(lambda: len(running.observer.records) == 4)
    assert running.outcomes() == {Outcome.COMPLETED: 4}


def test_stop_ends_all_requests_of_an_id_and_nobody_else(start: Start) -> None:
    engine = FakeEngine(automatic=False)
    running = start([engine])
    twins, other = [RecordingSink(), RecordingSink()], RecordingSink()
    for sink in twins:
        running.service.submit(request(1, request_id="twin"), sink)
    running.service.submit(request(2, request_id=""), other)
    engine.wait_live(3)
    assert not running.service.stop("nobody")
    assert not running.service.stop("")
    assert running.service.stop("twin")
    for sink in twins:
        sink.wait_end()
    assert not other.ends
    wait_until(lambda: len(engine.live_ids()) == 1)
    finish_all(engine, [other])


def test_a_stop_that_overtakes_its_request_ends_it_on_arrival_and_no_later_one(start: Start) -> None:
    """The text of the first was still with the tokenizer when the stop came."""
    engine = FakeEngine(automatic=False)
    running = start([engine])
    before_ns = time.monotonic_ns()
    assert not running.service.stop("r")
    overtaken, later = RecordingSink(), RecordingSink()
    running.service.submit(request(1, request_id="r", received_ns=before_ns), overtaken)
    overtaken.wait_end()
    assert (overtaken.text, overtaken.chunks[-1].outcome) == ("", Outcome.STOPPED)
    running.service.submit(request(2, request_id="r", received_ns=time.monotonic_ns()), later)
    engine.wait_live(1)
    finish_all(engine, [later])
    assert later.chunks[-1].outcome is Outcome.COMPLETED


def test_only_so_many_stops_are_remembered() -> None:
    stops = EarlyStops()
    for i in range(MAX_REMEMBERED + 1):
        stops.note(str(i), 10)
    assert not stops.mean("0", 5)
    assert stops.mean("1", 5)
    assert not stops.mean("1", 11)
    stops.note("1", 20)
    stops.note("more", 20)
    assert stops.mean("1", 15), "a stop again makes it the newest"


def test_a_bug_met_on_arrival_fails_that_request_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start([FakeEngine()])
    with monkeypatch.context() as patch:
        patch.setattr(core, "prefix_hashes", lambda ids, salt: 1 // 0)
        running.service.submit(request(3), broken := RecordingSink())
        broken.wait_end()
    assert broken.error is not None
    assert broken.error.public_message() == "FAILED: internal error (ZeroDivisionError)"
    running.service.submit(request(4), sound := RecordingSink())
    sound.wait_end()
    assert sound.error is None


@pytest.mark.parametrize(
    ("deadline_s", "words"),
    [(None, "not complete within 0.05 s"), (60.0, "(max_request_s)"), (0.01, "the deadline")],
)
def test_no_request_takes_longer_than_the_operator_allows(start: Start, deadline_s: float | None, words: str) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    running, now_ns = start([engine], max_request_s=0.05), time.monotonic_ns()
    deadline_ns = None if deadline_s is None else now_ns + int(deadline_s * 1e9)
    running.service.submit(request(3, received_ns=now_ns, deadline_ns=deadline_ns), sink)
    sink.wait_end()
    assert sink.error is not None
    assert (sink.error.outcome, words in str(sink.error)) == (Outcome.EXPIRED, True)
    wait_until(lambda: running.service.snapshot().running == 0)


def test_deadlines_of_requests_that_ended_in_time_are_not_kept_for_ever(start: Start) -> None:
    running = start([FakeEngine()], max_queued_requests=10_000)
    core = running.service._core
    far_ns = time.monotonic_ns() + 10**12
    sinks = [RecordingSink() for _ in range(DUES_KEPT + 200)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1, max_tokens=1, deadline_ns=far_ns), sink)
    for sink in sinks:
        sink.wait_end(10.0)
    wait_until(lambda: len(core._dues) < DUES_KEPT and not core._due)


def test_a_damaged_book_is_found(start: Start) -> None:
    running = start([FakeEngine()])
    [book] = running.service._core._books.values()
    book.committed_tokens += 1
    with pytest.raises(AssertionError, match="committed tokens"):
        running.service.check_integrity()
    book.committed_tokens -= 1


def test_an_observer_that_fails_does_no_harm(start: Start) -> None:
    running, sink = start([FakeEngine()]), RecordingSink()
    good, seen = running.observer.finished, []

    def broken(record: object) -> None:
        seen.append(record)
        good(record)  # type: ignore[arg-type]
        raise RuntimeError("metrics are down")

    running.observer.finished = broken  # type: ignore[method-assign]
    running.service.submit(request(3), sink)
    sink.wait_end()
    wait_until(lambda: len(seen) == 1)


def test_messages_without_rows_carry_only_load(start: Start) -> None:
    engine, sink = FakeEngine(automatic=False), RecordingSink()
    running = start([engine])
    running.service.submit(request(3), sink)
    [seq_id] = engine.wait_live(1)
    engine.set_load(steps=77)
    engine.emit([])
    wait_until(lambda: running.service.snapshot().engines[0].load.steps == 77)
    engine.emit([(seq_id, [1], FinishCode.LENGTH)])
    sink.wait_end()


class StuckObserver(RecordingObserver):
    """Its first gauges do not come back before `leave` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.leave = threading.Event(), threading.Event()

    def gauges(self, snapshot: SchedulerSnapshot) -> None:
        self.inside.set()
        assert self.leave.wait(60)


def test_a_response_and_a_round_that_do_not_come_back_are_seen_from_outside() -> None:
    in_send, in_round, observer = Busy("a send", 1.0), Busy("a round", 1.0), StuckObserver()
    service = SchedulerService(
        [FakeEngine()], FakeTextStreams(), SchedulerConfig(), observer, in_round=in_round, in_send=in_send
    )
    service.start()
    assert observer.inside.wait(60)
    assert in_round.oldest_ns() is not None
    observer.leave.set()
    inside, leave = threading.Event(), threading.Event()

    def hang(chunk: Chunk) -> None:
        inside.set()
        assert leave.wait(60)

    sink = RecordingSink(hang)
    service.submit(request(3), sink)
    assert inside.wait(60)
    assert in_send.oldest_ns() is not None
    leave.set()
    sink.wait_end(60)
    service.close()
    assert in_send.oldest_ns() is in_round.oldest_ns() is None
