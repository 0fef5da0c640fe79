"""A clock that moves only when told to."""

from __future__ import annotations


class FakeClock:
    """Monotonic nanoseconds; call it to read it."""

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now_ns += int(seconds * 1e9)
