"""Bounds the texts that have no ids yet: the scheduler's queue, which is bounded too, begins behind them.

Knows nothing about texts. Any thread.
"""

from __future__ import annotations

import threading

from ..contracts import Saturated

RETRY_AFTER_S = 1.0


class WaitingTexts:
    """Every `enter` that did not raise is followed by one `leave`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self) -> None:
        """Raises Saturated when as many wait as may."""
        with self._lock:
            if self._count >= self._limit:
                raise Saturated(f"{self._count} texts are waiting for the tokenizer", RETRY_AFTER_S)
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
