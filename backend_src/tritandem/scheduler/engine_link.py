"""One engine as the scheduler reaches it: two threads around a port, and whether it answers.

The caller thread makes every submit, cancel and load call, in order, everything that came in meanwhile merged
into one; the reader thread iterates the token stream and reopens it while sequences live. A failed or
unanswered call takes the engine out; the caller thread probes with back-off and reports when it is back.
Knows nothing about order or admission.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum

from ..contracts.errors import EngineFailed, TritandemError, told
from ..contracts.requests import EngineRequest
from ..contracts.stream import EnginePort, LoadSnapshot
from .delivery import TokenRouter
from .desk import Desk
from .lifecycle import State
from .messages import EngineDown, EngineUp, Refused, Tell
from .ports import TextStreamsPort
from .ticket import NO_SEQUENCE, Ticket

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
STALE_STEPS = 64  # an engine's report may be a little older than the message that carries it
OUT_PATIENCE_S = 0.25  # at close, for the threads of an engine that does not answer
REOPEN_PAUSE_S = 0.02  # after a stream that ended without a message while sequences live


class Health(Enum):
    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


class EngineLink:
    """`load` and `last_heard_ns` are replaced whole by the link's threads and read by anyone."""

    def __init__(
        self,
        port: EnginePort,
        text: TextStreamsPort,
        desk: Desk,
        router: TokenRouter,
        next_seq_id: Callable[[], int],
        tell: Tell,
        clock: Callable[[], int],
    ) -> None:
        self.port, self.name = port, port.name
        self.load = LoadSnapshot()
        self._streamed_steps = 0  # of the newest stream message
        self.last_heard_ns = clock()
        self.call_started_ns = 0  # of the call in progress; 0: none
        self._text, self._desk, self._router = text, desk, router
        self._next_seq_id, self._tell, self._clock = next_seq_id, tell, clock
        self._wake = threading.Condition()
        # Under _wake: commands, health, and sequences to cancel once the engine is back.
        self.health = Health.CONNECTING
        self._submits: list[Ticket] = []
        self._cancels: list[int] = []
        self._orphans: list[int] = []
        self._submitting = False  # the engine may not know the newest routes yet
        self._probe = True
        self._closed = False
        self._in_stream = False  # the reader is inside a stream call
        self._caller = threading.Thread(target=self._call_loop, name=f"tritandem-call-{self.name}", daemon=True)
        self._reader = self._new_reader()

    def start(self) -> None:
        self._caller.start()
        self._reader.start()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Hand over in the next call. Ignored once the engine is out: the `down` message then covers them."""
        with self._wake:
            if self.health is Health.UP:
                self._submits.extend(tickets)
                self._wake.notify_all()

    def cancel(self, seq_id: int) -> None:
        """Forget the sequence and ask the engine to end it."""
        self._router.routes.pop(seq_id, None)
        with self._wake:
            self._cancels.append(seq_id)
            self._wake.notify_all()

    def probe(self) -> None:
        """Ask for the load soon; the answer, or its absence, shows in `last_heard_ns` and `call_started_ns`."""
        with self._wake:
            self._probe = True
            self._wake.notify_all()

    def declare_down(self, error: TritandemError | Exception) -> None:
        """Take the engine out; what it may still run is cancelled when it is back. Later calls change nothing."""
        with self._wake:
            if self.health is Health.DOWN or self._closed:
                return
            log.warning("engine %s is out of service: %s", self.name, error)
            self.health = Health.DOWN
            self.load, self._streamed_steps = LoadSnapshot(), 0
            self._orphans += [*self._router.routes, *self._cancels]
            self._router.routes.clear()
            self._submits, self._cancels = [], []
            self._wake.notify_all()
        self._tell(EngineDown(self.name, error))

    def live(self) -> int:
        """Sequences the engine is expected to report on."""
        return len(self._router.routes)

    def close(self, timeout_s: float) -> bool:
        """Stop both threads; False when one is still inside a call, where one to a dead engine stays."""
        with self._wake:
            self._closed = True
            if self._out():
                timeout_s = min(timeout_s, OUT_PATIENCE_S)
            self._wake.notify_all()
        threads = (self._caller, self._reader)
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    # The caller thread ----------------------------------------------------------------------------

    def _call_loop(self) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            with self._wake:
                while not (
                    self._closed or self._submits or self._cancels or self._probe or self.health is not Health.UP
                ):
                    self._wake.wait()
                out = self._out()
                if self._closed and (out or not self._cancels):
                    return
                submits, self._submits = self._submits, []
                cancels, self._cancels = self._cancels, []
                probe, self._probe = self._probe, False
            try:
                if out:
                    self._try_to_connect()
                    retry_s = FIRST_RETRY_S
                    continue
                if submits:
                    self._submit(submits)
                if cancels:
                    self._cancel(cancels)
                if probe:
                    self._ask_load()
            except Exception as error:
                self.declare_down(error)
                with self._wake:
                    self._orphans += cancels
                    self._wake.wait_for(lambda: self._closed, retry_s)
                retry_s = min(LAST_RETRY_S, 2 * retry_s)

    def _out(self) -> bool:
        return self.health is not Health.UP

    def _call(self, call: Callable[[], object]) -> object:
        self.call_started_ns = self._clock()
        try:
            answer = call()
        finally:
            self.call_started_ns = 0
        self.last_heard_ns = self._clock()
        return answer

    def _cancel(self, seq_ids: list[int]) -> None:
        self._call(lambda: self.port.cancel(seq_ids))

    def _ask_load(self) -> None:
        before = self.load
        answer = self._call(self.port.load)
        assert isinstance(answer, LoadSnapshot)
        self._heard(answer, before.steps)

    def _try_to_connect(self) -> None:
        self._ask_load()
        with self._wake:
            orphans = list(self._orphans)
        if orphans:
            self._cancel(orphans)
        with self._wake:
            del self._orphans[: len(orphans)]
            self.health = Health.UP
            if self._in_stream:  # still in a stream of before, which may never end: whatever it brings is void
                self._in_stream = False
                self._reader = self._new_reader()
                self._reader.start()
        self._tell(EngineUp(self.name))

    def _submit(self, tickets: list[Ticket]) -> None:
        """One call for all. Text states are open and routes known before the engine can answer."""
        accepted, requests = [], []
        for ticket in tickets:
            asked = ticket.request
            try:
                rules = asked.stop_words, asked.sampling.min_tokens, asked.output.control_tokens
                state = self._text.open(asked.input_ids, *rules)
            except Exception as error:
                self._tell(Refused(self.name, ticket, _unreadable(error)))
                continue
            seq_id = self._next_seq_id()
            with self._desk.lock:
                if ticket.life.state is not State.DISPATCHED or ticket.engine != self.name:
                    continue  # it ended while it was on its way
                if ticket.seq_id != NO_SEQUENCE:
                    continue  # handed over twice: an engine that was back at once has it from the first time
                ticket.text_state, ticket.seq_id = state, seq_id
            accepted.append(ticket)
            requests.append(_engine_request(ticket, seq_id))
        if not requests:
            return
        with self._wake:
            if self._out():
                return  # declared down meanwhile: `down` has dealt with these tickets
            self._router.routes.update(zip([request.seq_id for request in requests], accepted, strict=True))
            self._submitting = True
            self._wake.notify_all()  # the reader opens the stream while the call is under way
        try:
            answers = self._call(lambda: self.port.submit(requests))
        finally:
            self._submitting = False
        assert isinstance(answers, list)
        for ticket, request, refusal in zip(accepted, requests, answers, strict=True):
            if refusal is not None:
                self._router.routes.pop(request.seq_id, None)
                self._tell(Refused(self.name, ticket, refusal))
        with self._wake:
            if self._out():
                self._orphans.extend(request.seq_id for request in requests)

    # The reader thread ----------------------------------------------------------------------------

    def _read_loop(self) -> None:
        me = threading.current_thread()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or (self.health is Health.UP and self.live() > 0))
                if self._closed:
                    return
                owed = [] if self._submitting else list(self._router.routes)
                self._in_stream = True
            try:
                messages = self._read_stream(me)
                if messages == 0 and any(seq_id in self._router.routes for seq_id in owed):
                    raise EngineFailed("it has lost its sequences (restarted?)")
            except Exception as error:
                if self._reader is not me:
                    return
                self.declare_down(error)
                messages = 0
            with self._wake:
                if self._reader is not me:
                    return
                self._in_stream = False
                if messages == 0:
                    self._wake.wait_for(lambda: self._closed, REOPEN_PAUSE_S)

    def _read_stream(self, me: threading.Thread) -> int:
        """Number of messages until the stream ended."""
        messages = 0
        for batch in self.port.stream():
            if self._reader is not me:
                break
            messages += 1
            self._heard(batch.load, self._streamed_steps)
            self._streamed_steps = batch.load.steps
            self._router.deliver(batch)
        return messages

    def _new_reader(self) -> threading.Thread:
        return threading.Thread(target=self._read_loop, name=f"tritandem-read-{self.name}", daemon=True)

    def _heard(self, load: LoadSnapshot, earlier_steps: int) -> None:
        """Step counts grow in the life of an engine: a much smaller one is another engine under the same name.

        `earlier_steps`: of a report that was certainly made earlier. A stream may lag behind the answers to calls by
        any number of steps.
        """
        self.last_heard_ns = self._clock()
        if load.steps + STALE_STEPS < earlier_steps:
            raise EngineFailed("it was restarted")
        if load.steps >= self.load.steps:
            self.load = load


def _engine_request(ticket: Ticket, seq_id: int) -> EngineRequest:
    request = ticket.request
    return EngineRequest(
        seq_id,
        request.input_ids,
        request.sampling,
        request.stop_ids,
        request.bad_words,
        request.logit_bias,
        request.allowed_token_ids,
        request.grammar,
        ticket.prefix_salt,
        ticket.family,
    )


def _unreadable(error: Exception) -> EngineFailed:
    log.error("a text stream could not be opened", exc_info=error)
    return EngineFailed(f"its text stream could not be opened: {told(error)}")
