"""Whose text goes to the tokenizer next: tenants take turns, and within a tenant a higher class goes first.

Owns the waiting texts of one pool of threads. What somebody waits for already goes before all others: texts whose
deadline has passed, and those of requests that are to stop. Knows nothing about texts. Any thread.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from ...contracts.requests import PriorityClass

MIN_DEADLINES = 64  # fewer are kept as they are
_CLASSES = len(PriorityClass)


@dataclass(frozen=True, slots=True)
class Turn:
    """What is known of a request whose text waits. `deadline_ns`: monotonic; None: none."""

    request_id: str = ""
    tenant: str = ""
    priority: PriorityClass = PriorityClass.NORMAL
    deadline_ns: int | None = None


@dataclass(eq=False, slots=True)
class _Waiting:
    turn: Turn
    run: Callable[[], None]
    taken: bool = field(default=False)


class TextTurns:
    """Of each `put` the `run` is handed to one `take`. After `close`, `take` gives what is left, and then None."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # One for each waiting text; those that `take` held back for `one_at_a_time` are counted in `_parked`. Whoever
        # waits here wakes with the lock free and in C: with a condition it would wake to wait for the one who woke it.
        self._signals: SimpleQueue[None] = SimpleQueue()
        self._parked = 0
        self._of_tenant: OrderedDict[str, list[deque[_Waiting]]] = OrderedDict()  # by class; who is next stands first
        self._urgent: deque[_Waiting] = deque()
        self._deadlines: list[tuple[int, int, _Waiting]] = []
        self._of_id: dict[str, list[_Waiting]] = {}
        self._numbers = itertools.count()
        self._closed = False
        self._count = self._out = 0
        self._one_until_ns: float = 0  # 0: texts go out side by side

    def __len__(self) -> int:
        return self._count

    def put(self, turn: Turn, run: Callable[[], None]) -> None:
        waiting = _Waiting(turn, run)
        with self._lock:
            classes = self._of_tenant.get(turn.tenant)
            if classes is None:
                classes = self._of_tenant[turn.tenant] = [deque() for _ in range(_CLASSES)]
            classes[turn.priority].append(waiting)
            if turn.deadline_ns is not None:
                heapq.heappush(self._deadlines, (turn.deadline_ns, next(self._numbers), waiting))
            if turn.request_id:
                self._of_id.setdefault(turn.request_id, []).append(waiting)
            self._count += 1
        self._signals.put(None)

    def hurry(self, request_id: str) -> None:
        """The texts of this id go next."""
        with self._lock:
            self._urgent.extend(self._of_id.get(request_id, ()))

    def one_at_a_time(self, until_ns: int | None) -> None:
        """Until then (monotonic ns; None: until the next call) no text is handed out while another is out."""
        self._one_until_ns = math.inf if until_ns is None else until_ns

    def take(self) -> Callable[[], None] | None:
        """Waits while there is none. `done` follows each `run` that was taken, on the same thread."""
        while True:
            self._signals.get()
            with self._lock:
                if self._out and not self._closed and self._one_only():
                    self._parked += 1
                    continue
                if (waiting := self._next()) is not None:
                    self._leave(waiting)
                    self._out += 1
                    return waiting.run
                assert self._closed, "a signal without a text"
                self._signals.put(None)  # to the next thread
                return None

    def done(self) -> None:
        with self._lock:
            self._out -= 1
            if self._one_only():
                self._unpark(1)
            elif self._one_until_ns:  # over: who waited for the other text goes on
                self._one_until_ns = 0
                self._unpark(self._parked)

    def _one_only(self) -> bool:
        return bool(self._one_until_ns) and self._clock() < self._one_until_ns

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._unpark(self._parked)
            self._signals.put(None)

    def _unpark(self, most: int) -> None:
        for _ in range(min(most, self._parked)):
            self._parked -= 1
            self._signals.put(None)

    def _next(self) -> _Waiting | None:
        while self._urgent:
            if not (waiting := self._urgent.popleft()).taken:
                return waiting
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            if not (waiting := heapq.heappop(self._deadlines)[2]).taken:
                return waiting
        while self._of_tenant:
            tenant, classes = next(iter(self._of_tenant.items()))
            queue = next((its for its in classes if its), None)
            if queue is None:
                del self._of_tenant[tenant]
            elif not (waiting := queue.popleft()).taken:
                self._of_tenant.move_to_end(tenant)
                return waiting
        return None

    def _leave(self, waiting: _Waiting) -> None:
        waiting.taken = True
        self._count -= 1
        if same_id := self._of_id.get(waiting.turn.request_id):
            same_id.remove(waiting)
            if not same_id:
                del self._of_id[waiting.turn.request_id]
        if len(self._deadlines) > max(MIN_DEADLINES, 2 * self._count):  # those of texts that were taken in time
            self._deadlines = [entry for entry in self._deadlines if not entry[2].taken]
            heapq.heapify(self._deadlines)
