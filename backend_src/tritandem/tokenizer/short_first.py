"""Short texts go first: threads that work on long ones pause between two pieces while a short one is encoded.

Owns the count of short texts in work. Knows nothing about engines. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_PAUSE_S = 0.01  # for each piece: short texts without end must not stop the long ones


class ShortFirst:
    """A gate that is closed to long texts while short ones are inside."""

    def __init__(self) -> None:
        self._none_inside = threading.Condition()
        self._inside = 0

    @contextmanager
    def short_text(self) -> Iterator[None]:
        """Around the encoding of short texts."""
        with self._none_inside:
            self._inside += 1
        try:
            yield
        finally:
            with self._none_inside:
                self._inside -= 1
                if not self._inside:
                    self._none_inside.notify_all()

    def pause(self) -> None:
        """Before each piece of a long text: waits for short texts, at most LONGEST_PAUSE_S."""
        if self._inside:  # without the lock: a glance too early costs one piece
            with self._none_inside:
                self._none_inside.wait_for(lambda: not self._inside, LONGEST_PAUSE_S)
