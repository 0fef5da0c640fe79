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

# A reader that does not come out for so long waits for an engine that is dead, whose calls Triton never ends: nothing
# arrives to wake it, so it is no danger, and nobody waits for it again.
PATIENCE_S = 1.0


class StreamGate:
    """One per process."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._readers: set[int] = set()  # threads
        self._stuck: set[int] = set()  # of those
        self._openers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around one step of an iterator. Waits for whoever wants to open."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._openers)
            self._readers.add(me)
        try:
            yield
        finally:
            with self._changed:
                self._readers.discard(me)
                self._stuck.discard(me)
                if self._openers and self._readers == self._stuck:
                    self._changed.notify_all()

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around the opening of a call: no other thread reads or opens meanwhile."""
        with self._changed:
            self._openers += 1
            try:
                if not self._changed.wait_for(lambda: self._readers == self._stuck, self._patience_s):
                    self._stuck = set(self._readers)
                yield
            finally:
                self._openers -= 1
                self._changed.notify_all()
