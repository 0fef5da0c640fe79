"""How long a request may still take, and whether a refused one is sent again.

Owns these two decisions. Knows nothing about transports or answers. No I/O, no sleeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tritandem_client.errors import ConnectionFailed, Saturated, Timeout, TritandemClientError

FIRST_RECONNECT_S = 0.25


class TimeBudget:
    """What is left of one request's `timeout_s`, retries included; None is no limit."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._end_s = None if timeout_s is None else clock() + timeout_s

    def left_s(self) -> float | None:
        """Raises Timeout when nothing is left."""
        if self._end_s is None:
            return None
        left_s = self._end_s - self._clock()
        if left_s <= 0:
            raise Timeout(f"no complete answer within {self._timeout_s} s")
        return left_s


def delay_before_retry_s(error: TritandemClientError, attempt: int, retries: int, left_s: float | None) -> float | None:
    """Seconds to wait before sending again, or None to give up.

    Saturated: the server did not start the request and said when to come back; each further attempt waits half as
    long again. ConnectionFailed, before anything of the answer came: a server that restarts, or another one behind the
    same name; each attempt waits twice as long as the last. `attempt` counts from 0. A wait beyond the request's
    remaining time is pointless, so it gives up at once.
    """
    if attempt >= retries:
        return None
    if isinstance(error, Saturated):
        delay_s: float = max(0.01, error.retry_after_s) * 1.5**attempt
    elif isinstance(error, ConnectionFailed):
        delay_s = FIRST_RECONNECT_S * 2**attempt
    else:
        return None
    if left_s is not None and delay_s >= left_s:
        return None
    return delay_s
