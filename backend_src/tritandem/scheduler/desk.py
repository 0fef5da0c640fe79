"""The delivery desk: text that waits for a sender, in order per request, first answers ahead of the rest.

One lock guards every ticket's answer and life, so that "append, end, take, move" are atomic against each
other; it is held for list operations only, never for a call into a sink, an engine or a tokenizer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..contracts.answers import TokenLogprob
from ..contracts.errors import EngineFailed, Outcome
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
    """`on_end(ticket)` is called with the lock held, once per request: it must only post a message."""

    def __init__(self, max_buffered_chars: int, on_end: Callable[[Ticket], None]) -> None:
        self.lock = threading.Lock()
        self._work = threading.Condition(self.lock)
        self._urgent: deque[Ticket] = deque()  # first answers
        self._ready: deque[Ticket] = deque()  # further ones
        self._refused: deque[Ticket] = deque()  # errors of requests that were never answered; by turns with `_ready`
        self._refused_next = False
        self._idle_senders = 0
        self._closed = False
        self._max_buffered_chars = max_buffered_chars
        self._on_end = on_end
        self.buffered_chars = 0

    # Caller holds the lock ------------------------------------------------------------------------

    def append(self, ticket: Ticket, text: str, tokens: int, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Text of a running request; a reader too slow for the bounded buffer ends as FAILED. Log-probabilities count
        as the text that they become, and go out with the next."""
        ticket.tokens += tokens
        chars = len(text) + sum(CHARS_OF_LOGPROB * (1 + len(one.top)) for one in logprobs)
        ticket.logprobs += logprobs
        ticket.chars += chars
        self.buffered_chars += chars
        if text:
            ticket.texts.append(text)
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
        if not (ticket.queued or ticket.sending):
            self._enqueue(ticket)
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
                        return parcel
                if self._closed:
                    return None
                self._idle_senders += 1
                self._work.wait()
                self._idle_senders -= 1

    def close(self) -> None:
        """Senders return once everything queued is out."""
        with self.lock:
            self._closed = True
            self._work.notify_all()

    # Inside ---------------------------------------------------------------------------------------

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.queued = True
        ending = ticket.life.ending
        if ticket.responses:
            self._ready.append(ticket)
        elif ending is not None and ending.error is not None:
            self._refused.append(ticket)
        else:
            self._urgent.append(ticket)
        if self._idle_senders:
            self._work.notify()

    def _next(self) -> Ticket | None:
        if self._urgent:
            return self._urgent.popleft()
        self._refused_next = not self._refused_next
        first, second = (self._ready, self._refused) if self._refused_next else (self._refused, self._ready)
        queue = first or second
        return queue.popleft() if queue else None

    def _pack(self, ticket: Ticket) -> Parcel | None:
        ticket.queued = False
        ending = ticket.life.ending
        if not ticket.texts and ending is None:
            return None  # it moved to another engine after it was queued
        ticket.sending = True
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
