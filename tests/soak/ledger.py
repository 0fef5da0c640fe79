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
ENDED = "ENDED"  # a hostile request had an end, whichever
OBEYED = "OBEYED"  # a hostile request got what nobody may have
TIMEOUT = "TIMEOUT"  # no end within the client's patience
SERVER_WORDS = frozenset(
    {"COMPLETED", "STOPPED", "REJECTED_SATURATED", "REJECTED_INVALID", "EXPIRED", "CANCELLED", "FAILED"}
)
EXAMPLES_KEPT = 5
UNWRITTEN_S = 3.0  # before an outage: lines of the log that a killed process had not written yet
HONEST_IDS = "soak-"  # with a number: what hostile requests leave in the log has other ids


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
    wrong: bool = False  # another text than when nothing else ran
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
    wrong: int  # a text that differs from the one alone
    harmed: int  # FAILED although the server was whole
    examples: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.hung or self.duplicated or self.disagreeing or self.lost or self.wrong or self.harmed)


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
    strangers = [name for name in written if name.startswith(HONEST_IDS) and name not in known]
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
        wrong=counts["wrong"],
        harmed=counts["harmed"],
        examples=[example for kept in examples.values() for example in kept],
    )


def judge(entry: Entry, its_lines: Sequence[Mapping[str, Any]], outages: Sequence[tuple[float, float]]) -> list[str]:
    """What is wrong with one request, of: hung, duplicated, disagreeing, lost, wrong, harmed."""
    wrong = ["wrong"] if entry.wrong else []
    if entry.outcome == "FAILED" and not during(entry, outages):
        wrong.append("harmed")
    if entry.ended_times > 1 or len(its_lines) > 1 or (entry.exact_tokens and entry.tokens > entry.exact_tokens):
        wrong.append("duplicated")
    if entry.outcome in ("", TIMEOUT):
        wrong.append("hung")
    elif entry.outcome in SERVER_WORDS and its_lines:
        if not agree(entry, its_lines[0]):
            wrong.append("disagreeing")
    elif entry.outcome == REFUSED and its_lines:
        wrong.append("disagreeing")
    elif entry.outcome in SERVER_WORDS or entry.outcome == UNREACHABLE:
        unwritten_s = UNWRITTEN_S if entry.outcome in SERVER_WORDS else 0.0
        if not during(entry, [(begin - unwritten_s, end) for begin, end in outages]):
            wrong.append("lost")
    return wrong


def hostile_faults(entries: Iterable[Entry], outages: Sequence[tuple[float, float]]) -> list[str]:
    """Hostile requests that got what they must not have, or no end although the server was whole."""
    return [
        f"{entry.kind}: {entry.outcome or 'no end'} after {entry.ended_s - entry.sent_s:.1f} s {entry.detail}"
        for entry in entries
        if entry.outcome == OBEYED or (entry.outcome in ("", TIMEOUT) and not during(entry, outages))
    ]


def table(entries: Iterable[Entry]) -> list[str]:
    """A line for each kind of request: how many ended how, as their clients saw it."""
    kinds: dict[str, Counter[str]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind.partition(",")[0], Counter())[entry.outcome or TIMEOUT] += 1
    words = sorted({word for counts in kinds.values() for word in counts})
    widths = [max(len(word), 6) for word in words]
    rows = [("", words), *((kind, [str(counts[word] or "") for word in words]) for kind, counts in kinds.items())]
    return [
        f"{kind:<16}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for kind, cells in rows
    ]


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
