"""Finds stop words in text that arrives in pieces.

Owns the matching rule. Pure and independent of how the text is cut into pieces: the stop word that is complete
first ends the text; of two complete at the same character the longer one counts. Knows nothing about tokens.
"""

from __future__ import annotations

import re
from functools import lru_cache


class StopWords:
    """A set of stop words, none of them empty."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self._any_re = re.compile("|".join(map(re.escape, words)))
        self._beginnings = frozenset(word[:length] for word in words for length in range(1, len(word)))
        self._first_chars = frozenset(word[0] for word in words)
        self._last_chars = frozenset(beginning[-1] for beginning in self._beginnings)
        self._longest = max(map(len, words))

    def may_begin_in(self, text: str) -> bool:
        """Whether `text` holds the first character of a stop word."""
        return not self._first_chars.isdisjoint(text)

    def find(self, text: str) -> tuple[int, int] | None:
        """[start, end) of the stop word that ends `text`, or None."""
        if not self._any_re.search(text):
            return None
        hits = [(start + len(word), start) for word in self._words if (start := text.find(word)) >= 0]
        end, start = min(hits)
        return start, end

    def held_back(self, text: str) -> int:
        """How many last characters of `text`, which holds no stop word, may be the beginning of one."""
        if text[-1:] not in self._last_chars:
            return 0  # nearly always: this runs for every token
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._beginnings:
                return len(text) - start
        return 0


@lru_cache(maxsize=256)
def stop_words(words: tuple[str, ...]) -> StopWords | None:
    """The matcher for `words`, shared by requests that stop alike; None when there is nothing to match."""
    words = tuple(word for word in words if word)
    return StopWords(words) if words else None
