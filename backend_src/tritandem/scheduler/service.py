"""The scheduler: from `submit` to exactly one end per request.

Owns, on its scheduling thread, the waiting queue, every engine's book and all timers; other threads reach it
through a mailbox. Sender, reader, caller and watch threads live in their own files. Knows nothing about Triton,
torch, or what text looks like.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, nullcontext

from ..config import SchedulerConfig
from ..contracts.answers import ResponseSink
from ..contracts.errors import Draining, EngineFailed, Saturated
from ..contracts.requests import GenerationRequest, PriorityClass
from ..contracts.stream import EnginePort
from .cadence import Cadence
from .cancel_watch import CancelWatch
from .choices import Choices, ChoiceSink, parts, stamps_of
from .core import SchedulerCore
from .delivery import TokenRouter
from .desk import Desk
from .early_stops import EarlyStops
from .engine_link import EngineLink
from .lifecycle import CLIENT_GONE, STOPPED_BY_ID, ended_by_error
from .messages import Arrived, Asked, DrainBegun, Ended, Message
from .ports import FinishedRequest, Observer, SchedulerSnapshot, TextStreamsPort
from .senders import Senders
from .ticket import Ticket

log = logging.getLogger(__name__)

CLOSE_PATIENCE_S = 3.0  # an idle engine stream ends by itself after about a second


class SchedulerService:
    """One per process. All public methods may be called from any thread.

    `clock` gives monotonic ns and is replaced in tests only. `in_round` is entered for as long as the scheduling thread
    is at work, `in_send` for as long as a sender hands over a response.
    """

    def __init__(
        self,
        engines: Sequence[EnginePort],
        text: TextStreamsPort,
        config: SchedulerConfig,
        observer: Observer | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        in_round: AbstractContextManager[object] = nullcontext(),  # noqa: B008  (it has no state)
        in_send: AbstractContextManager[object] = nullcontext(),  # noqa: B008
    ) -> None:
        self._in_round = in_round
        self._config, self._observer, self._clock = config, observer, clock
        self._mail: deque[Message] = deque()
        self._wake = threading.Condition()
        self._open: dict[int, Ticket] = {}  # received, last response not yet out
        self._by_id: dict[str, list[Ticket]] = {}
        self._early_stops = EarlyStops()
        self._all_done = threading.Condition()  # guards _open, _by_id, _early_stops
        self._numbers = itertools.count()
        self._draining = self._started = False
        self._closed = False  # under _all_done: no submission after that
        self._stopping = False  # under _wake: the scheduling thread returns

        cadence = Cadence(config.sender_share)
        self._desk = Desk(config.max_buffered_chars, lambda ticket: self._tell(Ended(ticket)), cadence, clock)
        self._senders = Senders(self._desk, config.sender_threads, clock, self._delivered, in_send)
        self._watch = CancelWatch(
            config.cancel_poll_s, config.cancel_poll_share, lambda ticket: self._desk.end(ticket, CLIENT_GONE)
        )
        seq_ids = itertools.count(1)
        links = []
        for port in engines:
            router = TokenRouter(text, self._desk, self._tell)
            links.append(EngineLink(port, text, self._desk, router, lambda: next(seq_ids), self._tell, clock))
        self._core = SchedulerCore(links, self._desk, config, clock())
        self._thread = threading.Thread(target=self._run, name="tritandem-scheduler", daemon=True)

    # Life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all threads and connect to the engines in the background; `ready` tells when one answers."""
        self._started = True
        self._core.started(self._clock())
        self._senders.start()
        self._watch.start()
        for link in self._core.links:
            link.start()
        self._thread.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for all others to end. True when none is left."""
        self._draining = True
        self._tell(DrainBegun())
        with self._all_done:
            return self._all_done.wait_for(lambda: not self._open, timeout_s)

    def close(self) -> None:
        """End whatever is left as FAILED, deliver that, and stop all threads. Call `drain` first to be gentle."""
        self._draining = True
        self._tell(DrainBegun())
        with self._all_done:
            if self._closed or not self._started:
                return
            self._closed = True
            left = list(self._open.values())
        for ticket in left:
            self._desk.end(ticket, ended_by_error(EngineFailed("the server shut down before the answer was complete")))
        with self._all_done:
            self._all_done.wait_for(lambda: not self._open, CLOSE_PATIENCE_S)
        stuck = [] if self._watch.close(CLOSE_PATIENCE_S) else ["cancel watch"]
        futures.wait(
            [self._ask()], CLOSE_PATIENCE_S
        )  # every cancel that follows from the ends above is with its engine's link now
        stuck += [link.name for link in self._core.links if not link.close(CLOSE_PATIENCE_S)]
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(CLOSE_PATIENCE_S)
        self._desk.close()
        if not self._senders.join(CLOSE_PATIENCE_S):
            stuck.append("senders")
        if stuck:
            log.warning("still busy at close: %s", ", ".join(stuck))

    # Requests -------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, sink: ResponseSink) -> None:
        """Take a request. Never blocks and never raises: whatever happens, it ends once through `sink`."""
        tickets = self._tickets(request, sink)
        with self._all_done:
            taken = not self._closed
            if taken:
                self._open |= {ticket.number: ticket for ticket in tickets}
                if request.request_id:
                    self._by_id.setdefault(request.request_id, []).extend(tickets)
            stopped = self._early_stops.mean(request.request_id, tickets[0].received_ns)
        if not taken:
            sink.fail(Draining())  # no thread is left to do it
            return
        for ticket in tickets:
            if stopped:
                self._desk.end(ticket, STOPPED_BY_ID)
            else:
                self._tell(Arrived(ticket))
                self._watch.watch(ticket)

    def _tickets(self, request: GenerationRequest, sink: ResponseSink) -> list[Ticket]:
        """One for each answer."""
        now_ns = self._clock()
        if request.sampling.n == 1:
            return [Ticket(next(self._numbers), request, sink, now_ns)]
        choices = Choices(sink, request.output.stream, self._desk.end)
        for index, part in enumerate(parts(request)):
            number = next(self._numbers)
            family = choices.tickets[0].family if index else number + 1
            choices.tickets.append(Ticket(number, part, ChoiceSink(choices, index), now_ns, choices, family))
        return list(choices.tickets)

    def stop(self, request_id: str) -> bool:
        """End the open request(s) of this id as STOPPED, with the text so far. False: there is none yet.

        One that the server has received by now and that is still being tokenized ends when it comes here.
        """
        with self._all_done:
            tickets = list(self._by_id.get(request_id, ()))
            if request_id:
                self._early_stops.note(request_id, self._clock())
        ended = [self._desk.end(ticket, STOPPED_BY_ID) for ticket in tickets]
        return any(ended)

    # State ----------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a new request would be taken: not draining, and an engine answers."""
        return self._started and not self._draining and not self._closed and self._core.any_up()

    def refusal(self, tenant: str, priority: PriorityClass) -> Saturated | None:
        """Why one more request of this tenant and class would be refused; None: it may come."""
        return self._core.refusal(tenant, priority, self._clock())

    def snapshot(self) -> SchedulerSnapshot:
        return self._core.snapshot()

    def check_integrity(self) -> None:
        """Compare all books with each other. Raises AssertionError naming what does not add up, futures.TimeoutError
        when the scheduling thread does not answer."""
        if not self._started or self._closed:
            return
        with self._all_done:
            open_tickets = dict(self._open)
        self._ask(open_tickets).result(CLOSE_PATIENCE_S)

    # Threads --------------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
        with self._wake:
            self._mail.append(message)
            self._wake.notify()

    def _ask(self, open_tickets: Mapping[int, Ticket] | None = None) -> futures.Future[None]:
        answer: futures.Future[None] = futures.Future()
        self._tell(Asked(answer, open_tickets))
        return answer

    def _run(self) -> None:
        next_gauges_ns = self._clock()
        while True:
            pause_s = self._core.pause_s(self._clock())
            with self._wake:
                if not self._mail and pause_s > 0 and not self._stopping:
                    self._wake.wait(pause_s)
                if self._stopping and not self._mail:
                    return
                mail, self._mail = self._mail, deque()
            with self._in_round:
                for message in mail:
                    self._take(message)
                now_ns = self._clock()
                self._guard(lambda now_ns=now_ns: self._core.work(now_ns))  # type: ignore[misc]
                if self._observer is not None and now_ns >= next_gauges_ns:
                    next_gauges_ns = now_ns + 1_000_000_000
                    self._guard(lambda observer=self._observer: observer.gauges(self.snapshot()))  # type: ignore[misc]

    def _guard(self, step: Callable[[], None]) -> None:
        """A bug in one step must not end the scheduling thread, on which every request depends."""
        try:
            step()
        except Exception:
            log.exception("the scheduling thread continues after an error")

    def _take(self, message: Message) -> None:
        """A bug that one request brings to light must not leave its client waiting."""
        try:
            self._core.take(message, self._clock())
        except Exception as error:
            log.exception("the scheduling thread continues after an error")
            if isinstance(message, Arrived):
                self._desk.end(message.ticket, ended_by_error(EngineFailed(f"internal error ({type(error).__name__})")))

    def _delivered(self, ticket: Ticket) -> None:
        """A sender is done with a request for good."""
        choices = ticket.choices
        record = None
        if choices is None or choices.delivered():
            record = self._record(ticket)
        if choices is not None and record is not None:
            choices.tickets.clear()  # they hold each other
        with self._all_done:
            del self._open[ticket.number]
            same_id = self._by_id.get(ticket.request.request_id)
            if same_id is not None:
                same_id.remove(ticket)
                if not same_id:
                    del self._by_id[ticket.request.request_id]
            if not self._open:
                self._all_done.notify_all()
        if self._observer is not None and record is not None:
            self._guard(lambda observer=self._observer: observer.finished(record))  # type: ignore[misc]

    def _record(self, ticket: Ticket) -> FinishedRequest:
        """Of its request; the prompt counts once."""
        tickets = [ticket] if ticket.choices is None else ticket.choices.tickets
        first, now_ns = tickets[0], self._clock()
        request, ending = first.request, ticket.life.ending if ticket.choices is None else ticket.choices.ending
        assert ending is not None
        return FinishedRequest(
            request_id=request.request_id,
            outcome=ending.outcome,
            priority=request.priority,
            tenant=request.tenant,
            stamps=stamps_of([one.stamps(now_ns) for one in tickets]),
            num_input_tokens=len(request.input_ids),
            num_output_tokens=sum(one.delivered_tokens for one in tickets),
            cached_tokens=first.cached_tokens,
            num_responses=sum(one.responses for one in tickets) if request.output.stream else 1,
            engine=first.engine_name,
            error="" if ending.error is None else ending.error.public_message(),
            trace_parent=request.trace_parent,
            seed=None if request.sampling.greedy else request.sampling.seed,
            sequences=len(tickets),
            longest_pause_ns=max(one.longest_pause_ns for one in tickets),
        )
