"""Counts what the tokenizer does, for metrics.

Owns the numbers behind TokenizerStats and their lock. Knows nothing about engines. Any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from .encoded import Encoded, TokenizerStats


class Counters:
    """Thread-safe sums; `queue_size` is what has entered and not left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._sums[name] += amount

    def entered(self) -> None:
        self.add("queue_size")

    def refused(self) -> None:
        self.add("queue_size", -1)

    def encoded(self, result: Encoded) -> None:
        with self._lock:
            self._sums["queue_size"] -= 1
            self._texts[result.engine] += 1
            self._tokens[result.engine] += len(result.ids)

    def snapshot(self, **others: int | bool) -> TokenizerStats:
        """The counters now, together with what only their owners know (`fast_enabled`, lookups in the cache)."""
        with self._lock:
            known: dict[str, Any] = {**self._sums, **others}
            return TokenizerStats(texts=dict(self._texts), tokens=dict(self._tokens), **known)
