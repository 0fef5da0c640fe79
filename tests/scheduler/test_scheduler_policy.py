"""Claims about the order, rule by rule, and about the fast queue being the slow definition."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from tritandem.contracts.requests import PriorityClass
from tritandem.scheduler.policy.ageing import next_lift_ns, rank
from tritandem.scheduler.policy.deadline import too_late
from tritandem.scheduler.policy.fair_share import band, opening_balance
from tritandem.scheduler.policy.order import first
from tritandem.scheduler.policy.prefix import MAX_HEAD_START_NS, head_start_ns
from tritandem.scheduler.policy.waiting import PolicyConfig, Waiting
from tritandem.scheduler.waiting_queue import ACCOUNTS_KEPT, OUTDATED_KEPT, WaitingQueue

S = 1_000_000_000
POLICY = PolicyConfig(ageing_ns=10 * S)
INTERACTIVE, NORMAL, BATCH = PriorityClass


def waiting(number: int, priority: PriorityClass = NORMAL, arrived_s: float = 0.0, **fields: object) -> Waiting:
    values: dict[str, object] = {"tenant": "", "deadline_ns": None, "tokens": 100, **fields}
    return Waiting(number, priority, arrived_ns=int(arrived_s * S), **values)  # type: ignore[arg-type]


def numbers(entries: list[Waiting]) -> list[int]:
    return [entry.number for entry in entries]


def order(
    waiting: Sequence[Waiting], now_ns: int, policy: PolicyConfig, served_tokens: Mapping[str, int] | None = None
) -> list[Waiting]:
    """All of `waiting` in the order in which they would start if they all started now.

    Each pick charges its tenant before the next. `served_tokens`: accounts so far (default: all 0).
    """
    accounts = {entry.tenant: 0 for entry in waiting} | dict(served_tokens or {})
    left, ordered = list(waiting), []
    while left:
        best = first(left, now_ns, policy, accounts)
        accounts[best.tenant] += best.tokens
        left.remove(best)
        ordered.append(best)
    return ordered


def test_classes_go_before_arrival() -> None:
    entries = [waiting(0, BATCH), waiting(1, NORMAL, 1), waiting(2, INTERACTIVE, 2)]
    assert numbers(order(entries, 3 * S, POLICY)) == [2, 1, 0]


def test_waiting_lifts_a_request_past_newcomers_of_higher_classes() -> None:
    old_batch, new_interactive = waiting(0, BATCH, 0), waiting(1, INTERACTIVE, 29)
    assert first([old_batch, new_interactive], 29 * S, POLICY, {"": 0}).number == 0, "both at rank 0: the older"
    assert first([old_batch, new_interactive], 19 * S, POLICY, {"": 0}).number == 1


def test_a_rank_has_no_lower_bound_so_even_deadlines_cannot_starve_anybody() -> None:
    old = waiting(0, INTERACTIVE, 0)
    pressing = waiting(1, INTERACTIVE, 9.5, deadline_ns=10 * S)
    assert first([old, pressing], int(9.6 * S), POLICY, {"": 0}).number == 1
    assert first([old, pressing], 10 * S, POLICY, {"": 0}).number == 0


def test_the_rank_changes_exactly_when_said() -> None:
    for now_s in (0.0, 3.0, 9.999, 10.0, 25.0):
        lift_ns = next_lift_ns(0, int(now_s * S), 10 * S)
        assert rank(BATCH, 0, lift_ns, 10 * S) == rank(BATCH, 0, lift_ns - 1, 10 * S) - 1


def test_earliest_deadline_goes_first_within_a_class() -> None:
    entries = [
        waiting(0),
        waiting(1, deadline_ns=9 * S),
        waiting(2, deadline_ns=5 * S),
        waiting(3, INTERACTIVE),
    ]
    assert numbers(order(entries, 1 * S, POLICY)) == [3, 2, 1, 0]


def test_an_answer_that_would_come_too_late_is_not_started() -> None:
    assert not too_late(None, 10**18, S)
    assert not too_late(10 * S, 8 * S, S)
    assert too_late(10 * S, 9 * S, S)


def test_a_flood_from_one_tenant_does_not_hold_up_another() -> None:
    flood = [waiting(i, tenant="flood", tokens=5000) for i in range(50)]
    late = waiting(50, tenant="small", arrived_s=1, tokens=5000)
    place = numbers(order([*flood, late], 2 * S, POLICY)).index(50)
    assert place <= 2, "the flood may be one quantum ahead, not fifty requests"


def test_tenants_in_turn_get_equal_tokens_though_their_requests_differ_in_size() -> None:
    entries = [waiting(i, tenant="long", tokens=8000) for i in range(20)]
    entries += [waiting(100 + i, tenant="short", tokens=500) for i in range(400)]
    served = {"long": 0, "short": 0}
    for entry in order(entries, S, POLICY)[:100]:
        served[entry.tenant] += entry.tokens
    assert abs(served["long"] - served["short"]) <= POLICY.quantum_tokens + 8000


def test_tenants_within_one_quantum_are_in_the_same_band() -> None:
    assert band(0, 100) == band(99, 100) < band(100, 100)


def test_one_tenant_alone_is_ordered_by_deadline_whatever_its_account() -> None:
    entries = [waiting(i, deadline_ns=(20 - i) * S) for i in range(10)]
    assert numbers(order(entries, S, POLICY, {"": 10**9})) == list(range(9, -1, -1))


def test_idle_time_earns_no_credit_and_debts_stay() -> None:
    assert opening_balance(50, lowest_band=3, quantum_tokens=100) == 300
    assert opening_balance(950, lowest_band=3, quantum_tokens=100) == 950


def test_a_cached_prefix_gives_a_bounded_head_start() -> None:
    assert head_start_ns(1000, 20_000) == 20_000_000
    assert head_start_ns(10**9, 20_000) == MAX_HEAD_START_NS
    entries = [waiting(0, arrived_s=1.0), waiting(1, arrived_s=1.1, head_start_ns=200_000_000)]
    assert numbers(order(entries, 2 * S, POLICY)) == [1, 0]


@pytest.mark.parametrize("fair", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_the_queue_picks_what_the_definition_picks(seed: int, fair: bool) -> None:
    """Random arrivals, removals, picks and time: after every step the fast queue equals the slow definition."""
    rng = random.Random(seed)
    policy = PolicyConfig(ageing_ns=2 * S, fair_share=fair, quantum_tokens=300)
    queue: WaitingQueue[int] = WaitingQueue(policy)
    entries: dict[int, Waiting] = {}
    now_ns = 0
    for number in range(300):
        now_ns += rng.randrange(S // 4)
        deadline_ns = now_ns + rng.randrange(5 * S) if rng.random() < 0.3 else None
        entry = Waiting(
            number,
            rng.choice(list(PriorityClass)),
            rng.choice("abcd"),
            now_ns - rng.randrange(S),
            deadline_ns,
            rng.randrange(1, 400),
            rng.randrange(S // 2) if rng.random() < 0.2 else 0,
        )
        entries[number] = entry
        queue.push(entry, number, now_ns)
        while entries and rng.random() < 0.45:
            if rng.random() < 0.2:
                gone = rng.choice(list(entries))
                queue.remove(gone)
                del entries[gone]
                continue
            accounts = queue.served_tokens() if fair else {entry.tenant: 0 for entry in entries.values()}
            expected = first(list(entries.values()), now_ns, policy, accounts).number
            assert queue.peek(now_ns) == expected
            queue.take(expected)
            taken = entries.pop(expected)
            if rng.random() < 0.5:
                queue.settle(taken, rng.randrange(400))
    assert len(queue) == len(entries)
    assert sum(queue.by_class().values()) == len(entries)
    left = []
    while (number_or_none := queue.peek(now_ns)) is not None:
        left.append(number_or_none)
        queue.take(number_or_none)
    assert sorted(left) == sorted(entries)


def test_a_tenant_that_comes_back_from_idleness_has_no_credit() -> None:
    queue: WaitingQueue[int] = WaitingQueue(PolicyConfig(ageing_ns=10 * S, quantum_tokens=100))
    for number in range(100):
        queue.push(waiting(number, tenant="busy", tokens=1000), number, 0)
    for _ in range(50):
        number = queue.peek(0)
        assert number is not None
        queue.take(number)
    for number in range(100, 200):
        queue.push(waiting(number, tenant="back", tokens=1000), number, 0)
    picked = []
    for _ in range(20):
        number = queue.peek(0)
        assert number is not None
        queue.take(number)
        picked.append(number >= 100)
    assert 8 <= sum(picked) <= 12, "it shares from now on; it does not catch up 50,000 tokens"


def test_names_that_tenants_make_up_leave_nothing_behind() -> None:
    queue: WaitingQueue[int] = WaitingQueue(PolicyConfig(ageing_ns=10**15))
    queue.push(Waiting(0, PriorityClass.NORMAL, "served most", 0, None, 10**9), 0, 0)
    queue.take(0)
    for number in range(1, 6 * ACCOUNTS_KEPT):
        queue.push(Waiting(number, PriorityClass.NORMAL, f"t{number}", number, None, 9), number, number)
        assert queue.peek(number) == number
        queue.take(number)
        assert len(queue._served_tokens) <= 2 * ACCOUNTS_KEPT + 1
    assert queue.served_tokens()["served most"] == 10**9


def test_requests_that_leave_the_queue_unserved_leave_nothing_behind() -> None:
    queue: WaitingQueue[int] = WaitingQueue(PolicyConfig(ageing_ns=10**15))
    queue.push(Waiting(0, PriorityClass.NORMAL, "t", 0, None, 9), 0, 0)
    for number in range(1, 10 * OUTDATED_KEPT):
        queue.push(Waiting(number, PriorityClass.NORMAL, "t", number, None, 9), number, number)
        queue.remove(number)
    assert len(queue._lifts) < 2 * OUTDATED_KEPT
    assert sum(len(heap) for level in queue._levels.values() for heap in level.heaps.values()) < 2 * OUTDATED_KEPT
    assert queue.peek(10**6) == 0
