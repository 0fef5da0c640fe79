"""Asks sinks whether their client has gone, within a bounded share of one core.

Owns a thread and the ring of open requests. One question is one process round trip (0.06 ms, 0.045 ms of CPU), so
1,000 streams asked ten times a second would take half a core; asking from several threads at once costs more, not
less, because the server answers one question at a time. The trade-off, in `questions` and `Ring`: every stream
once per `poll_s` while that fits the budget, a longer round when it does not; the neighbours (same tenant) of
one that was found gone are asked first, because clients die with all their streams.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from weakref import ReferenceType, ref

from .lifecycle import State
from .ticket import Ticket

log = logging.getLogger(__name__)

BURST_S = 0.1  # waking up costs as much as asking, so questions come in bursts
# All threads that a question wakes (this one, the process's message thread, the server's) took 8 times the CPU time of
# this one when questions came in bursts, measured on Triton 2.51; only this one's can be measured while it runs.
CPU_OF_ALL = 8


def call_cost_s(wall_s: float, cpu_s: float) -> float:
    """What one question is charged: CPU time of all threads it wakes, never more than it took (they take turns)."""
    return min(wall_s, CPU_OF_ALL * cpu_s)


def questions(streams: int, cost_s: float, poll_s: float, budget_share: float, elapsed_s: float) -> float:
    """How many questions `elapsed_s` since the last burst allow (a fraction is carried over by the caller).

    All streams within `poll_s`, or what `budget_share` of a core pays for if that is less.
    """
    return min(streams * elapsed_s / poll_s, budget_share * elapsed_s / cost_s)


class Ring:
    """Whom to ask next. Not thread-safe; entries that have ended leave when their turn comes, and keep nothing alive
    until then: a round may take long, and a flood of refused requests with long prompts stands in it."""

    def __init__(self) -> None:
        self._turn: deque[ReferenceType[Ticket]] = deque()
        self._at_once: deque[ReferenceType[Ticket]] = deque()

    def __len__(self) -> int:
        return len(self._turn)

    def add(self, entry: ReferenceType[Ticket]) -> None:
        self._turn.append(entry)

    def next(self) -> Ticket | None:
        """The next open request; it stays in the ring."""
        while self._at_once:
            if (ticket := _open(self._at_once.popleft())) is not None:
                return ticket
        while self._turn:
            entry = self._turn.popleft()
            if (ticket := _open(entry)) is not None:
                self._turn.append(entry)
                return ticket
        return None

    def found_gone(self, gone: Ticket) -> None:
        """Ask its neighbours before the others."""
        if not self._at_once:
            tenant = gone.request.tenant
            self._at_once.extend(
                entry
                for entry in self._turn
                if (ticket := entry()) is not None and ticket.request.tenant == tenant and ticket is not gone
            )


def _open(entry: ReferenceType[Ticket]) -> Ticket | None:
    ticket = entry()
    return None if ticket is None or ticket.life.state is State.ENDED else ticket


class CancelWatch:
    """`on_gone(ticket)` ends a request; called from this thread."""

    def __init__(self, poll_s: float, budget_share: float, on_gone: Callable[[Ticket], object]) -> None:
        self._poll_s, self._budget_share, self._on_gone = poll_s, budget_share, on_gone
        self._arrived: deque[ReferenceType[Ticket]] = deque()
        self._ring = Ring()
        self._mean_cost_s = 0.0001
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tritandem-cancel-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, ticket: Ticket) -> None:
        """From any thread."""
        self._arrived.append(ref(ticket))
        if not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float) -> bool:
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        burst_s = min(BURST_S, self._poll_s)
        last_s, allowed = time.monotonic(), 0.0
        while not self._closing.wait(burst_s):
            while self._arrived:
                self._ring.add(self._arrived.popleft())
            if len(self._ring) == 0:
                self._wake.clear()
                if not self._arrived and not self._closing.is_set():
                    self._wake.wait()  # nothing is open
                last_s = time.monotonic()
                continue
            now_s = time.monotonic()
            allowed += questions(len(self._ring), self._mean_cost_s, self._poll_s, self._budget_share, now_s - last_s)
            last_s = now_s
            self._ask_several(min(int(allowed), len(self._ring)))
            allowed = min(allowed - int(allowed), 1.0)

    def _ask_several(self, count: int) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        asked = 0
        while asked < count and not self._closing.is_set() and (ticket := self._ring.next()) is not None:
            asked += 1
            if _has_gone(ticket):
                self._ring.found_gone(ticket)
                self._on_gone(ticket)
        if asked:
            cost_s = call_cost_s(time.perf_counter() - wall_s, time.thread_time() - cpu_s) / asked
            self._mean_cost_s += 0.1 * (max(cost_s, 1e-6) - self._mean_cost_s)


def _has_gone(ticket: Ticket) -> bool:
    try:
        return ticket.sink.cancelled()
    except Exception as error:
        log.warning("request %s: asking for cancellation failed: %s", ticket.request.request_id, error)
        return False
