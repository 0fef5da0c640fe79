"""The delivery desk: text that waits for a sender, in order per request, first answers ahead of the rest, and of
those whoever has waited longest, each in its turn (`cadence`).

One lock guards every ticket's answer and life, so that "append, end, take, move" are atomic against each
other; it is held for list operations only, never for a call into a sink, an engine or a tokenizer.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..contracts.answers import TokenLogprob
from ..contracts.errors import EngineFailed, Outcome
from .cadence import Cadence
from .lifecycle import Ending, State, ended_by_error
from .ticket import Ticket

CHARS_OF_LOGPROB = 64  # of a token and its number, rank and text, as clients get it


@dataclass(frozen=True, slots=True)
class Parcel:
    """Everything that was pending for one request when a sender came; `ending` makes it the last."""

    ticket: Ticket
    texts: list[str]
    tokens: int
    logprobs: tuple[TokenLogprob, ...]
    cumulative_logprob: float
    ending: Ending | None


class Desk:
    """`on_end(ticket)` is called with the lock held, once per request: it must only post a message.

    `clock` gives monotonic ns. Of idle senders one sleeps until the next stream is due, the others until they are
    called.
    """

    def __init__(
        self,
        max_buffered_chars: int,
        on_end: Callable[[Ticket], None],
        cadence: Cadence | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.lock = threading.Lock()
        self.cadence = Cadence(1.0) if cadence is None else cadence
        self._clock = clock
        self._work, self._alarm = threading.Condition(self.lock), threading.Condition(self.lock)
        self._urgent: deque[Ticket] = deque()  # first answers
        self._ready: list[tuple[int, int, Ticket]] = []  # further ones: a heap of when they are due, and their number
        self._refused: deque[Ticket] = deque()  # errors of requests that were never answered; by turns with `_ready`
        self._refused_next = False
        self._idle_senders = 0  # that wait to be called
        self._alarm_ns: int | None = None  # when the sender that sleeps until then wakes; None: nobody does
        self._rest = threading.local()
        self._closed = False
        self._max_buffered_chars = max_buffered_chars
        self._on_end = on_end
        self.buffered_chars = 0

    # Caller holds the lock ------------------------------------------------------------------------

    def append(self, ticket: Ticket, text: str, tokens: int, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Text of a running request; a reader too slow for the bounded buffer ends as FAILED. Log-probabilities count
        as the text that they become, and go out with the next."""
        ticket.tokens += tokens
        chars = 0
        if text:
            chars = len(text)
            ticket.texts.append(text)
        if logprobs:
            chars += sum(CHARS_OF_LOGPROB * (1 + len(one.top)) for one in logprobs)
            ticket.logprobs += logprobs
        ticket.chars += chars
        self.buffered_chars += chars
        if not ticket.request.output.stream:
            return
        if ticket.chars > self._max_buffered_chars:
            waiting_chars = ticket.chars
            self._drop_text(ticket)
            error = EngineFailed(f"the client reads too slowly: {waiting_chars} characters were waiting for it")
            self.end_locked(ticket, ended_by_error(error))
        elif text and not (ticket.queued or ticket.sending):
            self._enqueue(ticket)

    def end_locked(self, ticket: Ticket, ending: Ending) -> bool:
        if not ticket.life.end(ending):
            return False
        if ending.error is not None and (ending.outcome is Outcome.CANCELLED or not ticket.request.output.stream):
            self._drop_text(ticket)  # nobody reads it, or it could only go out with a last chunk
        if not ticket.sending:
            self._enqueue(ticket)  # a last response waits for no interval
        self._on_end(ticket)
        return True

    def take_back(self, ticket: Ticket) -> bool:
        """A dispatched request returns to the queue with a blank answer; False: too late, or it has ended."""
        if ticket.life.state is not State.DISPATCHED:
            return False
        ticket.life.advance(State.WAITING)
        self._drop_text(ticket)
        ticket.reset_answer()
        return True

    # Any thread -----------------------------------------------------------------------------------

    def end(self, ticket: Ticket, ending: Ending) -> bool:
        """End a request now; False when it had ended already (its late tokens are ignored from then on)."""
        with self.lock:
            return self.end_locked(ticket, ending)

    def undeliverable(self, ticket: Ticket, error: EngineFailed) -> None:
        """A sender holds `ticket` and its sink refused a response: nothing follows but this error."""
        with self.lock:
            self._drop_text(ticket)
            ending = ended_by_error(error)
            if ticket.life.state is not State.ENDED:
                self.end_locked(ticket, ending)
            else:
                ticket.life.amend(ending)

    def take(self, previous: Ticket | None) -> Parcel | None:
        """Return the ticket a sender is done with and wait for the next; None once closed and empty."""
        with self.lock:
            if previous is not None:
                previous.sending = False
                if previous.texts or previous.life.state is State.ENDED:
                    self._enqueue(previous)
            while True:
                while (ticket := self._next()) is not None:
                    parcel = self._pack(ticket)
                    if parcel is not None:
                        self._leave()
                        return parcel
                if self._closed and not self._ready:
                    return None
                begun_ns = self._clock()
                self._wait()
                self._rest.ns = getattr(self._rest, "ns", 0) + self._clock() - begun_ns

    def note_cost(self, busy_ns: int, responses: int, senders: int) -> None:
        with self.lock:
            self.cadence.note_cost(busy_ns / senders, responses)

    def rested_ns(self) -> int:
        """For how long the calling thread has found nothing to take, since it last asked."""
        rested_ns: int = getattr(self._rest, "ns", 0)
        self._rest.ns = 0
        return rested_ns

    def close(self) -> None:
        """Senders return once everything queued is out."""
        with self.lock:
            self._closed = True
            self._idle_senders = 0
            self._work.notify_all()
            self._alarm.notify_all()

    # Inside ---------------------------------------------------------------------------------------

    def _enqueue(self, ticket: Ticket) -> None:
        """Also of one that is queued already and need not wait any longer: its older place is passed over."""
        now_ns, ending = self._clock(), ticket.life.ending
        if ticket.responses:
            due_ns = now_ns if ending is not None else self.cadence.due_ns(ticket.taken_ns, now_ns)
            if ticket.queued and ticket.due_ns <= due_ns:
                return
            ticket.due_ns = due_ns
            heapq.heappush(self._ready, (due_ns, ticket.number, ticket))
            if due_ns > now_ns:
                ticket.queued = True
                self._set_alarm(due_ns)
                return
        elif ticket.queued:
            return
        elif ending is not None and ending.error is not None:
            self._refused.append(ticket)
        else:
            self._urgent.append(ticket)
        ticket.queued = True
        self._call()

    def _call(self) -> None:
        """Something can be sent now."""
        if self._idle_senders:
            self._call_idle()
        elif self._alarm_ns is not None:
            self._alarm.notify()

    def _call_idle(self) -> None:
        self._idle_senders -= 1
        self._work.notify()

    def _set_alarm(self, due_ns: int) -> None:
        """Somebody must wake then, if any sender is idle."""
        if self._alarm_ns is not None:
            if due_ns < self._alarm_ns:
                self._alarm.notify()
        elif self._idle_senders:
            self._call_idle()

    def _leave(self) -> None:
        """A sender leaves with a parcel: who is idle sees to what is left."""
        if self._urgent or self._refused:
            self._call()
        elif self._ready:
            due_ns = self._ready[0][0]
            if due_ns <= self._clock():
                self._call()
            else:
                self._set_alarm(due_ns)

    def _wait(self) -> None:
        if self._ready and self._alarm_ns is None:
            self._alarm_ns = self._ready[0][0]
            self._alarm.wait(max(0, self._alarm_ns - self._clock()) / 1e9)
            self._alarm_ns = None
        else:
            self._idle_senders += 1
            self._work.wait()

    def _next(self) -> Ticket | None:
        if self._urgent:
            return self._urgent.popleft()
        self._refused_next = not self._refused_next
        if self._refused and self._refused_next:
            return self._refused.popleft()
        if self._ready and (self._closed or self._ready[0][0] <= self._clock()):
            return heapq.heappop(self._ready)[2]
        return self._refused.popleft() if self._refused else None

    def _pack(self, ticket: Ticket) -> Parcel | None:
        if not ticket.queued:
            return None  # its last response was taken from a better place
        ticket.queued = False
        ending = ticket.life.ending
        if not ticket.texts and ending is None:
            return None  # it moved to another engine after it was queued
        ticket.sending, ticket.taken_ns = True, self._clock()
        if ending is not None:
            self.cadence.streams -= ticket.responses > 0
        elif not ticket.responses:
            self.cadence.streams += 1
        if ticket.life.state is State.DISPATCHED:
            ticket.life.advance(State.ANSWERING)
        parcel = Parcel(ticket, ticket.texts, ticket.tokens, tuple(ticket.logprobs), ticket.cumulative_logprob, ending)
        ticket.responses += 1
        ticket.delivered_tokens += ticket.tokens
        self._drop_text(ticket)
        return parcel

    def _drop_text(self, ticket: Ticket) -> None:
        self.buffered_chars -= ticket.chars
        ticket.texts, ticket.chars, ticket.tokens, ticket.logprobs = [], 0, 0, []
