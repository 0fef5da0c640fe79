"""Sender threads: take what is pending for one request, make one response of it, hand it to the sink.

A slow path makes responses longer, never fewer tokens a second. Only these threads call `send`, `finish` and
`fail`; a sink that blocks holds up one of them and never a token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from ..contracts.answers import Chunk
from ..contracts.errors import EngineFailed, TritandemError, told
from .desk import Desk, Parcel
from .ticket import Ticket

log = logging.getLogger(__name__)

COSTED = 32  # responses between two looks at what they cost


class Senders:
    """`on_delivered(ticket)` is called after a request's last response, once. `in_send` is entered for as long as a
    response is on its way."""

    def __init__(
        self,
        desk: Desk,
        threads: int,
        clock: Callable[[], int],
        on_delivered: Callable[[Ticket], None],
        in_send: AbstractContextManager[object],
    ) -> None:
        self._desk, self._clock, self._on_delivered, self._in_send = desk, clock, on_delivered, in_send
        self._threads = [
            threading.Thread(target=self._run, name=f"tritandem-sender-{i}", daemon=True)
            for i in range(max(1, threads))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        previous: Ticket | None = None
        responses, since_ns = 0, self._clock()
        while True:
            if responses == COSTED:
                now_ns = self._clock()
                self._desk.note_cost(now_ns - since_ns - self._desk.rested_ns(), responses, len(self._threads))
                responses, since_ns = 0, now_ns
            responses += 1
            parcel = self._desk.take(previous)
            if parcel is None:
                return
            if parcel.ending is None:
                with self._in_send:
                    self._send(parcel)
                previous = parcel.ticket
            else:
                with self._in_send:
                    self._last(parcel)
                previous = None  # it stays in hand: nothing may follow the last response
                self._on_delivered(parcel.ticket)

    def _send(self, parcel: Parcel) -> None:
        ticket = parcel.ticket
        try:
            ticket.sink.send(self._chunk(parcel))
        except Exception as error:
            self._desk.undeliverable(ticket, _refused(error))
            return
        self._note_sent(ticket)

    def _last(self, parcel: Parcel) -> None:
        ticket, ending = parcel.ticket, parcel.ending
        assert ending is not None
        error = ending.error
        try:
            if error is None:
                self._note_sent(ticket)
                ticket.sink.finish(self._chunk(parcel))
            elif parcel.texts:
                ticket.sink.send(self._chunk(parcel))
        except Exception as cause:
            error = _refused(cause)
            self._desk.undeliverable(ticket, error)
        if error is not None:
            self._fail(ticket, error)

    def _note_sent(self, ticket: Ticket) -> None:
        now_ns = self._clock()
        if ticket.first_sent_ns == 0:
            ticket.first_sent_ns = now_ns
        elif now_ns - ticket.last_sent_ns > ticket.longest_pause_ns:
            ticket.longest_pause_ns = now_ns - ticket.last_sent_ns
        ticket.last_sent_ns = now_ns

    def _fail(self, ticket: Ticket, error: TritandemError) -> None:
        try:
            ticket.sink.fail(error)
        except Exception as cause:
            log.error("request %s: not even an error could be delivered: %s", ticket.request.request_id, cause)

    def _chunk(self, parcel: Parcel) -> Chunk:
        ticket, ending = parcel.ticket, parcel.ending
        text = "".join(parcel.texts)
        if ticket.prompt_text:
            text, ticket.prompt_text = ticket.prompt_text + text, ""
        prompt_logprobs, ticket.prompt_logprobs = ticket.prompt_logprobs, None
        ended_well = ending is not None and ending.error is None
        return Chunk(
            text=text,
            num_output_tokens=parcel.tokens,
            finish_reason=ending.reason if ending is not None else None,
            outcome=ending.outcome if ended_well and ending is not None else None,
            num_input_tokens=len(ticket.request.input_ids),
            cached_tokens=ticket.cached_tokens,
            cumulative_logprob=parcel.cumulative_logprob,
            logprobs=parcel.logprobs,
            stamps=ticket.stamps(self._clock()) if ended_well else None,
            seed=ticket.request.sampling.seed,
            prompt_logprobs=prompt_logprobs,
            stop_reason=ticket.stop_reason if ending is not None else None,
        )


def _refused(cause: Exception) -> EngineFailed:
    log.error("a response could not be delivered", exc_info=cause)
    return EngineFailed(f"a response could not be delivered: {told(cause)}")
