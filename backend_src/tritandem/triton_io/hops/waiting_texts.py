"""Bounds the texts that have no ids yet: the scheduler's queue, which is bounded too, begins behind them.

Knows nothing about texts. Any thread.
"""

from __future__ import annotations

import threading
from collections import Counter

from ...contracts.errors import Saturated
from ...contracts.requests import PriorityClass
from ...scheduler.policy.places import may_hold

RETRY_AFTER_S = 1.0
_CLASSES = tuple(PriorityClass)  # an enumeration is walked four times as slowly


class WaitingTexts:
    """Every `enter` that did not raise is followed by one `leave` with the same tenant and class."""

    def __init__(self, limit: int, what: str = "texts are waiting for the tokenizer") -> None:
        """`what`: waits, in the words of a refusal."""
        self._limit, self._what = limit, what
        self._lock = threading.Lock()
        self._held: Counter[tuple[str, PriorityClass]] = Counter()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, tenant: str = "", priority: PriorityClass = PriorityClass.NORMAL) -> None:
        """Raises Saturated when as many wait as may, or as many of this tenant's in this class and those above."""
        with self._lock:
            own = sum(self._held[tenant, one] for one in _CLASSES if one <= priority)
            if not may_hold(own, self._count, self._limit):
                raise Saturated(f"{self._count} {self._what}", RETRY_AFTER_S)
            self._held[tenant, priority] += 1
            self._count += 1

    def leave(self, tenant: str = "", priority: PriorityClass = PriorityClass.NORMAL) -> None:
        with self._lock:
            self._held[tenant, priority] -= 1
            if not self._held[tenant, priority]:
                del self._held[tenant, priority]
            self._count -= 1
