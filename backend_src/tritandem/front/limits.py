"""Limits of a key, held over all workers: requests at once, requests and tokens a minute.

The workers of a server share memory, a row for each key: two buckets that fill as time passes, and how many requests
each worker runs. A change of a row is made under the kernel's lock on it, which a process that dies gives back.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from .books import MAX_WORKERS
from .errors import ApiError, saturated

MAX_KEYS = 4096  # with limits
AT_ONCE, REQUESTS, TOKENS = "requests_at_once", "requests_per_minute", "tokens_per_minute"
NAMES = (AT_ONCE, REQUESTS, TOKENS)
_AT_ONCE_RETRY_S = 1.0  # when a request ends is not known
# A row, in doubles: whose it is (bytes of a hash), for each bucket what was taken from it and when, a count a worker.
_OWNER, _TAKEN, _RUNNING = 0, 1, 5
_ROW = _RUNNING + MAX_WORKERS
_DOUBLE = 8
_ALL_ROWS = MAX_KEYS * _ROW
HEADERS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining"))


@dataclass(frozen=True, slots=True)
class Limits:
    """None: there is none. A minute's amount may be used at once; it comes back evenly."""

    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = (
        None  # of prompts and answers; taken when a request ends, so that it may be overdrawn
    )


@dataclass(slots=True)
class Bill:
    """Of one request that was let in; `tokens` are taken at its end."""

    tokens: int = 0


class Meter:
    """`fd`: of the memory that all workers share; -1 for a worker that is alone."""

    def __init__(self, fd: int = -1, worker: int = 0) -> None:
        size = _ALL_ROWS * _DOUBLE
        if fd >= 0:
            os.ftruncate(fd, size)
        memory = memoryview(mmap.mmap(fd, size))
        self._fd, self._worker = fd, worker
        self._numbers, self._words = memory.cast("d"), memory.cast("Q")
        self._rows: dict[bytes, int] = {}
        for row in range(0, _ALL_ROWS, _ROW):
            if self._words[row + _OWNER]:  # a worker that is replaced runs nothing any more
                self._numbers[row + _RUNNING + worker] = 0

    @contextmanager
    def admitted(self, key: bytes, limits: Limits | None, headers: MutableMapping[str, str]) -> Iterator[Bill]:
        """While a request of this key runs. `headers`, of the response: what is left is told there. Raises ApiError."""
        bill = Bill()
        if limits is None:
            yield bill
            return
        with self._locked(key) as row:
            self._enter(row, limits, headers)
        try:
            yield bill
        finally:
            with self._locked(key) as row:
                self._numbers[row + _RUNNING + self._worker] -= 1
                if limits.tokens_per_minute:
                    self._take(row, 1, limits.tokens_per_minute, bill.tokens)

    def _enter(self, row: int, limits: Limits, headers: MutableMapping[str, str]) -> None:
        """Also who is refused is told what is left."""
        numbers, running, refusals = self._numbers, row + _RUNNING, []
        if (
            limits.requests_at_once
            and (now := sum(numbers[running : running + MAX_WORKERS])) >= limits.requests_at_once
        ):
            said = f"{now:.0f} requests of this key are running, allowed: {limits.requests_at_once} at once"
            refusals.append(_refused(AT_ONCE, said, _AT_ONCE_RETRY_S))
        buckets = []
        for bucket, (name, limit, least) in enumerate(
            ((REQUESTS, limits.requests_per_minute, 1.0), (TOKENS, limits.tokens_per_minute, 0.0))
        ):
            if limit is None:
                continue
            left = limit - self._take(row, bucket, limit, 0)
            buckets.append((bucket, limit, least, left))
            if left < least or left <= 0:
                missing = max(least - left, 1e-3 - left)
                said = f"used up for this key, allowed: {limit} a minute"
                refusals.append(_refused(name, said, missing * 60 / limit))
        for bucket, limit, least, left in buckets:
            remaining = max(0, int(left if refusals else left - least))
            headers.update({HEADERS[2 * bucket]: str(limit), HEADERS[2 * bucket + 1]: str(remaining)})
        if refusals:
            raise refusals[0]
        if limits.requests_per_minute:
            self._take(row, 0, limits.requests_per_minute, 1)
        numbers[running + self._worker] += 1

    def _take(self, row: int, bucket: int, limit: int, amount: float) -> float:
        """What is taken from a bucket after this, and has not come back yet."""
        numbers, at, now_s = self._numbers, row + _TAKEN + 2 * bucket, time.monotonic()
        taken = max(0.0, numbers[at] - (now_s - numbers[at + 1]) * limit / 60) + amount
        numbers[at], numbers[at + 1] = taken, now_s
        return taken

    @contextmanager
    def _locked(self, key: bytes) -> Iterator[int]:
        """The first number of the key's row. Whoever first needs a row makes it, under the lock of all rows."""
        row = self._rows.get(key)
        if row is None:
            with self._lock(_ALL_ROWS):
                row = self._rows[key] = self._row_of(int.from_bytes(key[:_DOUBLE], "little") or 1)
        with self._lock(row):
            yield row

    def _row_of(self, owner: int) -> int:
        for row in range(0, _ALL_ROWS, _ROW):
            if self._words[row + _OWNER] in (0, owner):
                self._words[row + _OWNER] = owner
                return row
        raise ApiError(500, "there are more keys with limits than can be kept apart", "server_error")

    @contextmanager
    def _lock(self, at: int) -> Iterator[None]:
        if self._fd < 0:
            yield
            return
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, at)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, at)


def _refused(name: str, said: str, retry_after_s: float) -> ApiError:
    error = saturated(f"{name}: {said}", retry_after_s)
    error.param = name
    return error
