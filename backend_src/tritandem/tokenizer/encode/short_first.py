"""Shorter texts go first: threads that work on longer ones pause between two pieces while a shorter one is encoded.

Owns the sizes of the texts in work. Knows nothing about engines. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_PAUSE_S = 0.01  # for each piece: short texts without end must not stop the long ones


class ShortFirst:
    """A gate between the pieces of a text, closed while a shorter text is in work."""

    def __init__(self) -> None:
        self._one_less = threading.Condition()
        self._in_work: list[int] = []

    @contextmanager
    def text(self, chars: int) -> Iterator[None]:
        """Around the encoding of a text of `chars` characters."""
        with self._one_less:
            self._in_work.append(chars)
        try:
            yield
        finally:
            with self._one_less:
                self._in_work.remove(chars)
                self._one_less.notify_all()

    def pause(self, chars: int) -> None:
        """Before each piece of a text of `chars` characters: waits for shorter ones, at most LONGEST_PAUSE_S."""
        with self._one_less:
            self._one_less.wait_for(lambda: min(self._in_work, default=chars) >= chars, LONGEST_PAUSE_S)
