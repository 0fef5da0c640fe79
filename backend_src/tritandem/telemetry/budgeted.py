"""Keeps what a measurement costs within a share of a core, whatever the machine makes it cost."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budgeted:
    """Call it once a period: runs `report` as often as `share` of one core allows, judged by its last run.

    On machines with many threads or large kernel tables some of /proc takes milliseconds to read. `clock` and
    `cpu_clock` (of the calling thread) give seconds and are replaced in tests only.
    """

    def __init__(
        self,
        report: Callable[[], None],
        share: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._report, self._share, self._clock, self._cpu_clock = report, share, clock, cpu_clock
        self._due_s = 0.0

    def __call__(self) -> None:
        now_s, begun_s = self._clock(), self._cpu_clock()
        if now_s < self._due_s:
            return
        try:
            self._report()
        finally:
            self._due_s = now_s + (self._cpu_clock() - begun_s) / self._share
