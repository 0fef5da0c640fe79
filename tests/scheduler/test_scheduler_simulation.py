"""Claims about waits under load: one fixed trace of arrivals, replayed through the queue against simulated time."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass

from tritandem.contracts.requests import PriorityClass
from tritandem.scheduler.policy.waiting import PolicyConfig, Waiting
from tritandem.scheduler.waiting_queue import WaitingQueue

S = 1_000_000_000
SLOTS = 16
STEP_NS = 20_000_000


@dataclass(frozen=True)
class Arrival:
    at_ns: int
    priority: PriorityClass
    tenant: str
    output_tokens: int


def trace(seconds: int, load: float, mix: dict[PriorityClass, float], seed: int = 7) -> list[Arrival]:
    """Bursty arrivals (gamma gaps, shape 0.5) offering `load` times what the slots can serve."""
    rng = random.Random(seed)
    classes, weights = list(mix), list(mix.values())
    mean_tokens = {PriorityClass.INTERACTIVE: 40, PriorityClass.NORMAL: 100, PriorityClass.BATCH: 200}
    mean = sum(weight * mean_tokens[its] for its, weight in mix.items()) / sum(weights)
    mean_gap_ns = mean * STEP_NS / SLOTS / load
    arrivals, now_ns = [], 0.0
    while now_ns < seconds * S:
        now_ns += rng.gammavariate(0.5, mean_gap_ns / 0.5)
        its = rng.choices(classes, weights)[0]
        tokens = max(1, int(rng.expovariate(1 / mean_tokens[its])))
        arrivals.append(Arrival(int(now_ns), its, rng.choice("xyz"), tokens))
    return arrivals


def replay(arrivals: list[Arrival], policy: PolicyConfig, by_class: bool = True) -> list[tuple[Arrival, int]]:
    """(arrival, start time) in order of start; `by_class` false: all are NORMAL, that is first come first served."""
    queue: WaitingQueue[int] = WaitingQueue(policy)
    busy_until: list[int] = []
    started: list[tuple[Arrival, int]] = []
    order = iter(enumerate(arrivals))
    upcoming = next(order, None)
    now_ns = 0
    while upcoming is not None or len(queue):
        while upcoming is not None and upcoming[1].at_ns <= now_ns:
            number, arrival = upcoming
            priority = arrival.priority if by_class else PriorityClass.NORMAL
            entry = Waiting(number, priority, arrival.tenant, arrival.at_ns, None, arrival.output_tokens)
            queue.push(entry, number, now_ns)
            upcoming = next(order, None)
        while busy_until and busy_until[0] <= now_ns:
            heapq.heappop(busy_until)
        while len(busy_until) < SLOTS and (first := queue.peek(now_ns)) is not None:
            queue.take(first)
            arrival = arrivals[first]
            started.append((arrival, now_ns))
            heapq.heappush(busy_until, now_ns + arrival.output_tokens * STEP_NS)
        events = ([upcoming[1].at_ns] if upcoming else []) + busy_until[:1]
        now_ns = min(events, default=now_ns)
    return started


def p99_wait_s(started: list[tuple[Arrival, int]]) -> dict[PriorityClass, float]:
    waits: dict[PriorityClass, list[int]] = defaultdict(list)
    for arrival, start_ns in started:
        waits[arrival.priority].append(start_ns - arrival.at_ns)
    return {its: sorted(values)[int(0.99 * (len(values) - 1))] / S for its, values in waits.items()}


MIX = {PriorityClass.INTERACTIVE: 0.3, PriorityClass.NORMAL: 0.3, PriorityClass.BATCH: 0.4}


def test_interactive_waits_stay_short_while_batch_saturates_the_engine() -> None:
    arrivals = trace(seconds=200, load=1.1, mix=MIX)
    ours = p99_wait_s(replay(arrivals, PolicyConfig(ageing_ns=60 * S)))
    plain = p99_wait_s(replay(arrivals, PolicyConfig(ageing_ns=60 * S), by_class=False))
    assert ours[PriorityClass.INTERACTIVE] < 1.0
    assert ours[PriorityClass.INTERACTIVE] < plain[PriorityClass.INTERACTIVE] / 10
    assert ours[PriorityClass.INTERACTIVE] <= ours[PriorityClass.NORMAL] <= ours[PriorityClass.BATCH]


def test_every_request_starts_and_none_is_overtaken_by_those_that_came_much_later() -> None:
    """Though interactive requests are twice what can be served, batch is passed for three ageing periods at most."""
    ageing_ns = 5 * S
    mix = {PriorityClass.INTERACTIVE: 0.9, PriorityClass.BATCH: 0.1}
    arrivals = trace(seconds=60, load=2.0, mix=mix)
    started = replay(arrivals, PolicyConfig(ageing_ns=ageing_ns, fair_share=False))
    assert len(started) == len(arrivals)
    latest_ns = 0
    for arrival, _ in started:
        assert latest_ns - arrival.at_ns < 3 * ageing_ns
        latest_ns = max(latest_ns, arrival.at_ns)


def test_tenants_are_served_alike_though_one_asks_for_ten_times_as_much() -> None:
    """While both wait, neither tenant gets more than a quantum and one answer ahead of the other."""
    rng = random.Random(3)
    arrivals = [Arrival(0, PriorityClass.NORMAL, "greedy", rng.randrange(50, 200)) for _ in range(1000)]
    arrivals += [Arrival(0, PriorityClass.NORMAL, "modest", rng.randrange(50, 200)) for _ in range(100)]
    started = replay(arrivals, PolicyConfig(ageing_ns=10**15, quantum_tokens=1000))
    served = {"greedy": 0, "modest": 0}
    left = 100
    for arrival, _ in started:
        served[arrival.tenant] += arrival.output_tokens
        left -= arrival.tenant == "modest"
        if left == 0:
            break
        assert abs(served["greedy"] - served["modest"]) <= 1000 + 400
    assert left == 0
