"""Asks sinks whether their client has gone, within a bounded share of one core.

Owns a thread and the ring of open requests. One question is one process round trip (about 0.1 ms), so 1,000
streams asked ten times a second would take a whole core. The trade-off, in `next_pause_s` and `Ring`:
every stream each `poll_s` while that fits the budget, a longer round when it does not; a stream whose
neighbour (same tenant) was found gone is asked at once, because clients die with all their streams.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from .lifecycle import State
from .ticket import Ticket

log = logging.getLogger(__name__)

BUDGET_SHARE = 0.02  # of one core
THREADS_PER_CALL = 3  # asking thread, the process's message thread, the server's: only the first can be measured


def call_cost_s(wall_s: float, cpu_s: float) -> float:
    """What one question is charged: CPU time of all threads it wakes, never more than it took."""
    return min(wall_s, THREADS_PER_CALL * cpu_s)


def next_pause_s(streams: int, mean_cost_s: float, poll_s: float, budget_share: float = BUDGET_SHARE) -> float:
    """Pause between two questions: spread evenly over `poll_s`, or as the budget allows if that is longer."""
    if streams == 0:
        return poll_s
    return max(poll_s / streams, mean_cost_s / budget_share)


class Ring:
    """Whom to ask next. Not thread-safe; entries that have ended leave when their turn comes."""

    def __init__(self) -> None:
        self._turn: deque[Ticket] = deque()
        self._at_once: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._turn)

    def add(self, ticket: Ticket) -> None:
        self._turn.append(ticket)

    def next(self) -> Ticket | None:
        """The next open request; it stays in the ring."""
        while self._at_once:
            ticket = self._at_once.popleft()
            if ticket.life.state is not State.ENDED:
                return ticket
        while self._turn:
            ticket = self._turn.popleft()
            if ticket.life.state is not State.ENDED:
                self._turn.append(ticket)
                return ticket
        return None

    def found_gone(self, gone: Ticket) -> None:
        """Ask its neighbours before the others."""
        if not self._at_once:
            tenant = gone.request.tenant
            self._at_once.extend(
                ticket for ticket in self._turn if ticket.request.tenant == tenant and ticket is not gone
            )


class CancelWatch:
    """`on_gone(ticket)` ends a request; called from this thread."""

    def __init__(self, poll_s: float, on_gone: Callable[[Ticket], object]) -> None:
        self._poll_s, self._on_gone = poll_s, on_gone
        self._arrived: deque[Ticket] = deque()
        self._ring = Ring()
        self._mean_cost_s = 0.0001
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tritandem-cancel-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, ticket: Ticket) -> None:
        """From any thread."""
        self._arrived.append(ticket)
        self._wake.set()

    def close(self, timeout_s: float) -> bool:
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._closing.is_set():
            while self._arrived:
                self._ring.add(self._arrived.popleft())
            ticket = self._ring.next()
            if ticket is None:
                self._wake.wait()  # nothing is open
                self._wake.clear()
                due_s = time.monotonic()
                continue
            self._ask(ticket)
            due_s = max(due_s, time.monotonic() - self._poll_s)
            due_s += next_pause_s(len(self._ring), self._mean_cost_s, self._poll_s)
            self._closing.wait(max(0.0, due_s - time.monotonic()))

    def _ask(self, ticket: Ticket) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        try:
            gone = ticket.sink.cancelled()
        except Exception as error:
            log.warning("request %s: asking for cancellation failed: %s", ticket.request.request_id, error)
            gone = False
        cost_s = call_cost_s(time.perf_counter() - wall_s, time.thread_time() - cpu_s)
        self._mean_cost_s += 0.1 * (cost_s - self._mean_cost_s)
        if gone:
            self._ring.found_gone(ticket)
            self._on_gone(ticket)
