"""What happens on the scheduling thread: admission, order, permits, moves, deadlines.

Single-threaded: every method but the read-only ones at the end runs on the service's scheduling thread, and none
blocks. Keep this file minimal: every request passes through it. It keeps the books that the pure functions of
`admission`, `policy`, `batch_limits` and `dispatch` decide by.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from concurrent.futures import Future

from ..config import SchedulerConfig
from ..contracts.errors import DeadlineExpired, EngineFailed, Saturated, TritandemError, told
from ..contracts.requests import PriorityClass
from ..contracts.stream import LoadSnapshot
from .admission import (
    AdmissionLimits,
    Backlog,
    QueueState,
    decide,
    expected_tokens,
    no_place,
    total_load,
)
from .batch_limits import adjust, initial
from .books import Book
from .desk import Desk
from .dispatch import Demand, choose, has_room
from .engine_link import EngineLink
from .integrity import check_books, check_text
from .lifecycle import State, ended_by_error
from .messages import Arrived, Asked, DrainBegun, Ended, EngineDown, EngineUp, FirstToken, Message, Refused
from .policy.deadline import too_late
from .policy.prefix import head_start_ns
from .policy.reserve import may_start
from .policy.waiting import PolicyConfig, Waiting
from .ports import EngineStatus, SchedulerSnapshot
from .prefix_map import prefix_hashes, tenant_salt
from .recent_demand import RecentDemand
from .recent_pace import RecentPace
from .ticket import NO_SEQUENCE, Ticket
from .waiting_queue import WaitingQueue

DUES_KEPT = 1024
MAX_SUBMISSIONS = 3  # a request that has seen this many engines fail is likely the reason
HOUSEKEEPING_NS = 250_000_000
OUTAGE_GRACE_NS = 500_000_000  # without any engine this long, what waits is failed
CONNECT_GRACE_NS = 60_000_000_000  # the same at start-up, while engines load
RETRY_NS = 10_000_000  # room may appear without a message, when an engine reports free blocks
SMALLEST = Demand(prompt_tokens=1, expected_tokens=2)
FULL_PAUSE_NS = 20_000_000  # an engine that said "saturated" is left alone for so long


class SchedulerCore:
    """The books and what moves requests between them."""

    def __init__(self, links: list[EngineLink], desk: Desk, config: SchedulerConfig, now_ns: int) -> None:
        self.links, self._desk, self._config = links, desk, config
        self._books = {link.name: Book(link) for link in links}
        self._queue: WaitingQueue[Ticket] = WaitingQueue(
            PolicyConfig(ageing_ns=max(1, int(config.ageing_s * 1e9)), fair_share=config.fair_share)
        )
        self._queued = QueueState()
        self._queued_of: dict[tuple[str, PriorityClass], QueueState] = {}  # by tenant and class; those that wait
        self._pace = RecentPace()
        self._limits = AdmissionLimits(config.max_queued_requests, config.max_queued_tokens)
        self._due: dict[int, Ticket] = {}  # by number: those that have a time to end by, and have not ended
        self._dues: list[tuple[int, int]] = []  # when, number; no request is kept alive by what is left of it here
        self._blocked = False  # the first of the queue has found no room
        self._hold_until_ns = 0  # end of the tick in which arrivals are merged
        self._handed_over_ns = 0
        self._housekeeping_ns = now_ns
        self._outage_ns: int | None = now_ns + CONNECT_GRACE_NS  # from when on waiting is pointless
        self._use_ratio = 1.0
        self._demand = RecentDemand(now_ns)

    # Messages -------------------------------------------------------------------------------------

    def take(self, message: Message, now_ns: int) -> None:
        """Everything that other threads may tell."""
        match message:
            case Arrived(ticket):
                self.arrived(ticket, now_ns)
            case Ended(ticket):
                self.ended(ticket)
            case FirstToken(ticket):
                self.first_token(ticket)
            case Refused(engine, ticket, error):
                self.refused(engine, ticket, error, now_ns)
            case EngineUp(engine):
                self.engine_up(engine)
            case EngineDown(engine, failure):
                self.engine_down(engine, failure, now_ns)
            case DrainBegun():
                self.drain()
            case Asked(answer, open_tickets):
                self._answer(answer, open_tickets)

    def started(self, now_ns: int) -> None:
        self._outage_ns = now_ns + CONNECT_GRACE_NS

    def drain(self) -> None:
        self._limits = AdmissionLimits(self._limits.max_requests, self._limits.max_tokens, accepting=False)

    def arrived(self, ticket: Ticket, now_ns: int) -> None:
        if ticket.life.state is State.ENDED:
            return
        request = ticket.request
        backlog = self._backlog(request.tenant, request.priority, now_ns)
        refusal = decide(request, backlog, self._limits, now_ns, ticket.prompt_tokens)
        if isinstance(refusal, Saturated) and self._queue and not self._blocked:
            self._dispatch(now_ns)  # the queue may look full only because its tick is not over
            backlog = self._backlog(request.tenant, request.priority, now_ns)
            refusal = decide(request, backlog, self._limits, now_ns, ticket.prompt_tokens)
        if refusal is None and self._outage_ns is not None and now_ns >= self._outage_ns:
            refusal = EngineFailed("no engine answers")
        if refusal is not None:
            self._desk.end(ticket, ended_by_error(refusal))
            return
        if (due_ns := self._due_ns(ticket)) is not None:
            self._due[ticket.number] = ticket
            heapq.heappush(self._dues, (due_ns, ticket.number))
        ticket.prefix_salt = tenant_salt(request.tenant, self._config.prefix_cache_scope)
        if self._config.prefix_affinity:
            ticket.prefix_hashes = prefix_hashes(request.input_ids, ticket.prefix_salt)
        cached_tokens = max((book.prefixes.cached_tokens(ticket.prefix_hashes) for book in self._up()), default=0)
        ticket.entry = Waiting(
            number=ticket.number,
            priority=request.priority,
            tenant=request.tenant,
            arrived_ns=ticket.received_ns,
            deadline_ns=request.deadline_ns,
            tokens=expected_tokens(ticket.prompt_tokens, request.sampling.max_tokens, self._use_ratio),
            head_start_ns=head_start_ns(cached_tokens, backlog.load.prefill_token_ns),
        )
        if not self._queue:
            # A tick apart from the last hand-over nothing is gained by waiting: a lone request goes at once.
            self._hold_until_ns = max(now_ns, self._handed_over_ns + int(self._config.tick_s * 1e9))
            self._blocked = False
        self._enqueue(ticket, ticket.entry, now_ns)
        self._demand.arrived(request.priority, now_ns)

    def ended(self, ticket: Ticket) -> None:
        """Whoever ended it: give back its place, and tell the engine unless the engine said so itself."""
        ending, entry = ticket.life.ending, ticket.entry
        assert ending is not None
        self._due.pop(ticket.number, None)
        if entry is None:
            return  # refused on arrival
        self._demand.ended(ticket.request.priority)
        if ticket.number in self._queue:
            self._dequeue(ticket)
            self._queue.remove(ticket.number)
            return
        book = self._books.get(ticket.engine)
        if book is None or ticket.number not in book.tickets:
            return
        book.remove(ticket)
        answer_tokens = ticket.delivered_tokens + ticket.tokens
        self._queue.settle(entry, ticket.prompt_tokens + answer_tokens)
        self._pace.ended(ticket.prompt_tokens + ticket.request.sampling.max_tokens)
        if ending.error is None:
            self._use_ratio += 0.05 * (min(1.0, answer_tokens / ticket.request.sampling.max_tokens) - self._use_ratio)
        if not ending.engine_knows and ticket.seq_id != NO_SEQUENCE:
            book.link.cancel(ticket.seq_id)

    def first_token(self, ticket: Ticket) -> None:
        book = self._books.get(ticket.engine)
        if book is not None and ticket.number in book.tickets:
            book.prefilled(ticket)

    def refused(self, engine: str, ticket: Ticket, error: TritandemError, now_ns: int) -> None:
        """An engine did not take one of a submit. Full is no failure: the request waits on."""
        book = self._books[engine]
        if ticket.number not in book.tickets:
            return
        if isinstance(error, Saturated):
            book.full_until_ns = now_ns + FULL_PAUSE_NS
            ticket.submissions -= 1
            self._take_back(book, ticket, now_ns)
        else:
            self._desk.end(ticket, ended_by_error(error, engine_knows=True))

    def engine_up(self, engine: str) -> None:
        book = self._books[engine]
        book.limits = initial(book.link.load)
        self._outage_ns = None

    def engine_down(self, engine: str, error: Exception, now_ns: int) -> None:
        """Move what the client has seen nothing of, fail the rest."""
        book = self._books[engine]
        book.prefixes.clear()
        if not self.any_up() and self._outage_ns is None:
            self._outage_ns = now_ns + OUTAGE_GRACE_NS
        failure = ended_by_error(EngineFailed(f"engine {engine} failed: {told(error)}"), engine_knows=True)
        for ticket in list(book.tickets.values()):
            if ticket.submissions >= MAX_SUBMISSIONS or not self._take_back(book, ticket, now_ns):
                self._desk.end(ticket, failure)

    # Work -----------------------------------------------------------------------------------------

    def pause_s(self, now_ns: int) -> float:
        """How long the scheduling thread may sleep if no message comes."""
        due_ns = self._housekeeping_ns
        if self._dues:
            due_ns = min(due_ns, self._dues[0][0])
        if self._queue:
            due_ns = min(due_ns, max(self._hold_until_ns, now_ns + RETRY_NS) if self._blocked else self._hold_until_ns)
        return max(0.0, (due_ns - now_ns) / 1e9)

    def work(self, now_ns: int) -> None:
        """Whatever is due: deadlines, limits and health, then dispatch."""
        while self._dues and self._dues[0][0] <= now_ns:
            _, number = heapq.heappop(self._dues)
            if number in self._due:
                self._expire(self._due[number])
        if now_ns >= self._housekeeping_ns:
            self._housekeeping_ns = now_ns + HOUSEKEEPING_NS
            self._keep_house(now_ns)
        if self._queue and now_ns >= self._hold_until_ns:
            self._dispatch(now_ns)
        self._pace.waiting(len(self._queue) > 0, now_ns)

    def _dispatch(self, now_ns: int) -> None:
        """Hand over, in order, whatever finds room; one submit per engine. The first without room ends it.

        A request that finds no room only because of what its class must leave to those above it ends it for its
        class: those above go on.
        """
        handed: dict[EngineLink, list[Ticket]] = {}
        self._blocked, passed_over = False, None
        while (ticket := self._next(passed_over, now_ns)) is not None:
            assert ticket.entry is not None
            priority = ticket.request.priority
            ready = [book for book in self._up() if now_ns >= book.full_until_ns]
            above = self._demand.above(priority, now_ns) if self._config.reserve_for_higher_classes else 0
            books = [book for book in ready if may_start(book.share(priority), ticket.entry.tokens, above)]
            found = _find_room(ticket, ticket.entry.tokens, books)
            if found is None:
                self._blocked = True
                if len(books) == len(ready) or not any(has_room(book.view(), SMALLEST) for book in ready):
                    break
                passed_over = priority
                continue
            book, prefill_tokens = found
            self._dequeue(ticket)
            if too_late(ticket.request.deadline_ns, now_ns, book.link.load.decode_step_ns):
                self._queue.remove(ticket.number)
                self._expire(ticket)
                continue
            with self._desk.lock:
                alive = ticket.life.advance(State.DISPATCHED)
                if alive:
                    ticket.engine = ticket.engine_name = book.link.name
                    ticket.dispatched_ns = now_ns
                    if ticket.choices is not None:
                        ticket.choices.engine = book.link.name
            if not alive:
                self._queue.remove(ticket.number)
                continue
            self._queue.take(ticket.number)
            ticket.submissions += 1
            book.add(ticket, ticket.entry.tokens, prefill_tokens)
            book.prefixes.remember(ticket.prefix_hashes)
            handed.setdefault(book.link, []).append(ticket)
        for link, tickets in handed.items():
            self._handed_over_ns = now_ns
            link.submit(tickets)

    def _next(self, passed_over: PriorityClass | None, now_ns: int) -> Ticket | None:
        return self._queue.peek(now_ns) if passed_over is None else self._queue.peek_above(passed_over, now_ns)

    def _keep_house(self, now_ns: int) -> None:
        if len(self._dues) > DUES_KEPT + 2 * len(self._due):  # those of requests that ended in time
            self._dues = [entry for entry in self._dues if entry[1] in self._due]
            heapq.heapify(self._dues)
        answer_ns, silence_ns = self._config.engine_answer_s * 1e9, self._config.engine_silence_s * 1e9
        for book in self._up():
            link, started_ns = book.link, book.link.call_started_ns
            if started_ns and now_ns - started_ns > answer_ns:
                link.declare_down(EngineFailed(f"no answer to a call for {self._config.engine_answer_s:.1f} s"))
            elif not started_ns and now_ns - link.last_heard_ns > silence_ns:
                link.probe()
            if self._config.dynamic_batch:
                target_ns = int(self._config.target_inter_token_s * 1e9)
                book.limits = adjust(book.limits, link.load, len(book.tickets), target_ns)
            else:
                book.limits = initial(link.load)
        if self._outage_ns is not None and now_ns >= self._outage_ns:
            for ticket in self._queue.items():
                self._desk.end(ticket, ended_by_error(EngineFailed("no engine answers")))

    # Books ----------------------------------------------------------------------------------------

    def _up(self) -> list[Book]:
        return [book for book in self._books.values() if book.up]

    def _total_load(self) -> LoadSnapshot:
        return total_load([book.link.load for book in self._up()])

    def _due_ns(self, ticket: Ticket) -> int | None:
        """When it must have ended: its deadline, or the longest that any request may take."""
        longest_ns = int(self._config.max_request_s * 1e9)
        dues_ns = [ticket.request.deadline_ns, ticket.received_ns + longest_ns if longest_ns else None]
        return min((due_ns for due_ns in dues_ns if due_ns is not None), default=None)

    def _expire(self, ticket: Ticket) -> None:
        if ticket.request.deadline_ns == self._due_ns(ticket):
            error = DeadlineExpired("the deadline passed before the answer was complete")
        else:
            longest_s = self._config.max_request_s
            error = DeadlineExpired(f"not complete within {longest_s:g} s, which no request may exceed (max_request_s)")
        self._desk.end(ticket, ended_by_error(error))

    def _enqueue(self, ticket: Ticket, entry: Waiting, now_ns: int) -> None:
        self._queue.push(entry, ticket, now_ns)
        tokens = (ticket.prompt_tokens, ticket.request.sampling.max_tokens)
        its = (ticket.request.tenant, ticket.request.priority)
        self._queued = self._queued.plus(*tokens)
        self._queued_of[its] = self._queued_of.get(its, QueueState()).plus(*tokens)

    def _dequeue(self, ticket: Ticket) -> None:
        tokens = (ticket.prompt_tokens, ticket.request.sampling.max_tokens)
        its = (ticket.request.tenant, ticket.request.priority)
        self._queued = self._queued.minus(*tokens)
        self._queued_of[its] = self._queued_of[its].minus(*tokens)
        if self._queued_of[its].requests == 0:
            del self._queued_of[its]

    def _backlog(self, tenant: str, priority: PriorityClass, now_ns: int) -> Backlog:
        own = QueueState()
        for one in PriorityClass if self._config.fair_share and self._queued.requests else ():
            if one <= priority and (held := self._queued_of.get((tenant, one))) is not None:
                own = own.with_all(held)
        pace = self._pace.tokens_per_s(now_ns)
        return Backlog(self._queued, own, self._total_load(), self._use_ratio, pace)

    def _take_back(self, book: Book, ticket: Ticket, now_ns: int) -> bool:
        """From an engine's book to the queue, at its old place. False when the client has seen something."""
        assert ticket.entry is not None
        with self._desk.lock:
            if not self._desk.take_back(ticket):
                return False
            ticket.engine = ""
        book.remove(ticket)
        self._queue.settle(ticket.entry, 0)
        self._enqueue(ticket, ticket.entry, now_ns)
        return True

    # Read-only, from any thread -------------------------------------------------------------------

    def refusal(self, tenant: str, priority: PriorityClass, now_ns: int) -> Saturated | None:
        """That of a request of one token, before it is known how many it has. A moment old."""
        if not self._queued.requests and self._limits.accepting:  # every request comes by here
            return None
        return no_place(priority, 1, self._backlog(tenant, priority, now_ns), self._limits)

    def any_up(self) -> bool:
        return any(book.up for book in self._books.values())

    def snapshot(self) -> SchedulerSnapshot:
        books = list(self._books.values())
        return SchedulerSnapshot(
            waiting=self._queue.by_class(),
            running=sum(len(book.tickets) for book in books),
            buffered_chars=self._desk.buffered_chars,
            engines=tuple(
                EngineStatus(book.link.name, book.link.health.value, book.limits, book.link.load) for book in books
            ),
        )

    def _answer(self, answer: Future[None], open_tickets: Mapping[int, Ticket] | None) -> None:
        try:
            if open_tickets is not None:
                books = list(self._books.values())
                check_books(self._queue.items(), self._queued, self._queued_of, books, open_tickets)
                check_text(self._desk.buffered_chars, open_tickets)
        except Exception as error:
            answer.set_exception(error)
        else:
            answer.set_result(None)


def _find_room(ticket: Ticket, expected_tokens: int, books: list[Book]) -> tuple[Book, int] | None:
    """The book that the request goes into, and the tokens that its engine must prefill; None: nobody has room. Answers
    to one prompt go where it is computed already, if that engine has room."""
    choices = ticket.choices
    for book in books:
        near = choices is not None and book.link.name == choices.engine
        if near and has_room(book.view(), Demand(ticket.prompt_tokens, expected_tokens)):
            return book, ticket.prompt_tokens
    demand = Demand(len(ticket.request.input_ids), expected_tokens)
    cached = [book.prefixes.cached_tokens(ticket.prefix_hashes) for book in books]
    chosen = choose([book.view() for book in books], demand, cached)
    return None if chosen is None else (books[chosen], demand.prefill_tokens(cached[chosen]))
