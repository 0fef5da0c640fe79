"""Claims about asking clients whether they are still there."""

from __future__ import annotations

from weakref import ref

import pytest
from tritandem.contracts.stream import LoadSnapshot
from tritandem.scheduler.cancel_watch import Ring, call_cost_s, questions
from tritandem.scheduler.lifecycle import CLIENT_GONE
from tritandem.scheduler.ticket import Ticket

from tests.fakes.engine_port import FakeEngine
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink


def ticket(number: int, tenant: str = "") -> Ticket:
    return Ticket(number, request(number, tenant=tenant), RecordingSink(), 0)


def test_few_streams_are_asked_every_poll_interval() -> None:
    assert questions(streams=10, cost_s=50e-6, poll_s=0.1, budget_share=0.02, elapsed_s=0.05) == pytest.approx(5)
    assert questions(streams=0, cost_s=50e-6, poll_s=0.1, budget_share=0.02, elapsed_s=0.05) == 0


@pytest.mark.parametrize("streams", [1, 40, 1000, 10_000])
def test_the_cost_stays_within_the_budget_however_many_streams_there_are(streams: int) -> None:
    cost_s = 100e-6
    assert questions(streams, cost_s, poll_s=0.1, budget_share=0.02, elapsed_s=1.0) * cost_s <= 0.02 * 1.0001


def test_a_call_is_charged_for_the_threads_it_wakes_but_never_more_than_it_took() -> None:
    assert call_cost_s(wall_s=0.001, cpu_s=10e-6) == pytest.approx(80e-6)
    assert call_cost_s(wall_s=20e-6, cpu_s=10e-6) == pytest.approx(20e-6)


def test_everybody_has_a_turn_and_the_ended_leave() -> None:
    ring, tickets = Ring(), [ticket(i) for i in range(3)]
    for one in tickets:
        ring.add(ref(one))
    assert [ring.next() for _ in range(4)] == [*tickets, tickets[0]]
    tickets[1].life.end(CLIENT_GONE)
    assert [ring.next() for _ in range(3)] == [tickets[2], tickets[0], tickets[2]]
    assert len(ring) == 2


def test_a_request_that_is_over_is_not_kept_until_its_turn() -> None:
    ring, waiting = Ring(), ticket(0)
    ring.add(ref(waiting))
    refused = [ref(ticket(i)) for i in range(1, 100)]
    for entry in refused:
        ring.add(entry)
    assert not any(entry() for entry in refused)
    assert [ring.next(), ring.next(), len(ring)] == [waiting, waiting, 1]


def test_neighbours_of_one_that_has_gone_are_asked_at_once() -> None:
    ring = Ring()
    tickets = [ticket(i, tenant="dead" if i % 2 else "alive") for i in range(10)]
    for one in tickets:
        ring.add(ref(one))
    ring.next()
    gone = ring.next()
    assert gone is tickets[1]
    gone.life.end(CLIENT_GONE)
    ring.found_gone(gone)
    assert [ring.next() for _ in range(4)] == [tickets[3], tickets[5], tickets[7], tickets[9]]


def test_a_client_that_leaves_frees_the_engine_soon(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=LoadSnapshot(max_sequences=64, max_context_tokens=999))
    running = start([engine], cancel_poll_s=0.02)
    sinks = [RecordingSink() for _ in range(20)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1), sink)
    engine.wait_live(20)
    for sink in sinks:
        sink.gone = True
    for sink in sinks:
        sink.wait_end()
    wait_until(lambda: not engine.live_ids())


def test_a_sink_that_cannot_tell_is_taken_to_be_there(start: Start) -> None:
    class Mute(RecordingSink):
        def cancelled(self) -> bool:
            self.asked += 1
            raise RuntimeError("no answer")

    engine, sink = FakeEngine(automatic=False), Mute()
    running = start([engine])
    running.service.submit(request(3), sink)
    [seq_id] = engine.wait_live(1)
    wait_until(lambda: sink.asked > 3)
    from tritandem.contracts.stream import FinishCode

    engine.emit([(seq_id, [1], FinishCode.LENGTH)])
    sink.wait_end()
    assert sink.error is None
