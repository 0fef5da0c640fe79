"""How fast the engines work off what waits, as measured: the tokens of requests that ended, per second.

Owned by the scheduling thread; other threads may read. Counts only while somebody waits: an engine that lacks work
would look slow. Knows nothing about why requests ended.
"""

from __future__ import annotations

WINDOW_NS = 10_000_000_000
LEAST_NS = 1_000_000_000  # what was seen for a shorter time says nothing


class RecentPace:
    """Of this window and the one before it."""

    def __init__(self) -> None:
        self._begun_ns: int | None = None  # of this window; None: nobody waits
        self._earlier_ns = 0
        self._tokens = self._earlier_tokens = 0

    def waiting(self, some: bool, now_ns: int) -> None:
        """Whether anybody waits, whenever that may have changed."""
        if not some:
            self._begun_ns = None
            return
        if self._begun_ns is None:
            self._begun_ns, self._tokens, self._earlier_ns, self._earlier_tokens = now_ns, 0, 0, 0
        elif now_ns - self._begun_ns >= WINDOW_NS:
            self._earlier_ns, self._earlier_tokens = now_ns - self._begun_ns, self._tokens
            self._begun_ns, self._tokens = now_ns, 0

    def ended(self, tokens: int) -> None:
        """A request that an engine had: prompt + output budget, as it was counted while it waited."""
        self._tokens += tokens

    def tokens_per_s(self, now_ns: int) -> float:
        """0: not known."""
        begun_ns = self._begun_ns
        if begun_ns is None:
            return 0.0
        seen_ns = self._earlier_ns + now_ns - begun_ns
        return (self._earlier_tokens + self._tokens) * 1e9 / seen_ns if seen_ns >= LEAST_NS else 0.0
