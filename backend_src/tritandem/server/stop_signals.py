"""SIGINT and SIGTERM, kept until somebody asks for them.

Handlers and a pipe, not a blocked mask: libraries start threads that block nothing (numpy's do), and a signal that
the main thread blocks would end the process through one of those. Entered and asked by the main thread only.
"""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType
from typing import Any

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


class StopSignals:
    """`with StopSignals() as signals: ... signals.wait(1.0)`; afterwards signals do what they did before."""

    def __enter__(self) -> StopSignals:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[int, Any] = {number: signal.signal(number, _wake) for number in STOP_SIGNALS}
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def wait(self, timeout_s: float = 0.0) -> bool:
        """True when a stop signal has come or comes within `timeout_s` seconds; each is told once."""
        while select.select([self._read], [], [], timeout_s)[0]:
            if os.read(self._read, 1)[0] in STOP_SIGNALS:
                return True
        return False

    def pending(self) -> bool:
        """Whether the next `wait` will return at once; the signal is left for it."""
        return bool(select.select([self._read], [], [], 0.0)[0])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)


def _wake(_number: int, _frame: object) -> None:
    """The interpreter has written the signal's number into the pipe."""
