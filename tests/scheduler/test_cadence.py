"""Claims about when a stream is sent to: first and last answers at once, and between them everybody in turn."""

from __future__ import annotations

import random
from contextlib import nullcontext

from tritandem.contracts.errors import Outcome
from tritandem.contracts.requests import OutputOptions
from tritandem.contracts.stream import FinishReason, LoadSnapshot
from tritandem.scheduler.cadence import LEAST_NS, MOST_COST_NS, TICK_NS, Cadence
from tritandem.scheduler.desk import Desk
from tritandem.scheduler.lifecycle import Ending, State
from tritandem.scheduler.senders import COSTED, Senders
from tritandem.scheduler.ticket import Ticket

from tests.fakes.engine_port import FakeEngine, answer_tokens
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import text_of

MS = 1_000_000
STREAM = OutputOptions(stream=True)
DONE = Ending(Outcome.COMPLETED, FinishReason.LENGTH)


class Counter:
    """A desk at a time of its own, with `streams` that have had their first response at 0, in the order of numbers."""

    def __init__(self, streams: int, share: float = 0.5, cost_ns: int = 100_000) -> None:
        self.now_ns = 0
        self.cadence = Cadence(share)
        for _ in range(200):
            self.cadence.note_cost(cost_ns, 1)
        self.desk = Desk(1000, lambda ticket: None, self.cadence, lambda: self.now_ns)
        self.tickets = [self.newcomer(number) for number in range(streams)]
        for ticket in self.tickets:
            self.say(ticket)
        for ticket in self.tickets:
            assert self.taken() is ticket
            self.back(ticket)

    def newcomer(self, number: int) -> Ticket:
        ticket = Ticket(number, request(number, output=STREAM), RecordingSink(), 0)
        for state in (State.WAITING, State.DISPATCHED):
            if ticket.life.state is not state:
                ticket.life.advance(state)
        return ticket

    def say(self, ticket: Ticket, text: str = "x") -> None:
        with self.desk.lock:
            self.desk.append(ticket, text, 1)

    def taken(self) -> Ticket | None:
        """Whose turn it is; None: nobody's yet."""
        with self.desk.lock:
            while (ticket := self.desk._next()) is not None:
                if self.desk._pack(ticket) is not None:
                    return ticket
        return None

    def back(self, ticket: Ticket) -> None:
        """A sender is done with it."""
        ticket.sending = False


def test_an_interval_is_what_all_streams_take_in_the_share_of_the_senders_time_that_they_have() -> None:
    cadence = Cadence(0.5)
    for _ in range(200):
        cadence.note_cost(32 * 100_000, 32)
    cadence.streams = 256
    assert abs(cadence.interval_ns() - 51_200_000) < MS
    for _ in range(200):
        cadence.note_cost(32 * 5 * MOST_COST_NS, 32)
    assert cadence.interval_ns() == 256 * MOST_COST_NS * 2, "a busy machine does not make streams stand still"
    cadence.streams = 3
    assert cadence.interval_ns() == 0, "so few streams need no interval"
    never = Cadence(1.0)
    never.streams = 1000
    assert never.interval_ns() == 0


def test_a_stream_gets_its_next_response_an_interval_after_the_last_with_all_since() -> None:
    stage = Counter(100)
    first = stage.tickets[0]
    interval_ns = stage.cadence.interval_ns()
    assert interval_ns > LEAST_NS
    for now_ns in range(MS, interval_ns, interval_ns // 5):
        stage.now_ns = now_ns
        stage.say(first)
        assert stage.taken() is None
    stage.now_ns = interval_ns + TICK_NS
    assert len(first.texts) == 5
    assert stage.taken() is first
    assert not first.texts


def test_who_was_sent_to_longest_ago_is_next_however_late_its_text_comes() -> None:
    stage = Counter(100)
    for number, ticket in enumerate(stage.tickets):
        stage.now_ns = number * TICK_NS
        ticket.taken_ns = stage.now_ns
    stage.now_ns = 150 * TICK_NS
    late, order = stage.tickets[::-1], []
    for ticket in late:
        stage.say(ticket)
    stage.now_ns += 10 * stage.cadence.interval_ns()
    while (ticket := stage.taken()) is not None:
        order.append(ticket.number)
    waited = [number for number in order if number * TICK_NS + stage.cadence.interval_ns() > 150 * TICK_NS]
    assert waited == sorted(waited)
    assert sorted(order) == list(range(100))


def test_a_first_answer_and_a_last_one_wait_for_no_interval() -> None:
    stage = Counter(100)
    stage.now_ns = MS
    resting, ending = stage.tickets[:2]
    for ticket in (resting, ending):
        stage.say(ticket)
    assert stage.taken() is None
    stage.desk.end(ending, DONE)
    newcomer = stage.newcomer(1000)
    stage.say(newcomer)
    assert stage.taken() is newcomer
    assert stage.taken() is ending
    assert stage.taken() is None
    assert stage.cadence.streams == 100, "one has come and one has gone"
    stage.now_ns = stage.cadence.interval_ns() + TICK_NS
    assert stage.taken() is resting
    assert stage.taken() is None, "an older place of one that has ended is passed over"


def test_what_a_response_takes_is_time_in_a_sender_s_hands_and_not_its_rest() -> None:
    """One sender; each response takes 3 ms of this test's clock, and a second passes before the next has text."""
    stage = Counter(0, share=1.0)

    def send(chunk: object) -> None:
        stage.now_ns += 3 * MS

    ticket = stage.newcomer(1)
    ticket.sink = RecordingSink(before_send=send)
    ended: list[Ticket] = []
    senders = Senders(stage.desk, 1, lambda: stage.now_ns, ended.append, nullcontext())
    before_ns = stage.cadence._cost_ns
    senders.start()
    for number in range(2 * COSTED):
        wait_until(lambda: stage.desk._idle_senders == 1)
        stage.now_ns += 1000 * MS
        stage.say(ticket)
        wait_until(lambda number=number: len(ticket.sink.chunks) > number)
    stage.desk.end(ticket, DONE)
    wait_until(lambda: ended == [ticket])
    stage.desk.close()
    assert senders.join(5.0)
    assert before_ns < stage.cadence._cost_ns < 3 * MS


def test_streams_that_come_end_and_are_stopped_at_random_are_complete_and_leave_no_count(start: Start) -> None:
    rng = random.Random(7)
    engine = FakeEngine(load=LoadSnapshot(max_sequences=256, max_context_tokens=4096))
    running = start([engine], sender_threads=3, sender_share=0.2)
    sinks = {}
    for i in range(1, 161):
        length = rng.randrange(1, 200)
        sinks[i] = (RecordingSink(), length, rng.random() < 0.3)
        running.service.submit(request(i, max_tokens=length, output=STREAM), sinks[i][0])
    for i, (_, _, stopped) in sinks.items():
        if stopped:
            running.service.stop(f"r{i}")
    for i, (sink, length, stopped) in sinks.items():
        sink.wait_end(20.0)
        whole = text_of(answer_tokens(i, length))
        assert whole.startswith(sink.text) if stopped else sink.text == whole
        assert not sink.violations
    assert running.service._desk.cadence.streams == 0
