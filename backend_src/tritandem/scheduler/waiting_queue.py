"""The waiting requests, kept so that the next one is found without sorting them all.

Owned by the scheduling thread. Same order as `policy.order`, at O(log n) a pick: per rank and tenant one heap by
urgency, per rank one heap of tenants; another heap knows when a request's rank changes. What is outdated is put
right when it surfaces. Knows nothing about engines.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

from ..contracts.requests import PriorityClass
from .policy.ageing import next_lift_ns, rank
from .policy.deadline import urgency
from .policy.fair_share import band, opening_balance
from .policy.order import first
from .policy.waiting import PolicyConfig, Waiting

T = TypeVar("T")
Key = tuple[int, int, int]  # deadline, arrival less head start, number

LOOKED_AT = 256  # waiting requests of a class, where they are compared one by one
ACCOUNTS_KEPT = 4096  # of idle tenants
OUTDATED_KEPT = 1024  # entries of a heap that stand for nobody any more, beyond as many as stand for somebody


class _Level:
    """The requests of one rank. `turns` has one current entry per tenant, and outdated ones below or above it."""

    __slots__ = ("current", "heaps", "turns")

    def __init__(self) -> None:
        self.heaps: dict[str, list[Key]] = {}
        self.turns: list[tuple[int, Key, str]] = []  # band, first of the tenant, tenant
        self.current: dict[str, tuple[int, Key, str]] = {}

    def push(self, tenant: str, its_band: int, key: Key) -> None:
        heap = self.heaps.setdefault(tenant, [])
        heapq.heappush(heap, key)
        if heap[0] is key:
            self.refresh(tenant, its_band)

    def refresh(self, tenant: str, its_band: int) -> None:
        """The tenant's turn may come earlier than its entry says."""
        if tenant in self.heaps:
            turn = self.current[tenant] = (its_band, self.heaps[tenant][0], tenant)
            heapq.heappush(self.turns, turn)


