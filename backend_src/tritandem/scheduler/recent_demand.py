"""How many requests of each class there were at one time, at most, within the last minute or so."""

from __future__ import annotations

from ..contracts.requests import PriorityClass

WINDOW_NS = 30_000_000_000  # what was seen is remembered for one window at least, for two at most


class RecentDemand:
    """Owned by the scheduling thread, which tells of every arrival and end."""

    def __init__(self, now_ns: int) -> None:
        self._now = [0] * len(PriorityClass)
        self._peaks = [0] * len(PriorityClass)
        self._earlier_peaks = [0] * len(PriorityClass)
        self._window_end_ns = now_ns + WINDOW_NS

    def arrived(self, priority: PriorityClass, now_ns: int) -> None:
        self._turn(now_ns)
        self._now[priority] += 1
        self._peaks[priority] = max(self._peaks[priority], self._now[priority])

    def ended(self, priority: PriorityClass) -> None:
        self._now[priority] -= 1

    def above(self, priority: PriorityClass, now_ns: int) -> int:
        """Over the classes that go before this one."""
        self._turn(now_ns)
        return sum(max(self._peaks[one], self._earlier_peaks[one]) for one in PriorityClass if one < priority)

    def _turn(self, now_ns: int) -> None:
        if now_ns < self._window_end_ns:
            return
        idle = now_ns - self._window_end_ns >= WINDOW_NS
        self._earlier_peaks = list(self._now) if idle else self._peaks
        self._peaks = list(self._now)
        self._window_end_ns = now_ns + WINDOW_NS
