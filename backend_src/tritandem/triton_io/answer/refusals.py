"""Refusals on their way out, sent by threads of their own.

A `send` waits for a round trip to Triton's process. Behind thousands of requests that are all refused, `execute` would
wait for each of these round trips, and with it a stop, or a request that finds a place.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ...contracts.errors import TritandemError
from .replies import send_error

THREADS = 4


class Refusals:
    """`send` returns at once, and never raises. After `close` every error that was given has been sent."""

    def __init__(self, threads: int = THREADS) -> None:
        self._waiting: deque[tuple[Any, TritandemError]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tritandem-refusals-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, sender: Any, error: TritandemError) -> None:
        """`error` becomes the last response of `sender`, which has sent none. Its traceback, which holds the request
        and the request's shared memory, is dropped."""
        error.__traceback__ = None
        with self._changed:
            self._waiting.append((sender, error))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (refusal := self._take()) is not None:
            send_error(*refusal)
            del refusal  # while this thread waits for the next one, nothing is kept

    def _take(self) -> tuple[Any, TritandemError] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None
