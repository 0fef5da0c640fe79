"""Every request of a soak, what its client saw, what the server wrote about it, and whether the two agree.

Owns the entries and the judgement. Knows nothing about clients, servers or time other than numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What a client may see besides the outcome words of the server.
CLOSED = "CLOSED"  # it left: closed, cancelled or killed
REFUSED = "REFUSED"  # Triton itself could not read the message: no model heard of it
UNREACHABLE = "UNREACHABLE"  # no connection, or it broke: allowed only while the server is being replaced
TIMEOUT = "TIMEOUT"  # no end within the client's patience
SERVER_WORDS = frozenset(
    {"COMPLETED", "STOPPED", "REJECTED_SATURATED", "REJECTED_INVALID", "EXPIRED", "CANCELLED", "FAILED"}
)
EXAMPLES_KEPT = 5


@dataclass(slots=True)
class Entry:
    """One request. `outcome` is "" until its client has seen the end."""

    request_id: str
    kind: str
    sent_s: float
    exact_tokens: int = 0  # a complete answer has so many; 0: any number
    outcome: str = ""
    ended_s: float = 0.0
    tokens: int = 0
    ended_times: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Audit:
    """`outcomes` has one word per request: the server's where it wrote one, else the client's."""

    sent: int
    outcomes: dict[str, int]
    hung: int
    duplicated: int
    disagreeing: int  # client and server tell different ends, or different numbers of tokens
    lost: int  # an end that nobody can account for
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.hung or self.duplicated or self.disagreeing or self.lost)


class Ledger:
    """Filled by the clients; used from one thread."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def open(self, request_id: str, kind: str, now_s: float, exact_tokens: int = 0) -> Entry:
        entry = self.entries[request_id] = Entry(request_id, kind, now_s, exact_tokens)
        return entry

    def close(self, entry: Entry, outcome: str, now_s: float, tokens: int = 0, detail: str = "") -> None:
        entry.ended_times += 1
        entry.outcome, entry.ended_s, entry.tokens, entry.detail = outcome, now_s, tokens, detail

    def unfinished(self) -> int:
        return sum(not entry.outcome for entry in self.entries.values())

    def counts(self) -> Counter[str]:
        return Counter(entry.outcome for entry in self.entries.values() if entry.outcome)


def audit(
    entries: Iterable[Entry], lines: Iterable[Mapping[str, Any]], outages: Sequence[tuple[float, float]]
) -> Audit:
    """Compare. `lines` are the server's log lines of finished requests; `outages` are (from, to) in seconds."""
    written: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        written.setdefault(str(line["id"]), []).append(line)
    counts: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    examples: dict[str, list[str]] = {}

    def note(what: str, entry: Entry, its_lines: Sequence[Mapping[str, Any]]) -> None:
        counts[what] += 1
        told = [f"{line['outcome']}/{line['output_tokens']}" for line in its_lines]
        kept = examples.setdefault(what, [])
        if len(kept) < EXAMPLES_KEPT:
            client = f"{entry.outcome or 'nothing'}/{entry.tokens} after {entry.ended_s - entry.sent_s:.1f} s"
            kept.append(f"{what}: {entry.request_id} ({entry.kind}): client {client} {entry.detail}; server {told}")

    known = set()
    for entry in entries:
        known.add(entry.request_id)
        its_lines = written.get(entry.request_id, [])
        for what in judge(entry, its_lines, outages):
            note(what, entry, its_lines)
        outcomes[str(its_lines[0]["outcome"]) if its_lines else entry.outcome or TIMEOUT] += 1
    strangers = [name for name in written if name not in known]
    if strangers:
        counts["lost"] += len(strangers)
        examples["lost"] = [
            *examples.get("lost", []),
            f"lost: the server ended {strangers[:EXAMPLES_KEPT]}, unknown here",
        ]
    return Audit(
        sent=len(known),
        outcomes=dict(sorted(outcomes.items())),
        hung=counts["hung"],
        duplicated=counts["duplicated"],
        disagreeing=counts["disagreeing"],
        lost=counts["lost"],
        examples=[example for kept in examples.values() for example in kept],
    )


def judge(entry: Entry, its_lines: Sequence[Mapping[str, Any]], outages: Sequence[tuple[float, float]]) -> list[str]:
    """What is wrong with one request, of: hung, duplicated, disagreeing, lost."""
    wrong = []
    if entry.ended_times > 1 or len(its_lines) > 1 or (entry.exact_tokens and entry.tokens > entry.exact_tokens):
        wrong.append("duplicated")
    if entry.outcome in ("", TIMEOUT):
        wrong.append("hung")
    elif entry.outcome in SERVER_WORDS and its_lines:
        if not agree(entry, its_lines[0]):
            wrong.append("disagreeing")
    elif entry.outcome == REFUSED and its_lines:
        wrong.append("disagreeing")
    elif (entry.outcome in SERVER_WORDS or entry.outcome == UNREACHABLE) and not during(entry, outages):
        wrong.append("lost")
    return wrong


def agree(entry: Entry, line: Mapping[str, Any]) -> bool:
    """The same word; and of an answer that came whole, as many tokens as the server sent and the client ordered."""
    if line["outcome"] != entry.outcome:
        return False
    if entry.outcome not in ("COMPLETED", "STOPPED"):
        return True
    if line["output_tokens"] != entry.tokens:
        return False
    return entry.outcome == "STOPPED" or entry.tokens >= entry.exact_tokens


def during(entry: Entry, outages: Sequence[tuple[float, float]]) -> bool:
    """Whether the request lived at a moment at which the server was not whole."""
    return any(entry.sent_s <= end and entry.ended_s >= begin for begin, end in outages)
