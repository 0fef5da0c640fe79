"""Keeps decoupled calls from being opened while another thread of this process waits in one.

In Triton's stub three locks are taken in a circle when one thread opens a decoupled call (the GIL, then the table of
iterators), one wakes up in another call's iterator (its lock, then the GIL) and a response arrives (the table, then
that lock). With several engines there are several readers: an opener waits until all have come out, which they do with
every response, and engines send an empty one when there is nothing to say. Readers and writers, the writers first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A reader that does not come out for so long waits for an engine that is stopped or dead: nothing arrives to wake it.
PATIENCE_S = 2.0


class StreamGate:
    """One per process."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._readers = 0
        self._openers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around one step of an iterator. Waits for whoever wants to open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._openers)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if self._openers and not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around the opening of a call: no other thread reads or opens meanwhile."""
        with self._changed:
            self._openers += 1
            try:
                self._changed.wait_for(lambda: not self._readers, self._patience_s)
                yield
            finally:
                self._openers -= 1
                self._changed.notify_all()
