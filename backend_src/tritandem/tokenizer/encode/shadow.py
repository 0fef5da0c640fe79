"""Checks a small share of fast results again, in the background.

Owns one daemon thread with a short queue. A mismatch switches the fast engine off for good. Never delays a request:
when the queue is full the check is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import random
import threading

import numpy as np

from ...contracts.arrays import Int32Array
from .counters import Counters
from .fast import FastEncoder
from .whole import WholeEncoder

QUEUE_TEXTS = 8
NICENESS = 10

log = logging.getLogger("tritandem.tokenizer")


class ShadowCheck:
    """Compares fast ids with the reference's for `rate` of the texts (0: none, 1: all while the queue has room)."""

    def __init__(self, fast: FastEncoder, whole: WholeEncoder, rate: float, counters: Counters) -> None:
        self._fast = fast
        self._whole = whole
        self._rate = rate
        self._counters = counters
        self._random = random.Random()
        self._queue: queue.Queue[tuple[str, bool, Int32Array] | None] = queue.Queue(QUEUE_TEXTS)
        self._thread = threading.Thread(target=self._run, name="tokenizer-shadow", daemon=True)
        self._thread.start()

    def offer(self, text: str, add_special_tokens: bool, ids: Int32Array) -> None:
        """Perhaps check this result later. Returns at once."""
        if self._random.random() < self._rate:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait((text, add_special_tokens, ids))

    def close(self) -> None:
        """Finish what is queued and stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (item := self._queue.get()) is not None:
            text, add_special_tokens, ids = item
            expected = self._whole.encode(text, add_special_tokens)
            if not np.array_equal(ids, expected):
                self._counters.add("shadow_mismatches")
                self._fast.switch_off(_describe(text, ids, expected))


def _describe(text: str, ids: Int32Array, expected: Int32Array) -> str:
    """What was different, without the text itself: it belongs to a user."""
    shared = min(len(ids), len(expected))
    differing = np.flatnonzero(ids[:shared] != expected[:shared])
    at = int(differing[0]) if len(differing) else shared
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    return f"{len(text)} characters (sha256 {digest}): {len(ids)} ids, expected {len(expected)}, first other at {at}"
