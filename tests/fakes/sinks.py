"""A client's end of the line: keeps what arrives and objects to anything after the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tritandem.contracts.answers import Chunk
from tritandem.contracts.errors import TritandemError


class RecordingSink:
    """`before_send(chunk)` may block or raise in the sender's place; `gone` is what `cancelled` answers."""

    def __init__(self, before_send: Callable[[Chunk], None] | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.error: TritandemError | None = None
        self.ends = 0
        self.violations: list[str] = []
        self.gone = False
        self.asked = 0
        self.fail_finish = False
        self.ended = threading.Event()
        self.changed = threading.Condition()
        self._before_send = before_send
        self._inside = threading.Lock()

    def send(self, chunk: Chunk) -> None:
        self._enter(chunk, last=False)

    def finish(self, chunk: Chunk) -> None:
        if self.fail_finish:
            raise ConnectionError("the last chunk was refused")
        self._enter(chunk, last=True)
        self._end()

    def fail(self, error: TritandemError) -> None:
        self.error = error
        self._end()

    def cancelled(self) -> bool:
        self.asked += 1
        return self.gone

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_output_tokens for chunk in self.chunks)

    def wait_chunks(self, count: int, timeout_s: float = 5.0) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: len(self.chunks) >= count, timeout_s):
                raise AssertionError(f"{len(self.chunks)} chunks after {timeout_s} s, expected {count}")

    def wait_end(self, timeout_s: float = 5.0) -> None:
        if not self.ended.wait(timeout_s):
            raise AssertionError(f"no end after {timeout_s} s; chunks so far: {self.chunks}")
        if self.ends != 1 or self.violations:
            raise AssertionError(f"{self.ends} ends, {self.violations}")

    def _enter(self, chunk: Chunk, last: bool) -> None:
        if not self._inside.acquire(blocking=False):
            self.violations.append("two senders at once")
            return
        try:
            if self.ends:
                self.violations.append(f"a chunk after the end: {chunk}")
            several = chunk.index is not None  # of several answers, some end before the last
            if last != (chunk.finish_reason is not None) and not several:
                self.violations.append(f"finish reason and call do not agree: {chunk}")
            if self._before_send is not None:
                self._before_send(chunk)
            with self.changed:
                self.chunks.append(chunk)
                self.changed.notify_all()
        finally:
            self._inside.release()

    def _end(self) -> None:
        self.ends += 1
        if self.ends > 1:
            self.violations.append("a second end")
        self.ended.set()
