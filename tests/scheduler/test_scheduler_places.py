"""Claims about who may hold how many waiting places, and about when to come again."""

from __future__ import annotations

import random
import time
from collections import Counter, deque

import pytest
from tritandem.contracts.errors import Saturated
from tritandem.contracts.requests import PriorityClass
from tritandem.contracts.stream import LoadSnapshot
from tritandem.scheduler.admission import Backlog, QueueState
from tritandem.scheduler.policy.places import may_hold
from tritandem.scheduler.recent_pace import LEAST_NS, RecentPace

from tests.fakes.engine_port import FakeEngine
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink

ONE_PLACE = LoadSnapshot(max_sequences=1, total_blocks=4096, free_blocks=4096, block_tokens=16)


def filled(limit: int, tenants: int) -> Counter[int]:
    """What tenants hold that ask in turn until nobody gets any more."""
    held: Counter[int] = Counter()
    asking = deque(range(tenants))
    while asking:
        tenant = asking.popleft()
        if may_hold(held[tenant], held.total(), limit):
            held[tenant] += 1
            asking.append(tenant)
    return held


@pytest.mark.parametrize(("tenants", "each"), [(1, 896), (2, 477), (9, 112)])
def test_greedy_tenants_get_alike_and_a_newcomer_finds_a_place(tenants: int, each: int) -> None:
    held = filled(1024, tenants)
    assert all(abs(count - each) <= 2 for count in held.values())
    assert may_hold(0, held.total(), 1024)


def test_a_single_place_may_be_taken_by_anybody_but_never_twice() -> None:
    assert may_hold(0, 0, 1)
    assert not may_hold(0, 1, 1)
    assert not may_hold(1, 1, 1)


def test_a_flood_of_one_tenant_shuts_out_neither_another_nor_its_own_higher_class(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=ONE_PLACE)
    running = start([engine], max_queued_requests=64, tick_s=0.0)

    def submit(tenant: str, priority: PriorityClass) -> RecordingSink:
        running.service.submit(request(tenant=tenant, priority=priority), sink := RecordingSink())
        return sink

    flood = [submit("flood", PriorityClass.NORMAL) for _ in range(200)]
    wait_until(lambda: sum(sink.ends for sink in flood) + len(running.service._open) == 200)
    wait_until(lambda: sum(running.service.snapshot().waiting.values()) == 56)
    assert isinstance(running.service.refusal("flood", PriorityClass.NORMAL), Saturated)
    assert running.service.refusal("flood", PriorityClass.INTERACTIVE) is None
    others = [submit("other", PriorityClass.NORMAL), submit("flood", PriorityClass.INTERACTIVE)]
    wait_until(lambda: sum(running.service.snapshot().waiting.values()) == 58)
    running.service.check_integrity()
    assert not any(sink.ends for sink in others)
    refused = [sink.error for sink in flood if sink.ends]
    assert refused
    assert all(isinstance(error, Saturated) for error in refused)
    running.service.stop("r1")  # the id of them all


def test_the_hint_is_right_within_a_factor_of_two_when_answers_are_shorter_than_their_budgets() -> None:
    """Sixteen slots work off a full queue whose answers use anything between a tenth and a half of their budgets."""
    rng, pace, step_ns = random.Random(5), RecentPace(), 20_000_000
    queue = deque(rng.randrange(50, 250) for _ in range(4000))
    slots: list[tuple[int, int]] = []  # when it ends, budget
    hints: list[tuple[int, float]] = []
    now_ns = 10**12
    while queue or slots:
        pace.waiting(bool(queue), now_ns)
        while queue and len(slots) < 16:
            budget = queue.popleft()
            slots.append((now_ns + int(budget * rng.uniform(0.1, 0.5)) * step_ns, budget))
        state = QueueState(len(queue), 0, sum(queue))
        tokens_per_s = pace.tokens_per_s(now_ns)
        if queue and tokens_per_s:
            backlog = Backlog(state, state, LoadSnapshot(decode_step_ns=1), tokens_per_s=tokens_per_s)
            hints.append((now_ns, backlog.retry_after_s()))
        if not queue:
            emptied_ns = now_ns
            break
        now_ns = min(ends_ns for ends_ns, _ in slots)
        for slot in [slot for slot in slots if slot[0] <= now_ns]:
            slots.remove(slot)
            pace.ended(slot[1])
    told = [(hint_s, (emptied_ns - at_ns) / 1e9) for at_ns, hint_s in hints if (emptied_ns - at_ns) / 1e9 < 600]
    assert len(told) > 100
    for hint_s, true_s in told[: len(told) * 9 // 10]:  # towards the end single answers decide
        assert true_s / 2 < hint_s < true_s * 2


def test_a_pace_is_that_of_a_time_in_which_somebody_waited() -> None:
    pace, now_ns = RecentPace(), time.monotonic_ns()
    pace.waiting(True, now_ns)
    pace.ended(500)
    assert pace.tokens_per_s(now_ns + LEAST_NS - 1) == 0
    assert pace.tokens_per_s(now_ns + LEAST_NS) == 500
    pace.waiting(False, now_ns + LEAST_NS)
    pace.waiting(True, now_ns + 10 * LEAST_NS)
    pace.ended(100)
    assert pace.tokens_per_s(now_ns + 12 * LEAST_NS) == 50
