"""Finds stop words in text that arrives in pieces.

Owns the matching rule. Pure and independent of how the text is cut into pieces: the stop word that is complete
first ends the text; of two complete at the same character the longer one counts. Knows nothing about tokens.
"""

from __future__ import annotations

from functools import lru_cache


class StopWords:
    """A set of stop words, none of them empty.

    Clients choose them, 64 of 1,024 characters at most: what is kept and what it costs to make grow with their length,
    not with the number of their beginnings.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self._first_chars = frozenset(word[0] for word in words)
        self._inner_chars = frozenset(char for word in words for char in word[:-1])
        self._longest = max(map(len, words))

    def may_begin_in(self, text: str) -> bool:
        """Whether `text` holds the first character of a stop word."""
        return not self._first_chars.isdisjoint(text)

    def find(self, text: str) -> tuple[int, int] | None:
        """[start, end) of the stop word that ends `text`, or None."""
        hits = [(start + len(word), start) for word in self._words if (start := text.find(word)) >= 0]
        if not hits:
            return None
        end, start = min(hits)
        return start, end

    def held_back(self, text: str) -> int:
        """How many last characters of `text`, which holds no stop word, may be the beginning of one."""
        if text[-1:] not in self._inner_chars:
            return 0  # nearly always: this runs for every token
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first_chars and self._begins_with(text[start:]):
                return len(text) - start
        return 0

    def _begins_with(self, beginning: str) -> bool:
        return any(word.startswith(beginning) for word in self._words)


@lru_cache(maxsize=256)
def stop_words(words: tuple[str, ...]) -> StopWords | None:
    """The matcher for `words`, shared by requests that stop alike; None when there is nothing to match."""
    words = tuple(word for word in words if word)
    return StopWords(words) if words else None
