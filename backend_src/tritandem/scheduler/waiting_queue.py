"""The waiting requests, kept so that the next one is found without sorting them all.

Owned by the scheduling thread. Same order as `policy.order`, at O(log n + tenants in turn) a pick: per rank
and tenant one heap by urgency; a second heap knows when a request's rank changes. Removed and lifted entries
stay in their old heap until they surface. Knows nothing about engines.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from ..contracts import PriorityClass
from .policy.ageing import next_lift_ns, rank
from .policy.deadline import urgency
from .policy.fair_share import eligible, opening_balance
from .policy.waiting import PolicyConfig, Waiting

T = TypeVar("T")
Heap = list[tuple[int, int, int]]  # deadline, arrival less head start, number

ACCOUNTS_KEPT = 4096  # idle tenants beyond this many lose accounts that no longer matter


class WaitingQueue(Generic[T]):
    """Items with their `Waiting` facts."""

    def __init__(self, policy: PolicyConfig) -> None:
        self._policy = policy
        self._entries: dict[int, tuple[Waiting, int, T]] = {}  # number -> facts, current rank, item
        self._levels: dict[int, dict[str, Heap]] = {}
        self._lifts: list[tuple[int, int]] = []  # when, number
        self._served_tokens: dict[str, int] = {}
        self._waiting_of_tenant: dict[str, int] = {}
        self._virtual_tokens = 0
        self._by_class = [0] * len(PriorityClass)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def items(self) -> list[T]:
        return [item for _, _, item in self._entries.values()]

    def by_class(self) -> dict[PriorityClass, int]:
        return {priority: self._by_class[priority] for priority in PriorityClass}

    def push(self, entry: Waiting, item: T, now_ns: int) -> None:
        tenant = self._tenant(entry)
        if tenant not in self._waiting_of_tenant:
            self._served_tokens[tenant] = opening_balance(self._served_tokens.get(tenant, 0), self._virtual_tokens)
        self._waiting_of_tenant[tenant] = self._waiting_of_tenant.get(tenant, 0) + 1
        self._by_class[entry.priority] += 1
        self._place(entry, item, now_ns)

    def peek(self, now_ns: int) -> T | None:
        """The item whose turn it is; it stays. None when empty."""
        entry = self._first(now_ns)
        return None if entry is None else self._entries[entry.number][2]

    def take(self, number: int) -> None:
        """The item starts: it leaves, and its tenant is charged."""
        entry = self.remove(number)
        tenant = self._tenant(entry)
        self._served_tokens[tenant] += entry.tokens

    def remove(self, number: int) -> Waiting:
        """It leaves uncharged. Raises KeyError when it is not waiting."""
        entry, _, _ = self._entries.pop(number)
        tenant = self._tenant(entry)
        self._by_class[entry.priority] -= 1
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

    def served_tokens(self) -> dict[str, int]:
        return dict(self._served_tokens)

    def _tenant(self, entry: Waiting) -> str:
        return entry.tenant if self._policy.fair_share else ""

    def _place(self, entry: Waiting, item: T, now_ns: int) -> None:
        its_rank = rank(entry.priority, entry.arrived_ns, now_ns, self._policy.ageing_ns)
        self._entries[entry.number] = (entry, its_rank, item)
        heap = self._levels.setdefault(its_rank, {}).setdefault(self._tenant(entry), [])
        heapq.heappush(heap, (*urgency(entry.deadline_ns, entry.arrived_ns, entry.head_start_ns), entry.number))
        heapq.heappush(self._lifts, (next_lift_ns(entry.arrived_ns, now_ns, self._policy.ageing_ns), entry.number))

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
            level = self._levels[lowest]
            for tenant in list(level):
                self._drop_stale(level, tenant, lowest)
            if not level:
                del self._levels[lowest]
                continue
            turn = eligible(level, self._served_tokens, self._policy.quantum_tokens)
            self._virtual_tokens = max(self._virtual_tokens, min(self._served_tokens[tenant] for tenant in level))
            _, _, number = min(level[tenant][0] for tenant in turn)
            return self._entries[number][0]
        return None

    def _drop_stale(self, level: dict[str, Heap], tenant: str, its_rank: int) -> None:
        heap = level[tenant]
        while heap:
            held = self._entries.get(heap[0][2])
            if held is not None and held[1] == its_rank:
                return
            heapq.heappop(heap)
        del level[tenant]

    def _forget_idle_accounts(self) -> None:
        if len(self._served_tokens) <= len(self._waiting_of_tenant) + ACCOUNTS_KEPT:
            return
        self._served_tokens = {
            tenant: served
            for tenant, served in self._served_tokens.items()
            if tenant in self._waiting_of_tenant or served > self._virtual_tokens
        }
