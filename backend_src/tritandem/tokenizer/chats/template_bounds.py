"""How much work and memory one rendering of a chat template may take.

Owns the limits and the account of a rendering. A loop costs its length, a call or a filter one step and the size of
what it makes; now and then the thread's CPU time is looked at. Knows nothing about jinja2.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from .authorship import TooLarge

MAX_TEMPLATE_CHARS = 1 << 20
MAX_CPU_S = 5.0  # of one rendering; 10,000 messages take 0.2 to 0.5 s
MAX_STEPS = 1 << 23
MAX_MADE_CHARS = 1 << 28  # all texts and lists made on the way, and 64 for every character of the messages
ITEM_CHARS = 16  # what an item of a list counts
MAX_NUMBER = 100_000  # as an argument of a filter; of a method that fills up to a width
MAX_NUMBER_BITS = 4096
MAX_INDENT_CHARS = 100
STEPS_BETWEEN_LOOKS = 64


class TooMuchWork(Exception):
    """A template repeats itself longer than any prompt needs."""


class Budget:
    """What one rendering may still do."""

    def __init__(self, input_chars: int) -> None:
        self._steps = MAX_STEPS
        self._chars = MAX_MADE_CHARS + 64 * input_chars
        self._look_at = MAX_STEPS - STEPS_BETWEEN_LOOKS
        self._begun_s = time.thread_time()

    def charge(self, steps: int, chars: int = 0) -> None:
        """Raises TooMuchWork or TooLarge."""
        self._steps -= steps
        self._chars -= chars
        if self._steps < self._look_at:
            self._look_at = self._steps - STEPS_BETWEEN_LOOKS
            if self._steps < 0 or time.thread_time() - self._begun_s > MAX_CPU_S:
                raise TooMuchWork(f"more than {MAX_CPU_S:g} s or {MAX_STEPS} steps")
        if self._chars < 0:
            raise TooLarge("more text than any prompt needs")


def check_numbers(values: Iterable[Any]) -> None:
    """Numbers that say how often or how wide. Raises TooLarge."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TooLarge(f"the number {value:.3g} in a filter")


def size_of(made: Any) -> int:
    """What a value counts, in characters."""
    if isinstance(made, str):
        return len(made)
    return ITEM_CHARS * len(made) if isinstance(made, (list, tuple, dict)) else 0
