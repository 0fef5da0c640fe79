"""Do the scheduler's books agree with each other? Reads everything, owns nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..contracts.requests import PriorityClass
from .admission import QueueState
from .books import Book
from .lifecycle import State
from .ticket import Ticket


def check_books(
    waiting: Sequence[Ticket],
    queued: QueueState,
    queued_of: Mapping[tuple[str, PriorityClass], QueueState],
    books: Sequence[Book],
    open_tickets: Mapping[int, Ticket],
) -> None:
    """Every open request is in one place, and every sum is right. Raises AssertionError naming what is not.

    `open_tickets` (by number) may be a little older than the rest: what has arrived since is in no book's way.
    """
    placed = [*waiting, *(ticket for book in books for ticket in book.tickets.values())]
    numbers = {ticket.number for ticket in placed}
    _claim(len(numbers) == len(placed), "a request is in two places")
    for ticket in open_tickets.values():
        arrived_and_alive = ticket.entry is not None and ticket.life.state is not State.ENDED
        _claim(ticket.number in numbers or not arrived_and_alive, f"request {ticket.number} is nowhere")
    prompt_tokens = sum(ticket.prompt_tokens for ticket in waiting)
    output_tokens = sum(ticket.request.sampling.max_tokens for ticket in waiting)
    _claim(queued == QueueState(len(waiting), prompt_tokens, output_tokens), "the sums of the queue are off")
    sums: defaultdict[tuple[str, PriorityClass], QueueState] = defaultdict(QueueState)
    for ticket in waiting:
        its = (ticket.request.tenant, ticket.request.priority)
        sums[its] = sums[its].plus(ticket.prompt_tokens, ticket.request.sampling.max_tokens)
    _claim(sums == queued_of, "the sums by tenant and class are off")
    for book in books:
        held = book.tickets.values()
        committed_tokens = sum(ticket.entry.tokens for ticket in held if ticket.entry is not None)
        prefilling_tokens = sum(ticket.prefilling_tokens for ticket in held)
        _claim(book.committed_tokens == committed_tokens, f"{book.link.name}: committed tokens are off")
        by_class = (sum(book.sequences_of), sum(book.tokens_of))
        _claim(by_class == (len(held), committed_tokens), f"{book.link.name}: the counts by class are off")
        _claim(book.prefilling_tokens == prefilling_tokens, f"{book.link.name}: prefilling tokens are off")


def check_text(buffered_chars: int, open_tickets: Mapping[int, Ticket]) -> None:
    """Raises AssertionError when text is left that no request waits for."""
    _claim(not buffered_chars or bool(open_tickets), "text is left though no request is open")


def _claim(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)
