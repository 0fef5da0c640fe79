"""The raw result of one request: when what arrived, on this host's monotonic clock. Nothing is derived here.

One record is one JSON line; every figure of a report is computed from these lines alone, so that a run can be
read again with other limits or another definition of a metric.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COMPLETED = "COMPLETED"
TIMEOUT = "TIMEOUT"  # the client's own patience ended
UNREACHABLE = "UNREACHABLE"  # no connection, or it broke
INCOMPLETE = "INCOMPLETE"  # the stream ended without an error and without a token
ERROR = "ERROR"  # a server error that does not start with an outcome word
_OUTCOME_WORD = re.compile(r"(?:in ensemble '[^']*', )?([A-Z]+(?:_[A-Z]+)*):")


@dataclass(slots=True)
class RequestRecord:
    """Times are `time.monotonic_ns()`. `arrived_ns[i]` is when a response with `tokens[i]` tokens was read."""

    index: int
    intended_ns: int
    sent_ns: int = 0
    end_ns: int = 0
    arrived_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: str = COMPLETED
    error: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    input_words: int = 0
    server: dict[str, float] = field(default_factory=dict)  # the server's own stages, ms

    @property
    def output_tokens(self) -> int:
        return sum(self.tokens)


@dataclass(slots=True)
class ProcessRecord:
    """What one load-generating process says of itself: its share of the schedule and its own CPU, per second."""

    shard: int
    start_ns: int
    end_ns: int
    cpu_percent: list[float] = field(default_factory=list)
    users: int = 0
    unsent: int = 0  # due, but no user was free before the run was cut


def outcome_of(error_text: str) -> str:
    """`"EXPIRED: too late"` -> `"EXPIRED"`, also behind Triton's `in ensemble 'NAME', `; no such word -> `"ERROR"`."""
    found = _OUTCOME_WORD.match(error_text)
    return found.group(1) if found else ERROR


def as_line(record: RequestRecord | ProcessRecord) -> str:
    """One JSON line; the key `kind` tells records apart."""
    kind = "request" if isinstance(record, RequestRecord) else "process"
    return json.dumps({"kind": kind, **asdict(record)}, separators=(",", ":")) + "\n"


def read_lines(path: Path) -> Iterator[RequestRecord | ProcessRecord]:
    """The records of a file of such lines. Raises TypeError for a line with other keys."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            values: dict[str, Any] = json.loads(line)
            yield RequestRecord(**values) if values.pop("kind") == "request" else ProcessRecord(**values)
