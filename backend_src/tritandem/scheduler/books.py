"""What one engine has been given and has not finished: the numbers that permits are decided by.

Owned by the scheduling thread; knows nothing about how a request gets there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..contracts.requests import PriorityClass
from .batch_limits import BatchLimits
from .dispatch import EngineView
from .engine_link import EngineLink, Health
from .policy.reserve import Share
from .prefix_map import PrefixMap
from .ticket import Ticket


@dataclass(slots=True)
class Book:
    """One engine's share."""

    link: EngineLink
    prefixes: PrefixMap = field(default_factory=PrefixMap)
    limits: BatchLimits = field(default_factory=BatchLimits)
    tickets: dict[int, Ticket] = field(default_factory=dict)  # by ticket number
    committed_tokens: int = 0
    prefilling_tokens: int = 0
    full_until_ns: int = 0
    sequences_of: list[int] = field(default_factory=lambda: [0] * len(PriorityClass))  # by class
    tokens_of: list[int] = field(default_factory=lambda: [0] * len(PriorityClass))  # committed, by class

    @property
    def up(self) -> bool:
        return self.link.health is Health.UP

    def add(self, ticket: Ticket, expected_tokens: int, prefill_tokens: int) -> None:
        self.tickets[ticket.number] = ticket
        self.committed_tokens += expected_tokens
        self.prefilling_tokens += prefill_tokens
        ticket.prefilling_tokens = prefill_tokens
        self._count(ticket, 1, expected_tokens)

    def prefilled(self, ticket: Ticket) -> None:
        self.prefilling_tokens -= ticket.prefilling_tokens
        ticket.prefilling_tokens = 0

    def remove(self, ticket: Ticket) -> None:
        assert ticket.entry is not None
        del self.tickets[ticket.number]
        self.committed_tokens -= ticket.entry.tokens
        self.prefilled(ticket)
        self._count(ticket, -1, -ticket.entry.tokens)

    def share(self, priority: PriorityClass) -> Share:
        """What this class and those below it hold."""
        load = self.link.load
        return Share(
            sum(self.sequences_of[priority:]),
            sum(self.tokens_of[priority:]),
            self.limits.sequences,
            load.total_blocks * load.block_tokens,
        )

    def _count(self, ticket: Ticket, sequences: int, tokens: int) -> None:
        self.sequences_of[ticket.request.priority] += sequences
        self.tokens_of[ticket.request.priority] += tokens

    def view(self) -> EngineView:
        return EngineView(self.link.load, self.limits, len(self.tickets), self.committed_tokens, self.prefilling_tokens)