class WaitingQueue(Generic[T]):
    """Items with their `Waiting` facts."""

    def __init__(self, policy: PolicyConfig) -> None:
        self._policy = policy
        self._entries: dict[int, tuple[Waiting, int, T]] = {}  # number -> facts, current rank, item
        self._levels: dict[int, _Level] = {}
        self._lifts: list[tuple[int, int]] = []  # when, number
        self._served_tokens: dict[str, int] = {}
        self._waiting_of_tenant: dict[str, int] = {}
        self._lowest_band = 0
        self._of_class: list[dict[int, None]] = [{} for _ in PriorityClass]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def items(self) -> list[T]:
        return [item for _, _, item in self._entries.values()]

    def by_class(self) -> dict[PriorityClass, int]:
        return {priority: len(self._of_class[priority]) for priority in PriorityClass}

    def push(self, entry: Waiting, item: T, now_ns: int) -> None:
        tenant = self._tenant(entry)
        if tenant not in self._waiting_of_tenant:
            self._served_tokens[tenant] = opening_balance(
                self._served_tokens.get(tenant, 0), self._lowest_band, self._policy.quantum_tokens
            )
        self._waiting_of_tenant[tenant] = self._waiting_of_tenant.get(tenant, 0) + 1
        self._of_class[entry.priority][entry.number] = None
        self._place(entry, item, now_ns)

    def peek(self, now_ns: int) -> T | None:
        """The item whose turn it is; it stays. None when empty."""
        entry = self._first(now_ns)
        return None if entry is None else self._entries[entry.number][2]

    def peek_above(self, priority: PriorityClass, now_ns: int) -> T | None:
        """The same among the classes before this one only; of each, among the requests that came first."""
        classes = [self._of_class[one] for one in PriorityClass if one < priority]
        numbers = [number for its in classes for number in itertools.islice(its, LOOKED_AT)]
        if not numbers:
            return None
        entries = [self._entries[number][0] for number in numbers]
        return self._entries[first(entries, now_ns, self._policy, self._served_tokens).number][2]

    def take(self, number: int) -> None:
        """The item starts: it leaves, and its tenant is charged."""
        entry = self._entries[number][0]
        self._served_tokens[self._tenant(entry)] += entry.tokens
        self.remove(number)

    def remove(self, number: int) -> Waiting:
        """It leaves uncharged. Raises KeyError when it is not waiting."""
        entry, _, _ = self._entries.pop(number)
        tenant = self._tenant(entry)
        del self._of_class[entry.priority][number]
        left = self._waiting_of_tenant[tenant] - 1
        if left:
            self._waiting_of_tenant[tenant] = left
        else:
            del self._waiting_of_tenant[tenant]
            self._forget_idle_accounts()
        return entry

    def settle(self, entry: Waiting, served_tokens: int) -> None:
        """A request that was charged has ended: correct its tenant's account to what was really served."""
        tenant = self._tenant(entry)
        if tenant in self._served_tokens:
            self._served_tokens[tenant] += served_tokens - entry.tokens
            for level in self._levels.values():
                level.refresh(tenant, self._band(tenant))

    def served_tokens(self) -> dict[str, int]:
        return dict(self._served_tokens)

    def _tenant(self, entry: Waiting) -> str:
        return entry.tenant if self._policy.fair_share else ""

    def _band(self, tenant: str) -> int:
        return band(self._served_tokens[tenant], self._policy.quantum_tokens)

    def _place(self, entry: Waiting, item: T, now_ns: int) -> None:
        its_rank = rank(entry.priority, entry.arrived_ns, now_ns, self._policy.ageing_ns)
        self._entries[entry.number] = (entry, its_rank, item)
        key = (*urgency(entry.deadline_ns, entry.arrived_ns, entry.head_start_ns), entry.number)
        tenant = self._tenant(entry)
        self._levels.setdefault(its_rank, _Level()).push(tenant, self._band(tenant), key)
        heapq.heappush(self._lifts, (next_lift_ns(entry.arrived_ns, now_ns, self._policy.ageing_ns), entry.number))
        if len(self._lifts) > 2 * len(self._entries) + OUTDATED_KEPT:
            self._lifts = [lift for lift in self._lifts if lift[1] in self._entries]
            heapq.heapify(self._lifts)
        heap = self._levels[its_rank].heaps[tenant]
        if len(heap) > 2 * self._waiting_of_tenant[tenant] + OUTDATED_KEPT:
            heap[:] = [key for key in heap if self._waits_at(key[2], its_rank)]
            heapq.heapify(heap)

    def _lift(self, now_ns: int) -> None:
        while self._lifts and self._lifts[0][0] <= now_ns:
            _, number = heapq.heappop(self._lifts)
            if number in self._entries:
                entry, _, item = self._entries[number]
                self._place(entry, item, now_ns)

    def _first(self, now_ns: int) -> Waiting | None:
        self._lift(now_ns)
        while self._levels:
            lowest = min(self._levels)
            number = self._first_of(self._levels[lowest], lowest)
            if number is not None:
                return self._entries[number][0]
            del self._levels[lowest]
        return None

    def _first_of(self, level: _Level, its_rank: int) -> int | None:
        while level.turns:
            turn = level.turns[0]
            tenant = turn[2]
            if level.current.get(tenant) is not turn:
                heapq.heappop(level.turns)  # a later entry speaks for this tenant
                continue
            heap = level.heaps[tenant]
            while heap and not self._waits_at(heap[0][2], its_rank):
                heapq.heappop(heap)
            if not heap:
                heapq.heappop(level.turns)
                del level.heaps[tenant], level.current[tenant]
                continue
            its_band = self._band(tenant)
            if (its_band, heap[0]) == turn[:2]:
                self._lowest_band = max(self._lowest_band, its_band)
                return heap[0][2]
            level.current[tenant] = now = (its_band, heap[0], tenant)
            heapq.heapreplace(level.turns, now)
        return None

    def _waits_at(self, number: int, its_rank: int) -> bool:
        held = self._entries.get(number)
        return held is not None and held[1] == its_rank

    def _forget_idle_accounts(self) -> None:
        """Of tenants that wait for nothing, those that were served most are remembered: a name costs nothing."""
        waiting = self._waiting_of_tenant
        if len(self._served_tokens) <= len(waiting) + 2 * ACCOUNTS_KEPT:
            return
        idle = sorted(self._served_tokens.keys() - waiting.keys(), key=self._served_tokens.__getitem__)
        for tenant in idle[:-ACCOUNTS_KEPT]:
            del self._served_tokens[tenant]
