"""Claims about what a class leaves free for those above it: enough that they need not wait, never more than is used."""

from __future__ import annotations

import random
from dataclasses import replace

from tritandem.contracts.requests import PriorityClass
from tritandem.contracts.stream import FinishCode, LoadSnapshot
from tritandem.scheduler.policy.order import first
from tritandem.scheduler.policy.reserve import Share, held_back, may_start
from tritandem.scheduler.policy.waiting import PolicyConfig, Waiting
from tritandem.scheduler.recent_demand import WINDOW_NS, RecentDemand
from tritandem.scheduler.waiting_queue import WaitingQueue

from tests.fakes.engine_port import FakeEngine
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink

INTERACTIVE, NORMAL, BATCH = PriorityClass
SHARE = Share(sequences=12, tokens=1000, max_sequences=16, max_tokens=1600)
S = 1_000_000_000
EIGHT = LoadSnapshot(total_blocks=4096, free_blocks=4096, block_tokens=16, max_sequences=8, max_context_tokens=32768)


def test_as_much_is_held_back_as_was_used_and_a_quarter_at_most() -> None:
    assert [held_back(16, lately) for lately in (0, 1, 3, 4, 5, 99)] == [0, 1, 3, 4, 4, 4]
    assert held_back(3, 5) == 0, "an engine of three places has none to spare"


def test_nothing_is_held_back_for_classes_that_nobody_uses() -> None:
    assert may_start(replace(SHARE, sequences=99), 10**6, lately_above=0)


def test_places_and_tokens_are_held_back_in_the_same_proportion() -> None:
    assert may_start(replace(SHARE, sequences=13), 200, lately_above=2)
    assert not may_start(replace(SHARE, sequences=14), 200, lately_above=2)
    assert may_start(SHARE, 400, lately_above=2)
    assert not may_start(SHARE, 401, lately_above=2)
    assert may_start(replace(SHARE, sequences=0, tokens=0), 10**6, lately_above=2), "one of any size passes"
    assert may_start(replace(SHARE, max_tokens=0), 10**6, lately_above=2), "an engine that has not said its size"


def test_demand_is_the_most_at_one_time_and_is_forgotten_after_two_windows() -> None:
    demand = RecentDemand(0)
    for _ in range(3):
        demand.arrived(INTERACTIVE, 1)
    for _ in range(3):
        demand.ended(INTERACTIVE)
    demand.arrived(NORMAL, 1)
    assert [demand.above(one, 2) for one in PriorityClass] == [0, 3, 4]
    assert demand.above(BATCH, WINDOW_NS + 1) == 4
    assert demand.above(BATCH, 2 * WINDOW_NS + 1) == 1, "the normal one still runs"
    demand.ended(NORMAL)
    assert demand.above(BATCH, 9 * WINDOW_NS) == 0


def test_the_first_of_the_classes_above_is_the_one_that_the_rules_name() -> None:
    rng, policy = random.Random(5), PolicyConfig(ageing_ns=S // 2, quantum_tokens=100)
    queue: WaitingQueue[int] = WaitingQueue(policy)
    waiting = []
    for number in range(200):
        deadline_ns = rng.randrange(9 * S) if rng.random() < 0.3 else None
        priority, tenant = rng.choice(list(PriorityClass)), rng.choice("abc")
        waiting.append(Waiting(number, priority, tenant, number * S // 100, deadline_ns, rng.randrange(1, 500)))
        queue.push(waiting[-1], number, waiting[-1].arrived_ns)
    now_ns = 3 * S
    while above := [entry for entry in waiting if entry.priority < BATCH]:
        expected = first(above, now_ns, policy, queue.served_tokens())
        assert queue.peek_above(BATCH, now_ns) == expected.number
        queue.take(expected.number)
        waiting.remove(expected)
    assert queue.peek_above(BATCH, now_ns) is None
    assert queue.peek(now_ns) is not None


def test_interactive_finds_a_place_though_an_aged_backlog_waits_before_it(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=EIGHT)
    running = start([engine], ageing_s=0.001, prefix_affinity=False)

    def submit(priority: PriorityClass, count: int) -> list[RecordingSink]:
        sinks = [RecordingSink() for _ in range(count)]
        for sink in sinks:
            running.service.submit(request(3, max_tokens=1, priority=priority), sink)
        return sinks

    def end(count: int) -> None:
        engine.emit([(seq_id, [1], FinishCode.LENGTH) for seq_id in engine.live_ids()[:count]])

    [known] = submit(INTERACTIVE, 1)
    engine.wait_live(1)
    end(1)
    known.wait_end()
    backlog = submit(BATCH, 20)
    engine.wait_live(7)
    [urgent] = submit(INTERACTIVE, 1)
    engine.wait_live(8)
    assert running.service.snapshot().waiting[BATCH] == 13
    engine.emit([(engine.live_ids()[-1], [1], FinishCode.LENGTH)])
    urgent.wait_end()
    while not all(sink.ends for sink in backlog):
        end(8)
        wait_until(lambda: bool(engine.live_ids()) or all(sink.ends for sink in backlog))


def test_batch_is_not_starved_by_interactive_requests_that_never_cease(start: Start) -> None:
    engine = FakeEngine(load=EIGHT)
    running = start([engine], ageing_s=0.01, prefix_affinity=False)
    batch = RecordingSink()
    stream = [RecordingSink() for _ in range(400)]
    for index, sink in enumerate(stream):
        running.service.submit(request(3, max_tokens=20, priority=INTERACTIVE), sink)
        if index == 40:
            running.service.submit(request(4, max_tokens=1, priority=BATCH), batch)
    batch.wait_end()
    assert batch.error is None
    for sink in stream:
        sink.wait_end()
